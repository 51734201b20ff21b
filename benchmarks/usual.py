"""A client's training as one writes it in PyTorch: `torch.optim.SGD`, `backward`, the prior loss as a sum that autograd
differentiates. The rounds around it are those of `bare`, which trains by hand in as few passes as there can be.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.bare import Batches, Prior


def by_optimiser(model: nn.Module, leaves: list[Tensor], batches: Batches, lr: float) -> None:
    """Plain SGD."""
    optimiser = torch.optim.SGD(leaves, lr=lr)
    for x, y, _ in batches:
        optimiser.zero_grad()
        cross_entropy(model(x), y).backward()
        optimiser.step()


def by_optimiser_with_prior(
    model: nn.Module, leaves: list[Tensor], batches: Batches, lr: float, prior: Prior | None
) -> list[Tensor]:
    """The squares of the likelihood's gradient are summed before the prior's is added to it."""
    fisher = [torch.zeros_like(leaf) for leaf in leaves]
    optimiser = torch.optim.SGD(leaves, lr=lr)
    for x, y, share in batches:
        optimiser.zero_grad()
        cross_entropy(model(x), y).backward()
        for part, leaf in zip(fisher, leaves, strict=True):
            assert leaf.grad is not None
            part += share * leaf.grad**2
        if prior is not None:
            terms = zip(prior.stiffness, leaves, prior.centre, strict=True)
            pulls = [(weight * (leaf - centre) ** 2).sum() for weight, leaf, centre in terms]
            (torch.stack(pulls).sum() / 2).backward()
        optimiser.step()
    return fisher
