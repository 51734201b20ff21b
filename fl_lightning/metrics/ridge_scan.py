"""Accuracy along the ridge between two clients, and a picture of the precision: the arrays of `laplace.npz`.

Measured beside a run, without touching it. For round r the file holds

- r<round>_share: pi_1, 21 values from 0 to 1;
- r<round>_ridge: test accuracy of theta(pi_1) on the ridge of the clients' posteriors (methods that have posteriors);
- r<round>_line: test accuracy of the averages pi_1 mu_1 + (1 - pi_1) mu_2, FedAvg's models;
- r<round>_precision: rows and columns of the first 1000 parameters of the first client's precision (only these of its
  diagonal, if it is one), shifted and scaled so that the smallest entry of all is 0 and the largest 1.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import require
from fl_lightning.federation import cohort_size
from fl_lightning.gaussian import ridge
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.full import Full
from fl_lightning.method import HasPosterior, Method, task_of
from fl_lightning.metrics.scores import score
from fl_lightning.metrics.settings import Probe
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params, flatten
from fl_lightning.record import RoundRecord
from fl_lightning.system.atomic import write_atomically
from fl_lightning.training import Federation

FILE = "laplace.npz"
PICTURE = 1000

Arrays = dict[str, NDArray[Any]]


def check(settings: Probe, federation: Federation, sizes: Sequence[int]) -> None:
    """Refuse rounds that are never reached, and cohorts that have no ridge line.

    Args:
        settings: What is to be probed.
        federation: Rounds and participation.
        sizes: Samples of every client.
    """
    if not settings.ridge_rounds:
        return
    number = cohort_size(federation, sum(size > 0 for size in sizes))
    require(
        number == 2,
        f"probe.ridge_rounds needs exactly 2 clients in a round, between which the ridge is a line, got {number}; "
        "use --data.clients 2, or leave it out",
    )
    late = max(settings.ridge_rounds)
    require(
        late <= federation.rounds,
        f"probe.ridge_rounds must lie in 1 to federation.rounds = {federation.rounds}, got {late}",
    )


def measure(method: Method, task: Task, dataset: Dataset, record: RoundRecord) -> Arrays:
    """The arrays of one round with two clients."""
    task = task_of(method, task)
    first, second = (result.local.params for result in record.clients)
    posteriors = method.posteriors(record.cohort, record.reports) if isinstance(method, HasPosterior) else ()

    def accuracies(models: Sequence[Params]) -> NDArray[np.float64]:
        found = score(task, [Weights(params, record.after.buffers) for params in models], dataset)
        return np.array([one.accuracy for one in found])

    arrays: Arrays = {
        "share": np.array(ridge.SHARES),
        "line": accuracies(list(ridge.straight_line(first, second))),
    }
    if posteriors:
        arrays["ridge"] = accuracies(list(ridge.ridge_line(posteriors[0], posteriors[1])))
        arrays |= _picture(posteriors[0])
    return {f"r{record.round}_{name}": values for name, values in arrays.items()}


def write(folder: Path, arrays: Arrays) -> Path:
    """Add arrays to the file of a run, as a whole or not at all; rounds that are there already stay."""
    path = folder / FILE
    content = io.BytesIO()
    np.savez_compressed(content, allow_pickle=False, **(read(folder) | arrays))
    write_atomically(path, content.getvalue())
    return path


def read(folder: Path) -> Arrays:
    """All arrays of a run; none if it has no such file."""
    path = folder / FILE
    if not path.exists():
        return {}
    with np.load(path) as file:
        return dict(file)


def _picture(posterior: Gaussian) -> Arrays:
    if isinstance(posterior, Full):  # without damping, which does not belong to the curvature
        return {"precision": _normalised(posterior.matrix, posterior.matrix[:PICTURE, :PICTURE])}
    if isinstance(posterior, Diagonal):
        values = flatten(posterior.precision)
        return {"precision": _normalised(values, values[:PICTURE])}
    return {}


def _normalised(whole: Tensor, part: Tensor) -> NDArray[np.float16]:
    low, high = float(whole.min()), float(whole.max())
    span = high - low or 1.0
    result: NDArray[np.float16] = ((part.cpu() - low) / span).numpy().astype(np.float16)  # enough for a picture
    return result
