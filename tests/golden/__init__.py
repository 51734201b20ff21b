"""The numbers of every part that decides results, in float64 on small problems, and the versions they belong to.

A part whose numbers move must raise its version, or finished runs would be taken for results of the new code. So
`numbers.json` holds, for every part that is discovered, its version, its defaults and a few numbers; `make golden`
writes it anew, after the version was raised.
"""

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor

from fl_lightning import discovery
from fl_lightning.data import augment
from fl_lightning.data import partition as partitions
from fl_lightning.data.batches import ClientData, Plan
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.shares import content_hash
from fl_lightning.engines.functional import Functional
from fl_lightning.errors import UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola as Fola
from fl_lightning.methods.fola_extended import FolaExtended
from fl_lightning.metrics.round_metrics import measure
from fl_lightning.metrics.settings import Evaluation, Probe
from fl_lightning.params import flatten
from fl_lightning.record import VERSION as LOOP_VERSION
from fl_lightning.runs.config.compute import Compute, Model
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.config.schema import PARTS, fields_of
from fl_lightning.runs.identity import version_of
from fl_lightning.runs.problem import build_task
from fl_lightning.testing.models import reads_tokens
from fl_lightning.training import Federation, Training
from tests.support.cases import network, ragged
from tests.support.splits import KINDS, typical
from tests.support.tasks import TASKS, case
from tests.support.variants import method_of, variants

FILE = Path(__file__).with_name("numbers.json")
# Large enough for the sums of another processor, far too small for another formula.
TOLERANCE = 1e-9

# Choices that go together only.
TOGETHER = (
    "fola+curvature_form=e_full+eigen_order=rank_matched",
    "fola_extended+curvature_form=inputs+strength=0.1",
    "fola_extended+curvature_form=inputs+strength=0.1+first_layer=average+prior=exact",
    "fola_extended+curvature_form=kron+strength=1",
    "fola_extended+curvature_form=kron+strength=1+slopes=sampled+projection=nearest+prior=exact",
    "fola_extended+curvature_form=kron+strength=1+slopes=empirical+solver=factored",
    "fola_extended+curvature_form=last_layer+strength=1+rest=diagonal",
    "fola_extended+curvature_form=inputs+strength=0+cavity=true+trust=1",
)

Numbers = list[float | str]


class Entry(NamedTuple):
    """A part: the version that it carries, and how its numbers are computed."""

    version: int | str
    compute: Callable[[], Any]


def entries() -> dict[str, Entry]:
    """Everything that carries a version, by name."""
    return dict(_entries())


def stored() -> dict[str, dict[str, Any]]:
    content: dict[str, dict[str, Any]] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def same(found: Any, expected: Any) -> bool:
    """Whether numbers agree up to rounding; of defaults, new ones may come, which must change no number."""
    if isinstance(expected, dict):
        return {key: found.get(key) for key in expected} == expected
    return len(found) == len(expected) and all(
        a == b if isinstance(b, str) else math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        for a, b in zip(found, expected, strict=True)
    )


def write() -> None:
    content = {name: {"version": entry.version, "numbers": entry.compute()} for name, entry in entries().items()}
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(content.items())]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _entries() -> Iterator[tuple[str, Entry]]:
    for kind, (folder, _, _) in PARTS.items():
        for name, cls in discovery.discover(folder).items():
            yield f"defaults of {kind} {name}", Entry(version_of(cls), partial(_defaults, cls))
    for cls in (Training, Federation, Compute, Probe, Evaluation):
        yield f"defaults of {cls.__name__}", Entry(LOOP_VERSION, partial(_defaults, cls))
    yield "defaults of Split", Entry(partitions.VERSION, partial(_defaults, partitions.Split))
    for name in discovery.names("methods"):
        yield f"method {name}", Entry(version_of(discovery.find("methods", name)), partial(_method, name))
    for variant in (*variants(), *TOGETHER):
        name, *choices = variant.split("+")
        cls = discovery.find("methods", name)
        revised = [f"{choice} {cls.revised[choice]}" for choice in choices if choice in cls.revised]
        version = version_of(cls) if not revised else ", ".join([str(version_of(cls)), *revised])
        yield f"method {variant}", Entry(version, partial(_method, variant))
    for name, cls in discovery.discover("models").items():
        yield f"model {name}", Entry(version_of(cls), partial(_model, name))
    for name, cls in discovery.discover("engines").items():
        yield f"engine {name}", Entry(version_of(cls), partial(_engine, cls))
    for task in TASKS:
        yield f"task {task}", Entry(LOOP_VERSION, partial(_task, task))
    for optimiser, schedule in (("adam", "cosine"), ("adamw", "linear")):
        yield f"optimiser {optimiser}, {schedule}", Entry(LOOP_VERSION, partial(_optimiser, optimiser, schedule))
    for kind in KINDS:
        yield f"partition {kind}", Entry(partitions.VERSION, lambda kind=kind: _partition(kind))
    for name in get_args(augment.Name):
        yield f"augmentation {name}", Entry(augment.VERSION, partial(_augmentation, name))
    yield "data digits", Entry(version_of(discovery.find("data", "digits")), _digits)
    yield "loop", Entry(LOOP_VERSION, partial(_loop, False))
    yield "loop, calibration", Entry(LOOP_VERSION, partial(_loop, True))


def _defaults(cls: type[Any]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps({name: item.default for name, item in fields_of(cls).items()}))
    return content


def _method(variant: str) -> Numbers:
    """The server's model after two rounds with partial participation, and that of a client after the first."""
    problem = ragged().changed(rounds=2, epochs=3, fraction=0.7)
    try:
        records = problem.run(method_of(variant))
    except UserError:  # a choice that goes with another one only
        return ["refused"]
    return [*_few(flatten(records[-1].after.state.params)), *_few(flatten(records[0].clients[-1].local.params))]


def _engine(cls: type[Any]) -> Numbers:
    """Dropout, momentum, decay and clipping: what engines compute by themselves."""
    problem = ragged()._replace(model=network(dropout=0.5))
    problem = problem.changed(rounds=2, momentum=0.9, weight_decay=1e-2, clip_norm=0.5, lr_decay=0.9)
    numbers = _few(flatten(problem.run(FedAvg(), cls())[-1].after.state.params))
    if cls is Functional:
        numbers += _few(flatten(problem.run(FedAvg(), Functional(chunk=3))[-1].after.state.params))
    return numbers


def _task(name: str) -> Numbers:
    """What a likelihood decides: the loss, curvature made of slopes and of the outputs, and the metrics."""
    problem = case(name)
    records = problem.run(FolaExtended(curvature_form="kron", strength=0.1))
    task = problem.task()
    metrics = measure(FedAvg(), task, problem.dataset, records[-1]).metrics
    numbers = [value for key, value in sorted(metrics.items()) if not key.startswith("seconds")]
    return [*_few(flatten(records[-1].after.state.params)), *numbers]


def _optimiser(name: str, schedule: str) -> Numbers:
    problem = ragged().changed(rounds=2, epochs=3, optimiser=name, schedule=schedule, warmup=2, lr_rounds=4)
    return _few(flatten(problem.run(FedAvg())[-1].after.state.params))


def _model(name: str) -> Numbers:
    shape = (3, 32, 32)
    x, y = torch.zeros(1, *shape), torch.zeros(1, dtype=torch.long)
    inputs = torch.linspace(-1, 1, 2 * 3 * 32 * 32, dtype=torch.float64).view(2, *shape)
    if reads_tokens(discovery.find("models", name)):
        x, inputs = torch.full((1, 12), 9), torch.arange(24).view(2, 12) % 10
    task = build_task(Model(name), Dataset(x, y, x, y, 10), seed=0, compute=Compute(precision="float64"))
    with task.evaluating():
        return [*_few(flatten(task.initial.params)), *_few(task.logits(task.initial, inputs))]


def _partition(kind: partitions.Kind) -> Numbers:
    problem = typical(kind)
    held = partitions.held_out(problem.labels, partitions.Split(holdout=0.1), 0)
    return [content_hash(problem.parts()), content_hash([held])]


def _augmentation(name: str) -> Numbers:
    images = (torch.arange(40 * 3 * 32 * 32) * 7919 % 251).to(torch.uint8).view(40, 3, 32, 32)
    labels = torch.arange(40) % 10
    dataset = Dataset(images, labels, images[:1], labels[:1], 10, augment=name)
    plan = Plan(ClientData(0, dataset, torch.arange(40), torch.float64), 0, 1, Training(batch_size=16), 1)
    return [value for x, _ in plan.all_examples() for value in _few(x.double())]


def _digits() -> Numbers:
    dataset = configure({"data": "digits"}).source.load()
    return [*_few(dataset.train_x.double()), *_few(dataset.test_y.double())]


def _loop(calibration: bool) -> Numbers:
    """Cohorts, stragglers, weights, and what is measured; calibration apart, which older runs lack."""
    problem = ragged().changed(rounds=3, epochs=3, fraction=0.6, straggler_fraction=0.5, weighting="uniform")
    measured = [measure(FedAvg(), problem.task(), problem.dataset, record) for record in problem.run(FedAvg())]
    numbers = [(name, v) for m in measured for name, v in sorted(m.metrics.items()) if not name.startswith("seconds")]
    return [v for name, v in numbers if (name in ("Brier", "ECE")) == calibration]


def _few(values: Tensor) -> Numbers:
    """Three numbers that no change of the values leaves alone."""
    flat = values.detach().double().flatten()
    return [float(flat.sum()), float(flat.norm()), float(flat @ torch.cos(torch.arange(len(flat)).double()))]
