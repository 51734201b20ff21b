"""Forms that need the whole curvature matrix: full, or its eigenvalues as a diagonal (e-full).

The matrix of the round is the Hessian (softmax regression) or the Gauss-Newton matrix (other networks), at the final
model or averaged over the models along the local path.
"""

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor

from fl_lightning.curvature import full
from fl_lightning.errors import require
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.full import Full
from fl_lightning.method import Local, Server, Step, Traits
from fl_lightning.methods.parts.curvature_form import Form
from fl_lightning.methods.parts.diagonal_form import mean_over_steps
from fl_lightning.models.likelihoods.base import require_curvature
from fl_lightning.models.task import Task
from fl_lightning.params import Params, flatten, zeros
from fl_lightning.system import memory
from fl_lightning.training import Training

# Multiplications for one client's curvature in one round that are still bearable: about half an hour of one CPU core.
MOST_WORK = 5e13


class FullMatrix(Form):
    """F_n is a d x d matrix: at the final model, or sum_t s_t C(theta_t; batch_t) with theta_t before step t."""

    uses: ClassVar = frozenset({"damping_in_prior", "normalisation", "round_scaling"})

    def check(self, name: str, training: Training, server: Server) -> None:
        require_feasible(name, self.measuring.online, training, server)

    def nothing(self, params: Params, task: Task | None = None, x: Tensor | None = None) -> Gaussian:
        return Full.flat(params)

    def measured(self, local: Local, start: Params) -> Gaussian:
        equal_steps = self.measuring.equal_steps
        matrix = full.along_path(local, start, equal_steps) if self.measuring.online else full.at_end(local)
        return self.in_form(matrix, local.params)

    def in_form(self, matrix: Tensor, params: Params) -> Gaussian:
        """The Gaussian that is made of the matrix."""
        return Full(params, matrix)

    def scale(self, num_epochs: int) -> float:
        return 1 / num_epochs if self.measuring.mean_over_epochs and self.measuring.online else 1.0

    def per_sample(self, training: Training, sizes: Sequence[int]) -> float:
        return mean_over_steps(self.measuring, training, sizes)

    def path_statistics(self, start: Params) -> tuple[Tensor, ...] | None:
        return () if self.measuring.online else None

    def observe(self, statistics: tuple[Tensor, ...], step: Step) -> tuple[Tensor, ...]:
        """The models after every step, flat: curvature is taken after training, at the models along its path."""
        return (*statistics, flatten(step.params))

    @property
    def traits(self) -> Traits:
        return Traits(extra_passes=1, one_by_one=self.measuring.online)


class EigenvaluesAsDiagonal(FullMatrix):
    """F_n is the vector of the matrix's eigenvalues, used as if it were a diagonal."""

    uses: ClassVar = frozenset({"eigen_order", "damping_place", "damping_in_prior", "normalisation", "round_scaling"})

    def nothing(self, params: Params, task: Task | None = None, x: Tensor | None = None) -> Gaussian:
        return Diagonal(params, zeros(params))

    def in_form(self, matrix: Tensor, params: Params) -> Gaussian:
        return Diagonal(params, full.as_diagonal(matrix, params, self.measuring.eigen_order))


def require_feasible(name: str, online: bool, training: Training, server: Server) -> None:
    """Refuse a matrix for which there is not enough memory or time, naming what it would take.

    Args:
        name: Of the form: full or e_full.
        online: Whether the matrix is summed along the path.
        training: How clients train.
        server: What the server has.
    """
    require_curvature(server.task.likelihood)
    task, sizes = server.task, [size for size in server.sizes if size > 0]
    largest, epochs = max(sizes, default=0), training.epochs if online else 1
    steps = epochs * training.steps_per_epoch(largest, server.smallest_batch) if online else 0
    one = task.num_params**2 * task.dtype.itemsize
    needed = steps * task.num_params * task.dtype.itemsize + _matrices(name, len(sizes), task)
    what = f"method.curvature_form {name} of {task.num_params:,} parameters for {len(sizes)} clients"
    remedy = "use --method.curvature_form diagonal, a smaller model such as --model softmax, or fewer clients"
    memory.require_room(f"{what}, {memory.in_words(one)} per matrix,", needed, task.device, remedy)
    work = full.work(task, server.holdout, largest * epochs)
    require(
        work <= MOST_WORK,
        f"method.curvature_form {name} of {task.num_params:,} parameters takes about {work:.0e} multiplications "
        f"per client and round, more than {MOST_WORK:.0e}; use --method.curvature_form diagonal, a smaller model "
        "such as --model softmax, or fewer samples (data.subset)",
    )


def _matrices(name: str, clients: int, task: Task) -> int:
    """Bytes of all matrices that are in memory at once."""
    one = task.num_params**2 * task.dtype.itemsize
    if name == "e_full":  # the matrix, the block products, the eigensolver's copy and its workspace
        return 4 * one
    # Every client's report, the server's state before and after, the block products, and the sum in float64, whose
    # memory becomes its Cholesky factor.
    return (clients + 3) * one + task.num_params**2 * 8
