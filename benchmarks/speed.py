"""Works 1 to 3: bare loop, the usual one, functional engine and Lightning engine, for FedAvg and FOLA."""

from collections.abc import Iterator
from copy import deepcopy
from statistics import median

from torch import Tensor

from benchmarks import bare
from benchmarks.contest import Seconds, interleave, paired_ratio
from benchmarks.table import Row
from benchmarks.usual import by_optimiser, by_optimiser_with_prior
from benchmarks.works import Work
from fl_lightning.engines.base import Engine
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.method import Method
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola
from fl_lightning.models.task import Task

# In float64. In float32 a rounding can flip a ReLU or a maximum of a pooling, and the paths then part for good.
TOLERANCE = 1e-10
PRIOR = Fola()


def measure_speed(work: Work) -> list[Row]:
    """Time all contestants, after checking that they do the same work."""
    error = largest_difference(work.in_double(samples=100))
    if not error < TOLERANCE:
        raise AssertionError(f"{work.name}: bare loop and engines end {error:.1e} apart, so it is not the same work")
    seconds = interleave(contestants(work), work.rounds)
    rows = []
    for method in ("fedavg", "fola"):
        base = f"{method} bare"
        engines = {"functional": work.aims.functional, "lightning": work.aims.lightning}
        if batches_clients(work):  # the bare loop does not: like is compared with like only at chunk 1
            engines["functional chunk 1"] = work.aims.functional
        for engine, aim in engines.items():
            name = f"{method} {engine}"
            note = f"{milliseconds(seconds, name)} against {milliseconds(seconds, base)} ms a round"
            rows.append(Row(work.name, f"{name} / bare", paired_ratio(seconds, name, base), "x", aim, note))
        for engine, aim in (("functional", None), ("lightning", work.aims.usual.get(method))):
            ratio = paired_ratio(seconds, f"{method} {engine}", f"{method} usual")
            rows.append(Row(work.name, f"{method} {engine} / torch.optim", ratio, "x", aim))
    for engine, aim in (("bare", None), ("functional", 1.10), ("lightning", None)):
        ratio = paired_ratio(seconds, f"fola {engine}", f"fedavg {engine}")
        rows.append(Row(work.name, f"{engine}: fola / fedavg", ratio, "x", aim))
    rows.append(Row(work.name, "largest difference of models, float64", error, "e", TOLERANCE, "after round 2"))
    return rows


def contestants(work: Work) -> dict[str, Iterator[list[Tensor]]]:
    """Who is compared: each yields the server's model after every round."""
    runs = {
        "fedavg bare": bare.fedavg(work),
        "fedavg usual": bare.fedavg(work, by_optimiser),
        "fedavg functional": models(work, FedAvg(), Functional()),
        "fedavg functional chunk 1": models(work, FedAvg(), Functional(1)),
        "fedavg lightning": models(work, FedAvg(), Lightning()),
        "fola bare": bare.fola(work, PRIOR.strength, PRIOR.damping),
        "fola usual": bare.fola(work, PRIOR.strength, PRIOR.damping, by_optimiser_with_prior),
        "fola functional": models(work, PRIOR, Functional()),
        "fola functional chunk 1": models(work, PRIOR, Functional(1)),
        "fola lightning": models(work, PRIOR, Lightning()),
    }
    return {name: run for name, run in runs.items() if batches_clients(work) or "chunk" not in name}


def batches_clients(work: Work) -> bool:
    """Whether the engine's `auto` trains several clients at once by vmap."""
    steps = [work.training.steps_per_epoch(len(client)) for client in work.clients]
    return Functional().chunk_for(Task(deepcopy(work.model)), steps) > 1


def largest_difference(work: Work) -> float:
    """Between the bare loop and the engines after round 2, relative to the size of a tensor."""
    finals = {name: [next(rounds) for _ in range(2)][-1] for name, rounds in contestants(work).items()}
    return max(
        float((value - reference).norm() / reference.norm())
        for name, model in finals.items()
        for value, reference in zip(model, finals[f"{name.split()[0]} bare"], strict=True)
    )


def models(work: Work, method: Method, engine: Engine) -> Iterator[list[Tensor]]:
    """The server's model after every round."""
    for record in work.run(method, engine):
        server = list(record.after.state.params.values())
        del record
        yield server


def milliseconds(seconds: Seconds, name: str) -> str:
    value = 1e3 * median(seconds[name])
    return f"{value:.0f}" if value > 100 else f"{value:.1f}"
