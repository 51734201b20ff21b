"""The diagonal Fisher: squared gradients along the path, or at its end."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.batching import couples_samples
from fl_lightning.curvature.fisher import diagonal_fisher
from fl_lightning.curvature.form import Form, Measuring
from fl_lightning.errors import require
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.method import Local, Server, Step
from fl_lightning.params import Params, zeros, zip_map
from fl_lightning.task import Task, Weights
from fl_lightning.training import Training


class DiagonalFisher(Form):
    """F_n = (1/E) sum_t (b_t / m_n) g_t^2 online, that of all samples at the final model offline."""

    uses: ClassVar = frozenset({"fisher", "damping_place", "damping_in_prior", "normalisation", "round_scaling"})
    needs_likelihood: ClassVar = False

    def check(self, name: str, training: Training, server: Server) -> None:
        require_independent_samples(self, server)

    def nothing(self, params: Params, task: Task | None = None, x: Tensor | None = None) -> Diagonal:
        return Diagonal(params, zeros(params))

    def measured(self, local: Local, start: Params) -> Diagonal:
        if self.measuring.online:
            return Diagonal(local.params, local.trace)
        weights = Weights(local.params, local.buffers)
        batch_size = local.training.batch_size
        fisher = diagonal_fisher(local.task, weights, local.data, self.measuring.fisher, batch_size)
        return Diagonal(local.params, fisher)

    def scale(self, num_epochs: int) -> float:
        return 1 / num_epochs if self.measuring.mean_over_epochs and self.measuring.online else 1.0

    def per_sample(self, training: Training, sizes: Sequence[int]) -> float:
        batch = mean_batch(training, sizes) if self.measuring.fisher == "minibatch" else 1.0
        return batch * mean_over_steps(self.measuring, training, sizes)

    def trace(self, start: Params) -> Params:
        return zeros(start) if self.observes else {}

    def observe(self, trace: Params, step: Step) -> Params:
        if not trace:  # it is measured at the end, and somebody else observes
            return trace
        share = 1.0 if self.measuring.equal_steps else step.fraction
        if step.squares is not None:
            return zip_map(lambda t, s: t + s * share, trace, step.squares)
        if isinstance(step.fraction, float) and isinstance(share, float):  # of one client: under vmap it is a tensor
            grads = [step.grad[name] for name in trace]
            torch._foreach_addcmul_(list(trace.values()), grads, grads, value=share)
            return trace
        return zip_map(lambda t, g: t + g.square() * share, trace, step.grad)

    @property
    def observes(self) -> bool:
        return self.measuring.online

    @property
    def needs_squares(self) -> bool:
        return self.measuring.fisher == "per_sample" and self.measuring.online

    @property
    def extra_passes(self) -> int:
        return 0 if self.measuring.online else 1


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


def require_independent_samples(form: Form, server: Server) -> None:
    """Squared gradients of single samples exist only if samples do not depend on each other."""
    require(
        form.measuring.fisher == "minibatch" or not couples_samples(server.task, server.holdout),
        "method.fisher per_sample needs a model whose samples do not depend on each other, as they do with "
        "BatchNorm; use --method.fisher minibatch or another model",
    )
