"""The forms of curvature a client can report: diagonal, full, or the full one's eigenvalues as a diagonal (e-full).

A precision is kept and sent as named tensors: shaped like the parameters for the diagonal forms, one matrix for the
full one. The full matrix of the round is the Hessian (softmax regression) or the Gauss-Newton matrix (other networks).
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Literal

from torch import Tensor

from fl_lightning.curvature import e_full, full
from fl_lightning.curvature.e_full import EigenOrder
from fl_lightning.curvature.full import PathStep
from fl_lightning.errors import require
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.form import Gaussian
from fl_lightning.gaussian.full import Full
from fl_lightning.method import Local, Server
from fl_lightning.params import Params, flatten, unflatten, zeros
from fl_lightning.system import memory
from fl_lightning.task import Weights
from fl_lightning.training import Training

Form = Literal["diagonal", "full", "e_full"]

# The name under which a full precision is kept.
MATRIX = "matrix"
# Multiplications for one client's curvature in one round that are still bearable: about half an hour of one CPU core.
MOST_WORK = 5e13


def nothing(form: Form, params: Params) -> Params:
    """The precision zero."""
    if form != "full":
        return zeros(params)
    size = len(flatten(params))
    like = next(iter(params.values()))
    return {MATRIX: like.new_zeros(1, 1).expand(size, size)}  # takes no memory


def diagonal_of(form: Form, precision: Params) -> Params:
    """The diagonal of a precision."""
    return {MATRIX: precision[MATRIX].diagonal()} if form == "full" else precision


def gaussian(form: Form, mean: Params, precision: Params) -> Gaussian:
    """The posterior with this mean and precision."""
    return Full(mean, precision[MATRIX]) if form == "full" else Diagonal(mean, precision)


def at_end(form: Form, order: EigenOrder, local: Local) -> Params:
    """Curvature of all the client's samples at its final model, full or e-full."""
    matrix = full.at(local.task, Weights(local.params, local.buffers), local.data)
    return _in_form(form, order, matrix, local.params)


def along_path(
    form: Form, order: EigenOrder, local: Local, start: Params, path: Sequence[Tensor], equal: bool
) -> Params:
    """sum_t s_t C(theta_t; batch_t), full or e-full, with theta_t before step t.

    Args:
        form: full or e_full.
        order: Which eigenvalue goes to which parameter, for e_full.
        local: The finished client.
        start: Where it started.
        path: Its model after every step, flat.
        equal: Whether s_t is 1 for every step, instead of the batch's share |batch_t| / |client data|.
    """

    def steps() -> Iterator[PathStep]:
        before = chain([start], (unflatten(vector, start) for vector in path[:-1]))
        for params, places in zip(before, local.plan.all_batches(), strict=True):
            share = 1.0 if equal else len(places) / len(local.data)
            yield PathStep(Weights(params, local.buffers), places, share)

    return _in_form(form, order, full.along(local.task, local.data, steps()), start)


def check(form: Form, online: bool, training: Training, server: Server) -> None:
    """Refuse a matrix for which there is not enough memory or time, naming what it would take."""
    task, sizes = server.task, [size for size in server.sizes if size > 0]
    largest = max(sizes, default=0)
    epochs = training.epochs if online else 1
    path = (
        epochs * training.steps_per_epoch(largest, server.smallest_batch) * task.num_params * task.dtype.itemsize
        if online
        else 0
    )
    one = task.num_params**2 * task.dtype.itemsize
    # Full: every client's report, the server's state before and after, the block products, and the sum in float64,
    # whose memory becomes its Cholesky factor. The eigenvalues of e-full: the matrix, the block products, the solver's
    # copy and its workspace.
    matrices = (len(sizes) + 3) * one + task.num_params**2 * 8 if form == "full" else 4 * one
    needed = path + matrices
    free = memory.available(task.device)
    require(
        free is None or needed <= free,
        f"method.curvature_form {form} of {task.num_params:,} parameters takes {memory.in_words(one)} per matrix and "
        f"about {memory.in_words(needed)} in all for {len(sizes)} clients, but {memory.in_words(free or 0)} are free; "
        "use --method.curvature_form diagonal, a smaller model such as --model softmax, or fewer clients",
    )
    work = full.work(task, server.holdout, largest * epochs)
    require(
        work <= MOST_WORK,
        f"method.curvature_form {form} of {task.num_params:,} parameters takes about {work:.0e} multiplications per "
        f"client and round, more than {MOST_WORK:.0e}; use --method.curvature_form diagonal, a smaller model such as "
        "--model softmax, or fewer samples (data.subset)",
    )


def _in_form(form: Form, order: EigenOrder, matrix: Tensor, like: Params) -> Params:
    return {MATRIX: matrix} if form == "full" else e_full.as_diagonal(matrix, like, order)
