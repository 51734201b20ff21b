"""SGD as a pure function of one client, in the order of torch.optim.SGD after gradient clipping.

g        <- clip(g + grad P) + weight_decay theta
velocity <- momentum velocity + g              the velocity starts at zero in every round
theta    <- theta - lr velocity
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fl_lightning.optimisers.base import Gradients, LocalOptimiser, clipped, descended
from fl_lightning.params import Params, zeros, zip_map
from fl_lightning.penalty import Quadratic
from fl_lightning.training import Training


@dataclass(frozen=True)
class Sgd(LocalOptimiser):
    """Plain or heavy-ball SGD; the Lightning engine uses torch.optim.SGD for it, the functional one a shortcut."""

    training: Training

    def init(self, params: Params) -> Params:
        return zeros(params) if self.training.momentum else {}

    def step(
        self, params: Params, state: Params, gradients: Gradients, noise: Params, number: int
    ) -> tuple[Params, Params]:
        return sgd(params, gradients.total(), state, self.training)


def is_plain(training: Training) -> bool:
    """Whether an update is theta - lr * gradient and nothing else, with one lr for all steps."""
    alone = training.momentum == 0 and training.weight_decay == 0 and training.clip_norm is None
    return alone and training.is_steady


def moving(params: Params, frozen: frozenset[str]) -> Params:
    """Those that are not frozen."""
    return {name: value for name, value in params.items() if name not in frozen} if frozen else params


def with_zeros(grad: Params, params: Params) -> Params:
    """The gradient of all parameters: zero for those that are frozen, of which none was taken."""
    if len(grad) == len(params):
        return grad
    return {name: grad[name] if name in grad else torch.zeros_like(value) for name, value in params.items()}


def sgd(params: Params, grad: Params, velocity: Params, training: Training) -> tuple[Params, Params]:
    """One update: clip, add the weight decay, fold into the velocity, step.

    Args:
        params: theta.
        grad: Gradient of the whole local loss, penalty included.
        velocity: Momentum buffer, zeros at first; returned unchanged without momentum.
        training: Learning rate and options.

    Returns:
        The new parameters and the new velocity.
    """
    if training.clip_norm is not None:
        grad = clipped(grad, training.clip_norm)
    if training.weight_decay:
        grad = zip_map(lambda g, p: g.add(p, alpha=training.weight_decay), grad, params)
    if training.momentum:
        velocity = zip_map(lambda v, g: training.momentum * v + g, velocity, grad)
        grad = velocity
    return descended(params, grad, training.lr), velocity


@dataclass(frozen=True)
class ImplicitPenalty(LocalOptimiser):
    """SGD on the likelihood with an implicit step on a quadratic penalty: stable however stiff the penalty is.

        theta' = SGD(theta, g)                          without the penalty
        theta <- (theta' + s c) / (1 + s)               s = lr a, for the penalty P = 1/2 sum_j a_j (theta_j - c_j)^2

    The second line minimises P(theta) + ||theta - theta'||^2 / (2 lr). Where lr a is small, both are SGD's step up to
    O((lr a)^2); where it exceeds 2, SGD diverges, and this goes to the centre.

    Attributes:
        training: The settings of SGD.
        penalty: c and a, one stiffness per parameter.
    """

    training: Training
    penalty: Quadratic

    def init(self, params: Params) -> Params:
        return Sgd(self.training).init(params)

    def step(
        self, params: Params, state: Params, gradients: Gradients, noise: Params, number: int
    ) -> tuple[Params, Params]:
        moved, velocity = Sgd(self.training).step(params, state, Gradients(gradients.likelihood), noise, number)
        stiffness = self.penalty.stiffness
        assert isinstance(stiffness, dict)

        def pulled(value: Tensor, centre: Tensor, a: Tensor) -> Tensor:
            s = self.training.lr * a
            return value + (centre - value) * (s / (1 + s))

        return zip_map(pulled, moved, self.penalty.centre, stiffness), velocity
