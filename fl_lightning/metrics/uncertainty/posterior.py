"""The Laplace posterior of a federated model: N(mu, P^-1) with P = m/T H + tau I.

mu is the server's final model, H the mean curvature per sample of all clients' data there (`curvature.final_round`), m
the number of samples, tau the precision of the prior N(0, I/tau), T the temperature of the likelihood. As in
laplace-torch, T divides the curvature alone. The marginal likelihood is Laplace's:

    ln p(D) = -m L(mu)/T - tau/2 |mu|^2 - 1/2 (ln det P - d ln tau)

Parameters that are in no block (all but the last layer's, with that form) are known for certain.

MacKay: A Practical Bayesian Framework for Backpropagation Networks, 1992. Daxberger et al.: Laplace Redux, 2021.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from fl_lightning import streams
from fl_lightning.curvature import layers
from fl_lightning.errors import require
from fl_lightning.metrics.metric import KINDS
from fl_lightning.metrics.uncertainty import predictive
from fl_lightning.metrics.uncertainty.eigenblocks import Block, dense_block, diagonal_block, kron_block
from fl_lightning.metrics.uncertainty.linearised import last_call, linearise
from fl_lightning.metrics.uncertainty.predictive import Prediction
from fl_lightning.metrics.uncertainty.sample_curvature import GRADIENTS, INPUTS, MATRIX, Pooled
from fl_lightning.metrics.uncertainty.settings import Form, Source
from fl_lightning.models.inputs import Inputs, each, part
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params


class Member(NamedTuple):
    """A model of an ensemble, and its share."""

    weights: Weights
    share: float


class Scaling(NamedTuple):
    """How bytes become inputs, per channel: scaled to [0, 1], the mean taken off, divided by the deviation."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class Posterior:
    """A Gaussian posterior over the parameters of a network, and the predictions that follow from it.

    Attributes:
        task: The network.
        weights: mu, and the network's buffers.
        form: Of the precision.
        blocks: H by its eigenvectors, part by part.
        samples: m.
        loss: L(mu), the mean training loss.
        prior_precision: tau.
        temperature: T, of the likelihood.
        logit_temperature: By which the mean's logits are divided for the predictive `temperature`, or None.
        members: Models of the ensemble, possibly none.
        scaling: Of inputs that are bytes.
        seed: Key of all draws.
        draws: How many draws of the network `nn` takes.
        glm_draws: How many of the logits `glm_mc` takes.
        source: Where H is from.
    """

    task: Task
    weights: Weights
    form: Form
    blocks: tuple[Block, ...]
    samples: int
    loss: float
    prior_precision: float = 1.0
    temperature: float = 1.0
    logit_temperature: float | None = None
    members: tuple[Member, ...] = ()
    scaling: Scaling = field(default_factory=Scaling)
    seed: int = 0
    draws: int = 30
    glm_draws: int = 100
    source: Source = "final_round"

    def with_prior(self, prior_precision: float) -> Self:
        """The same with another prior, which costs nothing.

        Raises:
            UserError: If the precision would be singular.
        """
        found = replace(self, prior_precision=prior_precision)
        flat = sum(int((p <= 0).sum()) for p in found.precisions())
        require(
            flat == 0,
            f"the posterior's precision is singular: {flat:,} of {self.size:,} directions have neither curvature nor "
            f"prior (prior precision {prior_precision:g}); give --uncertainty.prior_precision a number above 0, "
            "holdout or marglik",
        )
        return found

    @property
    def size(self) -> int:
        """How many parameters are uncertain."""
        return sum(block.spectrum.numel() for block in self.blocks)

    def precisions(self) -> Iterator[Tensor]:
        """The eigenvalues of P, block by block."""
        for block in self.blocks:
            yield block.spectrum * (self.samples / self.temperature) + self.prior_precision

    def inverses(self) -> list[Tensor]:
        """The eigenvalues of the covariance, block by block."""
        return [p.reciprocal() for p in self.precisions()]

    def log_determinant(self) -> float:
        """The logarithm of det P."""
        return sum(float(p.log().sum()) for p in self.precisions())

    def log_marginal_likelihood(self) -> float:
        """The logarithm of p(D), by Laplace's method."""
        uncertain = [name for block in self.blocks for name in block.names]
        square = sum(float(self.weights.params[name].double().square().sum()) for name in uncertain)
        occam = self.log_determinant() - self.size * math.log(self.prior_precision)
        fit = -self.samples * self.loss / self.temperature
        return fit - self.prior_precision * square / 2 - occam / 2

    def draw(self, number: int) -> Params:
        """The parameters of one draw from the posterior; the same number is always the same draw."""
        params = dict(self.weights.params)
        for place, (block, precision) in enumerate(zip(self.blocks, self.precisions(), strict=True)):
            stream = streams.generator(self.seed, "posterior", number, place)
            noise = torch.randn(precision.shape, generator=stream, dtype=torch.float64).to(precision.device)
            for name, offset in block.offset(noise / precision.sqrt(), params).items():
                mean = params[name]
                params[name] = (mean.double() + offset).to(mean.dtype)
        return params

    def inputs(self, x: Inputs) -> Inputs:
        """Inputs as the network takes them: bytes are standardised as in training, tokens stay what they are."""
        return each(self._input, x)

    def _input(self, x: Tensor) -> Tensor:
        x = x.to(self.task.device)
        if x.dtype == torch.long:
            return x
        if x.is_floating_point():
            return x.to(self.task.dtype)
        mean, std = (torch.tensor(v, dtype=self.task.dtype, device=x.device) for v in self.scaling)
        shape = (-1, *[1] * (x.dim() - 2))
        return (x.to(self.task.dtype) / 255 - mean.view(shape)) / std.view(shape)

    def predict(self, x: Inputs, kind: str = "probit") -> Prediction:
        """Class probabilities of a batch of inputs, and how far they may be off.

        Args:
            x: Inputs: bytes as they are stored, or what the network takes; several as a tuple or dict.
            kind: map, temperature, probit, glm_mc, nn or ensemble.
        """
        require(kind in KINDS, f"predictive must be one of {', '.join(KINDS)}, got {kind!r}")
        expected = self.task_input_error(x)
        require(expected == "", expected)
        return predictive.predict(self, self.inputs(x), (kind,), spread=True)[kind]

    def task_input_error(self, x: Inputs) -> str:
        """Why the network cannot take these inputs; empty if it can."""
        try:
            with self.task.evaluating():
                self.task.logits(self.weights, self.inputs(part(x, slice(0, 1))))
        except (RuntimeError, IndexError, TypeError) as error:
            given = each(lambda one: tuple(one.shape[1:]), x)
            return (
                f"expected inputs of the shape that the network was trained on, got {given} "
                f"({' '.join(str(error).split())[:80]}); give a batch, samples first"
            )
        return ""


def build(task: Task, weights: Weights, form: Form, pooled: Pooled, x: Inputs) -> Posterior:
    """The posterior with the prior precision 1, from what the final round has brought.

    Args:
        task: The network.
        weights: mu.
        form: Of the curvature.
        pooled: The curvature of all clients' data.
        x: One input, by which the layers are found.
    """
    with task.evaluating():
        recording = layers.record(task, weights, x)
    named: list[tuple[str, str | None]] = [(call.weight, call.bias) for call in recording.calls]
    others = [(name, None) for name in recording.rest]
    curvature = pooled.curvature
    blocks: Sequence[Block]
    match form:
        case "diagonal":
            flat = curvature | {name: curvature[name].reshape(-1, 1) for name in recording.rest}
            blocks = [diagonal_block(*names, flat) for names in [*named, *others]]
        case "kron":
            blocks = [
                kron_block(*names, curvature[f"{INPUTS}{names[0]}"], curvature[f"{GRADIENTS}{names[0]}"])
                for names in named
            ]
        case "last_layer":
            last = last_call(recording)
            blocks = [dense_block(curvature[MATRIX], ((last.weight, last.bias),), weights.params)]
        case "full":
            blocks = [dense_block(curvature[MATRIX], (*named, *others), weights.params)]
    return Posterior(task, weights, form, tuple(blocks), pooled.samples, pooled.loss)


__all__ = ["Member", "Posterior", "Prediction", "Scaling", "build", "linearise"]
