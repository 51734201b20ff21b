"""The executor of a run: this process, or so many workers; `auto` takes all cores."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from fl_lightning.engines.base import Engine
from fl_lightning.engines.parallel.engine import Parallel, check_movable
from fl_lightning.engines.parallel.pool import Pool
from fl_lightning.engines.parallel.ray_cluster import (
    Node,
    Resources,
    check_offered,
    connected,
    is_connected,
    local_nodes,
    offers,
    slots,
)
from fl_lightning.errors import require
from fl_lightning.system import activity, devices


@dataclass(frozen=True)
class Workers:
    """How the clients of a round are spread over processes; none of it changes a number.

    Attributes:
        number: Of processes; 1 is this one, `auto` takes as many as there is room for, at most one for each client.
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

    def check_device(self, device: str) -> None:
        """Raise `UserError` if GPUs would idle; hold a process that has one, or a part of it, to its memory."""
        if self.resources.gpu:
            require(device != "cpu", "compute.device is cpu, but --resources.gpu asks for GPUs; leave out one of them")
            if self.number == 1:  # of several, each looks for itself
                devices.given(self.resources.gpu)


# A number, `auto`, all that can be said about workers, or workers that are there already.
Executor = int | Literal["auto"] | Workers | Pool


@contextmanager
def executing(engine: Engine, executor: Executor, clients: int, threads: int = 1) -> Iterator[Engine]:
    """The engine, with workers for the time of the block if there are to be any.

    Args:
        engine: How a client is trained.
        executor: The executor.
        clients: Of a round; 0 if no round is left.
        threads: Of torch in each worker.
    """
    if isinstance(executor, Pool):
        check_movable(engine)
        yield Parallel(engine, executor, threads)
        return
    wanted = executor if isinstance(executor, Workers) else Workers(executor)
    if isinstance(engine, Parallel):
        yield engine
        return
    if wanted.number != 1:
        check_movable(engine)
    with pool_of(wanted, clients) as pool:
        yield engine if pool is None else Parallel(engine, pool, threads)


@contextmanager
def pool_of(wanted: Workers, clients: int = sys.maxsize) -> Iterator[Pool | None]:
    """The workers that are wanted, or None where this process does as well: for no client, or on one core.

    Args:
        wanted: How many, and on which cluster.
        clients: That there are to train at once.

    Raises:
        UserError: If the cluster does not hold so many workers.
    """
    alone = wanted.number == 1 or clients == 0
    if not alone and wanted.address is None and not is_connected():  # refused at once: Ray takes seconds to start
        alone = _number(wanted, local_nodes(), clients) == 1
    if alone:
        yield None
        return
    with connected(wanted.address, wanted.resources) as nodes:
        number = _number(wanted, nodes, clients)
        activity.wait(f"starting {number} workers")
        pool = Pool(number, wanted.resources)
        try:
            yield pool
        finally:
            pool.close()


def _number(wanted: Workers, nodes: list[Node], clients: int) -> int:
    """Of workers; `auto` takes as many as there is room for, at most one for each client."""
    if wanted.number == "auto":
        check_held(1, nodes, wanted.resources)
        return min(slots(nodes, wanted.resources), clients)
    check_held(wanted.number, nodes, wanted.resources)
    return wanted.number


def check_held(number: int, nodes: list[Node], resources: Resources) -> None:
    """Refuse more workers than there is room for."""
    check_offered(nodes, resources)
    held = slots(nodes, resources)
    require(
        number <= held,
        f"expected at most {held} workers of {resources.cpu:g} CPU and {resources.gpu:g} GPU, as there is room for "
        f"({offers(nodes)}), got {number}; lower --workers, --resources.cpu or --resources.gpu, or add a node",
    )
