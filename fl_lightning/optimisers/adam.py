"""Adam and AdamW as pure functions of one client, in the order of torch.optim after gradient clipping.

    g <- clip(g + grad P), and for adam  g <- g + weight_decay theta
    m <- beta1 m + (1 - beta1) g                v <- beta2 v + (1 - beta2) g^2         both start at zero in every round
    theta <- (1 - lr weight_decay) theta                                               adamw alone
    theta <- theta - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps)          t = 1, 2, ...

Kingma, Ba: Adam: A Method for Stochastic Optimization, ICLR 2015.
Loshchilov, Hutter: Decoupled Weight Decay Regularization, ICLR 2019.

A method's penalty is part of the loss, so that its gradient goes through the moments as that of the likelihood does.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fl_lightning.optimisers.base import Gradients, LocalOptimiser, clipped
from fl_lightning.params import Params, zeros, zip_map
from fl_lightning.training import Training


class Moments(NamedTuple):
    """The moving averages m of the gradients and v of their squares."""

    first: Params
    second: Params


@dataclass(frozen=True)
class Adam(LocalOptimiser):
    """Adam, or AdamW; the Lightning engine uses torch.optim's for it."""

    training: Training

    def init(self, params: Params) -> Moments:
        return Moments(zeros(params), zeros(params))

    def step(
        self, params: Params, state: Moments, gradients: Gradients, noise: Params, number: int
    ) -> tuple[Params, Moments]:
        training, grad = self.training, gradients.total()
        b1, b2, decay = training.beta1, training.beta2, training.weight_decay
        if training.clip_norm is not None:
            grad = clipped(grad, training.clip_norm)
        if decay and training.optimiser == "adam":
            grad = zip_map(lambda g, p: g.add(p, alpha=decay), grad, params)
        elif decay:
            params = zip_map(lambda p: p * (1 - training.lr * decay), params)
        first = zip_map(lambda m, g: m.lerp(g, 1 - b1), state.first, grad)
        second = zip_map(lambda v, g: (v * b2).addcmul(g, g, value=1 - b2), state.second, grad)
        size, root = training.lr / (1 - b1 ** (number + 1)), math.sqrt(1 - b2 ** (number + 1))

        def moved(p: Tensor, m: Tensor, v: Tensor) -> Tensor:
            scale = v.sqrt() / root + training.eps
            return p - size * m / scale if isinstance(size, Tensor) else p.addcdiv(m, scale, value=-size)

        return zip_map(moved, params, first, second), Moments(first, second)
