"""What bf16-mixed does to speed and numbers: the same rounds as in float32, FOLA with its online Fisher."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace

import torch

from benchmarks.contest import interleave, paired_ratio
from benchmarks.table import Row
from benchmarks.works import Work
from fl_lightning.engines.engine import Engine
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.federation import Federation
from fl_lightning.loop import federate
from fl_lightning.methods.fola import Fola
from fl_lightning.params import Params, flatten
from fl_lightning.record import RoundRecord
from fl_lightning.task import Task

TURNS = 4
SAMPLES = 640


def measure_precision(work: Work) -> list[Row]:
    """Time of a round against float32 on both engines, and how far apart the two models are after all of them.

    One client with a few samples: a step costs what it costs, and shorter numbers may be much slower.
    """
    work = replace(work, clients=(work.clients[0][:SAMPLES],), cohort=1)
    rows = []
    for engine in (Functional(), Lightning()):
        latest: dict[str, Params] = {}
        types = {"float32": None, "bf16-mixed": torch.bfloat16}
        pair = {name: remembered(name, latest, rounds(work, engine, mixed)) for name, mixed in types.items()}
        ratio = paired_ratio(interleave(pair, TURNS), "bf16-mixed", "float32")
        name = type(engine).__name__.lower()
        rows.append(Row(work.name, f"{name}: bf16-mixed / float32", ratio, "x"))
        start, short, full = (
            flatten(p).detach().double() for p in (dict(work.model.named_parameters()), *latest.values())
        )
        share = float((short - full).norm() / (full - start).norm())
        rows.append(Row(work.name, f"{name}: distance of the models / path", 100 * share, "%"))
    return rows


def rounds(work: Work, engine: Engine, mixed: torch.dtype | None) -> Iterator[RoundRecord]:
    task, federation = Task(deepcopy(work.model), mixed=mixed), Federation(rounds=TURNS + 1, cohort=work.cohort)
    return federate(Fola(), task, work.dataset, work.clients, work.training, federation, engine, work.seed)


def remembered(name: str, latest: dict[str, Params], records: Iterator[RoundRecord]) -> Iterator[None]:
    for record in records:
        latest[name] = record.after.state.params
        yield
