"""The Ray cluster of a sweep: its trials write to one folder and one store, so all nodes must see them."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fl_lightning.engines.parallel import ray_cluster
from fl_lightning.engines.parallel.ray_cluster import Node, Resources
from fl_lightning.errors import require
from fl_lightning.runs.tracking.store import database_of, store_uri


@contextmanager
def connected(address: str | None, resources: Resources, out: Path) -> Iterator[int]:
    """Connect to a cluster, or start one, and say how many processes of this size it holds at once.

    Args:
        address: Of an existing cluster (`auto`: the one this machine belongs to); None starts a local one.
        resources: Of one trial, or of one worker of a trial.
        out: The folder of all runs, which all nodes must see.
    """
    with ray_cluster.connected(address, resources) as nodes:
        _check_shared(nodes, out)
        yield ray_cluster.slots(nodes, resources)


def _check_shared(nodes: list[Node], out: Path) -> None:
    """All machines must see the folder of the runs: results, checkpoints and the truth about what is done lie there."""
    machines = {node["NodeManagerAddress"]: node for node in nodes}
    if len(machines) < 2:
        return
    require(
        database_of(store_uri(out)) is None,
        "several machines cannot write to one sqlite database; start an MLflow server and set MLFLOW_TRACKING_URI to "
        "its address (docs/scaling.md)",
    )
    out.mkdir(parents=True, exist_ok=True)
    sign = out / f".seen-{uuid.uuid4().hex}"
    sign.touch()
    try:
        answers = ray_cluster.on_each(list(machines.values()), Path.exists, sign)
        blind = [address for address, sees in zip(machines, answers, strict=True) if not sees]
    finally:
        sign.unlink(missing_ok=True)
    require(
        not blind,
        f"{', '.join(blind)} cannot see {out}; choose a folder that all nodes share (NFS, for instance) with --runs",
    )
