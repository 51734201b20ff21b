"""IVON, the improved variational online Newton method: local training of a diagonal Gaussian q = N(m, 1/(lam (h + d))).

    theta  = m + noise / sqrt(lam (h + d))                the gradient g is taken at this sample of q
    h_hat  = lam (theta - m) g (h + d)                    an estimate of the likelihood's curvature, without bias
    g_bar <- b1 g_bar + (1 - b1) g
    h     <- b2 h + (1 - b2) h_hat + 1/2 (1 - b2)^2 (h - h_hat)^2 / (h + d)
    m     <- m - lr h_0 (g_bar / (1 - b1^t) + grad P) / (h + d)         t = 1, 2, ...; grad P = d (m - c)

It minimises lam E_q[L] + KL(q || N(c, 1/(lam d))), L being the mean loss: lam is the number of samples (over the
temperature), h its curvature per sample, d the precision of the prior over lam. h + d never falls below half of what
it was, whatever h_hat is.

Shen, Daheim, Cong, Nickl, Marconi, Bazan, Yokota, Gurevych, Cremers, Khan, Moellenhoff: Variational Learning is
Effective for Large Deep Networks, ICML 2024.

The authors' code scales the learning rate by h_0 + d, so that the first step is SGD's. Here d differs from parameter to
parameter, and the scale is h_0 alone: a step is never longer than SGD's where h has stayed at h_0 or grown.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.optimisers.base import Gradients, LocalOptimiser, clipped
from fl_lightning.params import Params, zeros, zip_map
from fl_lightning.training import Training, require_sgd


class State(NamedTuple):
    """The moving averages of gradient and curvature, g_bar and h."""

    gradient: Params
    curvature: Params


@dataclass(frozen=True)
class Ivon(LocalOptimiser):
    """A variational rule: training moves the mean of a Gaussian, and learns its precision on the way.

    Attributes:
        training: Learning rate and clipping; momentum and weight decay are the rule's own matter.
        samples: lam, one number for the client.
        prior: d, the precision of the prior over lam, one number per parameter.
        start: h before the first step, one number per parameter.
        scale: h_0, by which the learning rate is multiplied.
        gradient_decay: b1.
        curvature_decay: b2.
    """

    training: Training
    samples: Tensor
    prior: Params
    start: Params
    scale: float
    gradient_decay: float
    curvature_decay: float

    @property
    def draws(self) -> bool:
        return True

    def init(self, params: Params) -> State:
        return State(zeros(params), {name: self.start[name] for name in params})

    def point(self, params: Params, state: State, noise: Params) -> Params:
        def sampled(m: Tensor, h: Tensor, d: Tensor, e: Tensor) -> Tensor:
            return m + e / (self.samples * (h + d)).sqrt()

        return zip_map(sampled, params, state.curvature, self.prior, noise)

    def step(
        self, params: Params, state: State, gradients: Gradients, noise: Params, number: int
    ) -> tuple[Params, State]:
        b1, b2 = self.gradient_decay, self.curvature_decay
        grad = gradients.likelihood
        if self.training.clip_norm is not None:
            grad = clipped(grad, self.training.clip_norm)

        def renewed(h: Tensor, d: Tensor, e: Tensor, g: Tensor) -> Tensor:
            precision = h + d
            found = e * (self.samples * precision).sqrt() * g  # lam (theta - m) g (h + d)
            return b2 * h + (1 - b2) * found + 0.5 * (1 - b2) ** 2 * (h - found).square() / precision

        gradient = zip_map(lambda old, g: b1 * old + (1 - b1) * g, state.gradient, grad)
        curvature = zip_map(renewed, state.curvature, self.prior, noise, grad)
        correction, lr = 1 - b1 ** (number + 1), self.training.lr * self.scale
        direction = zip_map(lambda g: g / correction, gradient)
        if gradients.penalty is not None:
            direction = zip_map(torch.add, direction, gradients.penalty)
        moved = zip_map(lambda m, s, h, d: m - lr * s / (h + d), params, direction, curvature, self.prior)
        return moved, State(gradient, curvature)


def require_settings(curvature_start: float, gradient_decay: float, curvature_decay: float) -> None:
    """Refuse values with which the rule does not work; a method's fields have these names."""
    start, infinity = curvature_start, float("inf")
    require(0 < start < infinity, f"method.curvature_start must be finite and > 0, got {start}")
    require(0 <= gradient_decay < 1, f"method.gradient_decay must lie in [0, 1), got {gradient_decay}")
    require(0 <= curvature_decay <= 1, f"method.curvature_decay must lie in [0, 1], got {curvature_decay}")


def require_own_momentum(training: Training) -> None:
    """Refuse settings of SGD that the rule has in another form."""
    require_sgd(training, "IVON is an optimiser by itself")
    require(
        training.momentum == 0,
        "IVON averages gradients by itself (method.gradient_decay), expected training.momentum 0, got "
        f"{training.momentum}; set --training.momentum 0",
    )
    require(
        training.weight_decay == 0,
        "IVON has a prior by itself (method.prior), expected training.weight_decay 0, got "
        f"{training.weight_decay}; set --training.weight_decay 0",
    )
