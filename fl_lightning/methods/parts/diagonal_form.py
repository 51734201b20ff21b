"""The diagonal Fisher: squared gradients along the path, or at its end."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.curvature.fisher import FisherKind, accumulate, fisher_at_end
from fl_lightning.data.model_checks import couples_samples
from fl_lightning.errors import require
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.method import Local, Server, Step, Traits
from fl_lightning.methods.parts.curvature_form import Form, Measuring
from fl_lightning.models.task import Task
from fl_lightning.params import Params, zeros
from fl_lightning.training import Training


class DiagonalFisher(Form):
    """F_n = (1/E) sum_t (b_t / m_n) g_t^2 online, that of all samples at the final model offline."""

    uses: ClassVar = frozenset({"fisher", "damping_place", "damping_in_prior", "normalisation", "round_scaling"})
    needs_likelihood: ClassVar = False

    def check(self, name: str, training: Training, server: Server) -> None:
        require_independent_samples(self.measuring.fisher, server)

    def nothing(self, params: Params, task: Task | None = None, x: Tensor | None = None) -> Diagonal:
        return Diagonal(params, zeros(params))

    def measured(self, local: Local, start: Params) -> Diagonal:
        if self.measuring.online:
            return Diagonal(local.params, local.path_statistics)
        return Diagonal(local.params, fisher_at_end(local, self.measuring.fisher))

    def scale(self, num_epochs: int) -> float:
        return 1 / num_epochs if self.measuring.mean_over_epochs and self.measuring.online else 1.0

    def per_sample(self, training: Training, sizes: Sequence[int]) -> float:
        batch = mean_batch(training, sizes) if self.measuring.fisher == "minibatch" else 1.0
        return batch * mean_over_steps(self.measuring, training, sizes)

    def path_statistics(self, start: Params) -> Params | None:
        return zeros(start) if self.measuring.online else None

    def observe(self, statistics: Params, step: Step) -> Params:
        if self.measuring.equal_steps:
            one = torch.ones_like(step.fraction) if isinstance(step.fraction, Tensor) else 1.0
            step = step._replace(fraction=one)
        return accumulate(statistics, step)

    @property
    def traits(self) -> Traits:
        online = self.measuring.online
        return Traits(extra_passes=0 if online else 1, needs_squares=online and self.measuring.fisher == "per_sample")


def mean_batch(training: Training, sizes: Sequence[int]) -> float:
    """Samples per step, over all clients: squared minibatch gradients are about that many times too small.

    >>> mean_batch(Training(batch_size=4), [9, 3, 0])
    3.0
    """
    return sum(sizes) / sum(training.steps_per_epoch(size) for size in sizes if size)


def mean_over_steps(measuring: Measuring, training: Training, sizes: Sequence[int]) -> float:
    """What makes a mean of curvature that is summed along a path over epochs, or over steps."""
    if not measuring.online or measuring.mean_over_epochs:
        return 1.0
    if not measuring.equal_steps:
        return 1 / training.epochs
    steps = sum(size * training.steps_per_epoch(size) for size in sizes if size) / sum(sizes)  # as models are weighted
    return 1 / (training.epochs * steps)


def require_independent_samples(fisher: FisherKind, server: Server) -> None:
    """Squared gradients of single samples exist only if samples do not depend on each other."""
    require(
        fisher == "minibatch" or not couples_samples(server.task, server.holdout),
        "method.fisher per_sample needs a model whose samples do not depend on each other, as they do with "
        "BatchNorm; use --method.fisher minibatch or another model",
    )
