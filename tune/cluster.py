"""A Ray cluster to compute on: an existing one, or a local one for the time of the sweep."""

import logging
import os
import shutil
import signal
import socket
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import filelock

from fl_lightning.errors import UserError, require
from fl_lightning.system import activity, interrupts

# Before Ray is imported: no usage statistics, no logs of its own, Ctrl-C is ours, trials stay in our folder.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "600",  # our own files are the truth
}
# What workers on other machines must know.
PASSED_ON = ("FL_LIGHTNING_DATA", "FL_LIGHTNING_PLUGINS", "MLFLOW_TRACKING_URI")
# A socket's path may have 107 characters, so Ray's own files go to a short path.
SESSION_PREFIX = "fl-ray-"
OWNER = "owner.lock"
CONNECT_SECONDS = 5.0


class Resources(NamedTuple):
    """What one trial occupies."""

    cpu: float = 1.0
    gpu: float = 0.0


@contextmanager
def connected(address: str | None, resources: Resources, out: Path) -> Iterator[int]:
    """Connect to a cluster, or start one, and say how many trials it holds at once.

    Args:
        address: Of an existing cluster (`auto`: the one this machine belongs to); None starts a local one.
        resources: Of one trial; refused if no node has them.
        out: The folder of all runs, which all nodes must see.
    """
    require(
        resources.cpu >= 0 and resources.gpu >= 0 and resources.cpu + resources.gpu > 0,
        f"--resources.cpu and --resources.gpu must be >= 0 and not both 0, got {resources.cpu:g}, {resources.gpu:g}",
    )
    activity.say(f"connecting to the Ray cluster at {address}" if address else "starting Ray on this machine")
    os.environ.update(SETTINGS)
    if address is not None:
        _check_reachable(address)
    import ray

    _sweep_up()
    session = None if address else Path(tempfile.mkdtemp(prefix=SESSION_PREFIX))
    owned = filelock.FileLock(session / OWNER) if session else None
    if owned is not None:
        owned.acquire()  # until this process ends, however it ends
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.CRITICAL, "configure_logging": True}
    try:
        if address is None:
            cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
            ray.init(num_cpus=cpus, include_dashboard=False, _temp_dir=str(session), **quiet)
        else:
            variables = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
            ray.init(address=address, runtime_env={"env_vars": {**variables, "OMP_NUM_THREADS": "1"}}, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"cannot reach a Ray cluster at {address or 'this machine'} ({reason}); start one with `ray start --head`, "
            "correct --address, or leave it out to compute on this machine"
        ) from None
    interrupts.restore()
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
        slots = _slots(nodes, resources)
        _check_shared(nodes, out)
        yield slots
    finally:
        ray.shutdown()
        if session is not None and owned is not None:
            owned.release()
            shutil.rmtree(session, ignore_errors=True)


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    require(
        bool(host) and port.isdigit() and int(port) < 65536,
        f"--address must be auto or host:port of a Ray cluster, got {address!r}",
    )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"no Ray cluster answers at {address} ({error.strerror or error}); start one with `ray start --head`, "
            "correct --address, or leave it out to compute on this machine"
        ) from None


def _slots(nodes: list[dict[str, Any]], resources: Resources) -> int:
    """How many trials fit at once; refused if none does, where Ray would wait forever."""
    slots = 0
    for node in nodes:
        has = node["Resources"]
        fits = [has.get(name, 0.0) / need for name, need in (("CPU", resources.cpu), ("GPU", resources.gpu)) if need]
        slots += int(min(fits) + 1e-9)
    offers = "; ".join(_offer(node) for node in nodes)
    require(
        slots > 0,
        f"no node of the cluster can offer {resources.cpu:g} CPU and {resources.gpu:g} GPU to one trial ({offers}); "
        "lower --resources.cpu or --resources.gpu, or add a node",
    )
    return slots


def _offer(node: dict[str, Any]) -> str:
    has = node["Resources"]
    return f"{node['NodeManagerAddress']}: {has.get('CPU', 0):g} CPU, {has.get('GPU', 0):g} GPU"


def _check_shared(nodes: list[dict[str, Any]], out: Path) -> None:
    """All machines must see the folder of the runs: results, checkpoints and the truth about what is done lie there."""
    machines = {node["NodeManagerAddress"]: node["NodeID"] for node in nodes}
    if len(machines) < 2:
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from fl_lightning.runs.store import database_of, store_uri

    require(
        database_of(store_uri(out)) is None,
        "several machines cannot write to one sqlite database; start an MLflow server and set MLFLOW_TRACKING_URI to "
        "its address (docs/cluster.md)",
    )
    out.mkdir(parents=True, exist_ok=True)
    sign = out / f".seen-{uuid.uuid4().hex}"
    sign.touch()
    try:
        see = ray.remote(num_cpus=0)(_sees)
        answers = {
            address: see.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(str(sign))
            for address, node in machines.items()
        }
        blind = [address for address, answer in answers.items() if not ray.get(answer, timeout=60)]
    finally:
        sign.unlink(missing_ok=True)
    require(
        not blind,
        f"{', '.join(blind)} cannot see {out}; choose a folder that all nodes share (NFS, for instance) with --out",
    )


def _sees(path: str) -> bool:
    return Path(path).exists()


def _sweep_up() -> None:
    """Remove what a killed driver has left of its cluster."""
    for folder in Path(tempfile.gettempdir()).glob(f"{SESSION_PREFIX}*"):
        if not (folder / OWNER).exists():
            continue  # another driver is just making it
        try:
            with filelock.FileLock(folder / OWNER, timeout=0):
                _end_processes(folder)
        except (filelock.Timeout, OSError):
            continue  # its driver lives, or is not ours
        shutil.rmtree(folder, ignore_errors=True)


def _end_processes(folder: Path) -> None:
    """End whoever has a file of this folder open: trials live on for seconds and hold the locks of their runs."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is not ours
            is_other = int(process.name) != os.getpid()
            if is_other and any(os.readlink(file).startswith(f"{folder}/") for file in (process / "fd").iterdir()):
                os.kill(int(process.name), signal.SIGKILL)
