"""Who trains the clients of a run: this process, or so many workers; `auto` finds out which is faster."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal

from fl_lightning.cluster.connection import Node, Resources, connected, is_connected, local_nodes, offers, slots
from fl_lightning.engines.engine import Engine
from fl_lightning.errors import require
from fl_lightning.system import activity
from fl_lightning.workers.parallel import Parallel, check_movable
from fl_lightning.workers.pool import Pool


@dataclass(frozen=True)
class Workers:
    """How the clients of a round are spread over processes; none of it changes a number.

    Attributes:
        number: Of processes; 1 is this one, `auto` takes more where that is faster.
        address: Of a Ray cluster, or auto for the one this machine belongs to; None computes on this machine.
        resources: CPUs and GPUs of each worker.
    """

    number: int | Literal["auto"] = 1
    address: str | None = None
    resources: Resources = Resources()  # noqa: RUF009 - a tuple

    def __post_init__(self) -> None:
        require(
            self.number == "auto" or (isinstance(self.number, int) and self.number >= 1),
            f"workers must be a whole number from 1 on, or auto, got {self.number}",
        )
        self.resources.check()


# A number, `auto`, all that can be said about workers, or workers that are there already.
Crew = int | Literal["auto"] | Workers | Pool


@contextmanager
def hired(engine: Engine, crew: Crew, rounds: int, threads: int = 1) -> Iterator[Engine]:
    """The engine, with workers for the time of the block if there are to be any.

    Args:
        engine: How a client is trained.
        crew: Who trains.
        rounds: That are left.
        threads: Of torch in each worker.
    """
    if isinstance(crew, Pool):
        check_movable(engine)
        yield Parallel(engine, crew, threads)
        return
    wanted = crew if isinstance(crew, Workers) else Workers(crew)
    if wanted.number == 1 or rounds == 0 or isinstance(engine, Parallel):
        yield engine
        return
    with ExitStack() as stack:
        if wanted.number == "auto":
            from fl_lightning.workers.choice import Auto

            yield Auto(engine, wanted, rounds, threads, stack)
        else:
            check_movable(engine)
            yield Parallel(engine, stack.enter_context(pool_of(wanted, wanted.number)), threads)


def check_held(number: int, nodes: list[Node], resources: Resources) -> None:
    """Refuse more workers than there is room for."""
    held = slots(nodes, resources)
    require(
        held > 0,
        f"there is no room for a worker of {resources.cpu:g} CPU and {resources.gpu:g} GPU ({offers(nodes)}); lower "
        "--resources.cpu or --resources.gpu, or add a node",
    )
    require(
        number <= held,
        f"expected at most {held} workers of {resources.cpu:g} CPU and {resources.gpu:g} GPU, as there is room for "
        f"({offers(nodes)}), got {number}; lower --workers, --resources.cpu or --resources.gpu, or add a node",
    )


@contextmanager
def pool_of(wanted: Workers, number: int) -> Iterator[Pool]:
    """So many workers, on the cluster that is wanted.

    Raises:
        UserError: If the cluster does not hold them.
    """
    if wanted.address is None and not is_connected():  # refused at once: Ray takes seconds to start
        check_held(number, local_nodes(), wanted.resources)
    with connected(wanted.address, wanted.resources) as nodes:
        check_held(number, nodes, wanted.resources)
        activity.wait(f"starting {number} workers")
        pool = Pool(number, wanted.resources)
        try:
            yield pool
        finally:
            pool.close()
