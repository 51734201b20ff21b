"""Where training several clients at once by vmap pays on one CPU thread."""

from dataclasses import replace

from torch import nn

from benchmarks.contest import interleave, paired_ratio
from benchmarks.speed import models
from benchmarks.table import Row
from benchmarks.works import NUM_CLASSES, seeded, tiny_fits
from fl_lightning.engines.functional import Functional
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola
from fl_lightning.models.networks.mlp import Mlp
from fl_lightning.models.networks.softmax import Softmax

TURNS = 4
CHUNKS = {10: (10,), 100: (10, 32, 100)}


def networks() -> dict[str, tuple[int, nn.Module]]:
    """Small models: number of features, network."""
    return {
        "softmax 64-10": (64, seeded(lambda: Softmax((64,), NUM_CLASSES))),
        "softmax 784-10": (784, seeded(lambda: Softmax((784,), NUM_CLASSES))),
        "mlp 64-64-10": (64, seeded(lambda: Mlp((64,), NUM_CLASSES, (64,)))),
        "mlp 784-30-10": (784, seeded(lambda: Mlp((784,), NUM_CLASSES, (30,)))),
        "mlp 784-100-10": (784, seeded(lambda: Mlp((784,), NUM_CLASSES, (100,)))),
    }


def measure_chunks(scale: float) -> list[Row]:
    """Time with vmap over time of the plain loop (chunk 1); below 1, vmap pays."""
    rows = []
    for name, (features, model) in networks().items():
        for cohort, chunks in CHUNKS.items():
            turns = max(2, round(TURNS * 5 * scale)) * (4 if cohort == 10 else 1)
            work = replace(tiny_fits(scale, model, features, cohort), rounds=turns)
            for label, method in (("fedavg", FedAvg()), ("fola", Fola())):
                runs = {str(chunk): models(work, method, Functional(chunk)) for chunk in (1, *chunks)}
                seconds = interleave(runs, turns)
                for chunk in chunks:
                    size = sum(p.numel() for p in model.parameters())
                    what = f"{name}, cohort {cohort}, {label}: chunk {chunk} / 1"
                    rows.append(Row("vmap", what, paired_ratio(seconds, str(chunk), "1"), "x", None, f"{size} numbers"))
    return rows
