"""The online Fisher of one client: squared gradients along its path."""

import torch

from fl_lightning.method import Step
from fl_lightning.params import Params, zip_map


def accumulate(fisher: Params, step: Step) -> Params:
    """F + (b/m) g^2: of the minibatch, or of single samples where the step has their squares."""
    if step.squares is None and isinstance(step.fraction, float):  # one client alone: in place
        for name, total in fisher.items():
            total.addcmul_(step.grad[name], step.grad[name], value=step.fraction)
        return fisher
    squares = step.squares if step.squares is not None else zip_map(torch.square, step.grad)
    return zip_map(lambda total, square: total + square * step.fraction, fisher, squares)
