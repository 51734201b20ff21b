"""What predictions from a posterior cost: probit for the 10,000 test images of MNIST, on one core."""

import time
from collections.abc import Iterator
from statistics import median

import torch
from torch import Tensor

from benchmarks.contest import interleave
from benchmarks.table import Row
from benchmarks.works import NUM_CLASSES, Work
from fl_lightning.data.batches import ClientData
from fl_lightning.metrics.uncertainty import predictive
from fl_lightning.metrics.uncertainty.posterior import Posterior, build
from fl_lightning.metrics.uncertainty.sample_curvature import final_round
from fl_lightning.metrics.uncertainty.settings import Form
from fl_lightning.models.task import Task

FORMS: tuple[Form, ...] = ("last_layer", "diagonal", "kron")
IMAGES, TRAINED, TURNS = 10_000, 2_000, 3
# Seconds for all images.
AIM = 60.0


def measure_uncertainty(work: Work) -> list[Row]:
    """The final round of some samples, and predictions for as many images as MNIST's test set has.

    The time of a prediction does not depend on the values of curvature: an untrained network and a few samples do.
    """
    task, dataset = Task(work.model), work.dataset
    data = ClientData(0, dataset, torch.arange(TRAINED), torch.float32)
    x = dataset.train_x[-IMAGES:]
    rows, posteriors = [], {}
    for form in FORMS:
        start = time.process_time()
        pooled = final_round(task, task.initial, [data], form, "exact")
        posteriors[form] = build(task, task.initial, form, pooled, x[:1])
        note = f"{TRAINED:,} samples, eigenvectors included"
        rows.append(Row(work.name, f"final round, {form}", time.process_time() - start, "s", None, note))
    pieces = {name: predictions(posterior, x) for name, posterior in posteriors.items()}
    seconds = interleave(pieces, TURNS)
    note = f"{IMAGES:,} images, {NUM_CLASSES} classes, CPU time"
    return rows + [Row(work.name, f"probit, {form}", median(seconds[form]), "s", AIM, note) for form in FORMS]


def predictions(posterior: Posterior, x: Tensor) -> Iterator[None]:
    while True:
        predictive.predict(posterior, x, ("probit",))
        yield
