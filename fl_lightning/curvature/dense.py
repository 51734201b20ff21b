"""Forms that need the whole curvature matrix: full, or its eigenvalues as a diagonal (e-full).

The matrix of the round is the Hessian (softmax regression) or the Gauss-Newton matrix (other networks), at the final
model or averaged over the models along the local path.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import ClassVar

from torch import Tensor

from fl_lightning.curvature import e_full, full
from fl_lightning.curvature.diagonal import mean_over_steps
from fl_lightning.curvature.form import Form
from fl_lightning.curvature.full import PathStep
from fl_lightning.errors import require
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.form import Gaussian
from fl_lightning.gaussian.full import Full
from fl_lightning.likelihoods.likelihood import require_curvature
from fl_lightning.method import Local, Server, Step
from fl_lightning.params import Params, count, flatten, unflatten, zeros
from fl_lightning.system import memory
from fl_lightning.task import Task, Weights
from fl_lightning.training import Training

# Multiplications for one client's curvature in one round that are still bearable: about half an hour of one CPU core.
MOST_WORK = 5e13


class FullMatrix(Form):
    """F_n is a d x d matrix: at the final model, or sum_t s_t C(theta_t; batch_t) with theta_t before step t."""

    uses: ClassVar = frozenset({"damping_in_prior", "normalisation", "round_scaling"})

    def check(self, name: str, training: Training, server: Server) -> None:
        """Refuse a matrix for which there is not enough memory or time, naming what it would take."""
        require_curvature(server.task.likelihood)
        task, sizes = server.task, [size for size in server.sizes if size > 0]
        largest = max(sizes, default=0)
        online = self.measuring.online
        epochs = training.epochs if online else 1
        path = (
            epochs * training.steps_per_epoch(largest, server.smallest_batch) * task.num_params * task.dtype.itemsize
            if online
            else 0
        )
        one = task.num_params**2 * task.dtype.itemsize
        needed = path + self.matrices(len(sizes), task)
        free = memory.available(task.device)
        require(
            free is None or needed <= free,
            f"method.curvature_form {name} of {task.num_params:,} parameters takes {memory.in_words(one)} per matrix "
            f"and about {memory.in_words(needed)} in all for {len(sizes)} clients, but {memory.in_words(free or 0)} "
            "are free; use --method.curvature_form diagonal, a smaller model such as --model softmax, or fewer clients",
        )
        work = full.work(task, server.holdout, largest * epochs)
        require(
            work <= MOST_WORK,
            f"method.curvature_form {name} of {task.num_params:,} parameters takes about {work:.0e} multiplications "
            f"per client and round, more than {MOST_WORK:.0e}; use --method.curvature_form diagonal, a smaller model "
            "such as --model softmax, or fewer samples (data.subset)",
        )

    def matrices(self, clients: int, task: Task) -> int:
        """Bytes of all matrices that are in memory at once."""
        # Every client's report, the server's state before and after, the block products, and the sum in float64, whose
        # memory becomes its Cholesky factor.
        return (clients + 3) * task.num_params**2 * task.dtype.itemsize + task.num_params**2 * 8

    def nothing(self, params: Params, task: Task | None = None, x: Tensor | None = None) -> Gaussian:
        size, like = count(params), next(iter(params.values()))
        return Full(params, like.new_zeros(1, 1).expand(size, size))  # takes no memory

    def measured(self, local: Local, start: Params) -> Gaussian:
        if self.measuring.online:
            matrix = full.along(local.task, local.data, self._steps(local, start))
        else:
            matrix = full.at(local.task, Weights(local.params, local.buffers), local.data)
        return self.in_form(matrix, local.params)

    def in_form(self, matrix: Tensor, params: Params) -> Gaussian:
        """The Gaussian that is made of the matrix."""
        return Full(params, matrix)

    def _steps(self, local: Local, start: Params) -> Iterator[PathStep]:
        path: Sequence[Tensor] = local.trace
        before = chain([start], (unflatten(vector, start) for vector in path[:-1]))
        for params, places in zip(before, local.plan.all_batches(), strict=True):
            share = 1.0 if self.measuring.equal_steps else len(places) / len(local.data)
            yield PathStep(Weights(params, local.buffers), places, share)

    def scale(self, num_epochs: int) -> float:
        return 1 / num_epochs if self.measuring.mean_over_epochs and self.measuring.online else 1.0

    def per_sample(self, training: Training, sizes: Sequence[int]) -> float:
        return mean_over_steps(self.measuring, training, sizes)

    def trace(self, start: Params) -> tuple[Tensor, ...]:
        return ()

    def observe(self, trace: tuple[Tensor, ...], step: Step) -> tuple[Tensor, ...]:
        """The models after every step, flat: curvature is taken after training, at the models along its path."""
        return (*trace, flatten(step.params))

    @property
    def observes(self) -> bool:
        return self.measuring.online

    @property
    def one_by_one(self) -> bool:
        return self.measuring.online


class EigenvaluesAsDiagonal(FullMatrix):
    """F_n is the vector of the matrix's eigenvalues, used as if it were a diagonal."""

    uses: ClassVar = frozenset({"eigen_order", "damping_place", "damping_in_prior", "normalisation", "round_scaling"})

    def matrices(self, clients: int, task: Task) -> int:
        # The matrix, the block products, the eigensolver's copy and its workspace.
        return 4 * task.num_params**2 * task.dtype.itemsize

    def nothing(self, params: Params, task: Task | None = None, x: Tensor | None = None) -> Gaussian:
        return Diagonal(params, zeros(params))

    def in_form(self, matrix: Tensor, params: Params) -> Gaussian:
        return Diagonal(params, e_full.as_diagonal(matrix, params, self.measuring.eigen_order))
