"""What a rule of local training is: where each gradient is taken, and what a client does with it.

    point_t          = point(theta_t, state_t, noise_t)                     where the likelihood's gradient is taken
    g_t, grad P_t    = grad L(point_t; batch_t), grad P(theta_t)
    theta, state    <- step(theta_t, state_t, (g_t, grad P_t), noise_t, t)    t = 0, 1, ...

Pure functions of one client, which also work under `torch.func.vmap`: every engine carries them out, with the same
noise for the same (seed, round, client, step). SGD is one of them, for which the engines have a shortcut. Where the
learning rate changes within a round, the rule is made anew for every step, with the rate of the step in its settings.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.params import Params, zip_map


class Gradients(NamedTuple):
    """The gradients of a step.

    Attributes:
        likelihood: Of the batch's mean loss, at the rule's point.
        penalty: Of the method's penalty, at theta; None without one.
    """

    likelihood: Params
    penalty: Params | None = None

    def total(self) -> Params:
        """Of the whole local loss, for rules that treat both parts alike."""
        return self.likelihood if self.penalty is None else zip_map(torch.add, self.likelihood, self.penalty)


@dataclass(frozen=True)
class LocalOptimiser(ABC):
    """One local optimiser, with the settings and tensors of one client in one round."""

    @property
    def draws(self) -> bool:
        """Whether it needs noise: a standard normal number per parameter and step."""
        return False

    def init(self, params: Params) -> Any:
        """What it remembers before the first step: a tree of tensors, the same structure after every step."""
        return ()

    def point(self, params: Params, state: Any, noise: Params) -> Params:
        """Where the gradient of the likelihood is taken."""
        return params

    @abstractmethod
    def step(self, params: Params, state: Any, gradients: Gradients, noise: Params, number: int) -> tuple[Params, Any]:
        """The parameters and the memory after step `number`, counted from 0; for bias corrections add 1."""


def descended(params: Params, direction: Params, rate: Any) -> Params:
    """The parameters after a step, p - rate * direction; rate is a number, or under vmap a tensor that holds one."""
    if isinstance(rate, Tensor):
        return zip_map(lambda p, g: p - rate * g, params, direction)
    return zip_map(lambda p, g: p.sub(g, alpha=rate), params, direction)


def clipped(grad: Params, largest: float) -> Params:
    """The gradient, shortened to this norm if it is longer; as torch.nn.utils.clip_grad_norm_ has it."""
    norm = torch.stack([g.square().sum() for g in grad.values()]).sum().sqrt()
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    return zip_map(lambda g: g * scale, grad)
