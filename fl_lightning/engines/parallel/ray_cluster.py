"""A Ray cluster to compute on: an existing one, or a local one for the time of a sweep or of a run.

A local cluster is private: it listens on the loopback interface alone, and asks for a token. Ray has no public way to
this. `ray.init` and `ray start --node-ip-address 127.0.0.1` both replace the loopback address by one that other
machines can reach, so that they may join (Ray 2.60). Where Ray knows no clusters (macOS, Windows) it keeps the address,
and all of its servers bind to it: hence the constant. Ray reads the token once per process, and a second cluster of the
same process has another token: hence the reset.
"""

import atexit
import logging
import math
import os
import re
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import IO, Any, NamedTuple

from fl_lightning.engines.parallel.ray_session import RAY, enrol, private_addresses, session, started_for, sweep_up
from fl_lightning.errors import UserError, require
from fl_lightning.system import activity, devices, interrupts

LOOPBACK = "127.0.0.1"
MODE, TOKEN = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"


@contextmanager
def private() -> Iterator[None]:
    """A Ray that is started in the block belongs to this process and to its children, which inherit the token."""
    before = {name: os.environ.get(name) for name in (MODE, TOKEN)}
    os.environ.update({MODE: "token", TOKEN: secrets.token_hex(32)})
    read_again()
    from ray._private import ray_constants

    joinable = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = joinable
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        read_again()  # a program that starts a Ray of its own afterwards would be asked for a token that is gone


def read_again() -> None:
    """Let Ray look at the environment's token again; it keeps the first that it has seen."""
    if "ray" in sys.modules:
        from ray import _raylet

        core: Any = _raylet  # compiled: its names are not declared
        core.Config.initialize("")
        core.AuthenticationTokenLoader.instance().reset_cache()


# Before Ray is imported: no usage statistics, no logs of its own, Ctrl-C is ours, trials stay in our folder.
SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_worker_niceness": "0",  # workers keep the niceness of the process that starts them
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
    "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
    "TUNE_GLOBAL_CHECKPOINT_S": "600",  # our own files are the truth
}
# What workers on other machines must know.
PASSED_ON = ("FL_LIGHTNING_DATA", "FL_LIGHTNING_PLUGINS", "MLFLOW_TRACKING_URI", "CUBLAS_WORKSPACE_CONFIG")
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 60.0
TOKEN_WORDS = re.compile(r"token|authenticat", re.IGNORECASE)


class Resources(NamedTuple):
    """What one process occupies: a trial, or a worker of a run."""

    cpu: float = 1.0
    gpu: float = 0.0

    def check(self) -> None:
        """Raise `UserError` if a process of this size is impossible."""
        require(
            self.cpu >= 0 and self.gpu >= 0 and 0 < self.cpu + self.gpu < math.inf,
            f"--resources.cpu and --resources.gpu must be >= 0 and not both 0, got {self.cpu:g}, {self.gpu:g}",
        )
        require(
            self.gpu <= 1 or self.gpu == round(self.gpu),
            f"--resources.gpu must be part of one GPU or a whole number of them, got {self.gpu:g}",
        )

    def held_by(self, node: "Node") -> int:
        """How many processes of this size a node holds at once; parts of different GPUs make no GPU."""
        has = node["Resources"]
        fits = []
        if self.cpu:
            fits.append(_whole(has.get("CPU", 0.0) / self.cpu))
        if self.gpu:
            gpus = has.get("GPU", 0.0)
            fits.append(_whole(gpus) * _whole(1 / self.gpu) if self.gpu < 1 else _whole(gpus / self.gpu))
        return min(fits)


Node = dict[str, Any]


@contextmanager
def connected(address: str | None, resources: Resources) -> Iterator[list[Node]]:
    """Connect to a cluster, or start one, and show its nodes; with a connection it only shows them.

    Args:
        address: Of an existing cluster (`auto`: the one this machine belongs to); None starts a local one.
        resources: Of one process; refused if no node has them.
    """
    resources.check()
    if is_connected():
        yield _nodes(resources)
        return
    activity.wait(f"connecting to the Ray cluster at {address}" if address else "starting Ray on this machine")
    os.environ.update(SETTINGS)
    if address is not None:
        _check_reachable(address)
    import ray

    sweep_up()
    with ExitStack() as stack:
        stack.callback(_no_farewell)
        if address is None:
            folder = stack.enter_context(session())
            stack.enter_context(private())
            place = {"num_cpus": local_cpus(), "include_dashboard": False, "_temp_dir": str(folder / RAY)}
            _start(None, **place, _node_ip_address=LOOPBACK)
            enrol(*started_for(folder))  # not all of our children: a program may have others
        else:
            read_again()
            chosen = _joinable() if address == "auto" else address
            _start(chosen, runtime_env={"env_vars": {**passed_on(), "OMP_NUM_THREADS": "1"}})
        stack.callback(ray.shutdown)
        yield _nodes(resources)


def passed_on() -> dict[str, str]:
    """What processes on other machines must know of this one's environment."""
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ}


def is_connected() -> bool:
    """Whether this process belongs to a cluster already: a trial, or a program that has called `ray.init` itself."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def local_cpus() -> int:
    """The CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def local_nodes() -> list[Node]:
    """This machine as Ray would show it."""
    return [
        {
            "NodeManagerAddress": "this machine",
            "Resources": {"CPU": float(local_cpus()), "GPU": float(devices.count())},
        }
    ]


def on_each(nodes: list[Node], ask: Callable[..., Any], *arguments: Any) -> list[Any]:
    """The answers of all nodes, busy ones too, to a question that takes no time."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

    task = ray.remote(num_cpus=0)(ask)
    asked = [task.options(scheduling_strategy=On(node["NodeID"], soft=False)).remote(*arguments) for node in nodes]
    return list(ray.get(asked, timeout=ANSWER_SECONDS))


def slots(nodes: list[Node], resources: Resources) -> int:
    """How many processes of this size the nodes hold at once."""
    return sum(resources.held_by(node) for node in nodes)


def offers(nodes: list[Node]) -> str:
    """What the nodes have, in words."""
    return "; ".join(_offer(node) for node in nodes)


def living() -> list[Node]:
    """The nodes that are there."""
    import ray

    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]


def _nodes(resources: Resources) -> list[Node]:
    """The living nodes; refused if none has the resources, where Ray would wait forever."""
    check_offered(nodes := living(), resources)
    return nodes


def check_offered(nodes: list[Node], resources: Resources) -> None:
    """Refuse a size of process that no node has room for."""
    require(
        slots(nodes, resources) > 0,
        f"no node of the cluster can offer {resources.cpu:g} CPU and {resources.gpu:g} GPU to one process "
        f"({offers(nodes)}); lower --resources.cpu or --resources.gpu, or add a node",
    )


def _start(address: str | None, **settings: Any) -> None:
    """`ray.init`, quietly; what it cannot do is said in one line."""
    import ray

    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as murmur:
        try:
            with interrupts.insistent(), _errors_to(murmur) if address else nullcontext():
                ray.init(
                    address, log_to_driver=False, logging_level=logging.CRITICAL, configure_logging=True, **settings
                )
            return
        except Exception as error:  # Ray raises just that when a busy machine is too slow for it
            interrupts.check()  # it may be the interrupt that Ray has failed at
            reason = " ".join(str(error).split())[:300]
        murmur.seek(0)
        if TOKEN_WORDS.search(reason + murmur.read()):
            raise UserError(
                f"the Ray cluster at {address} does not take the token of this machine ({reason}); set "
                "RAY_AUTH_MODE=token, and copy ~/.ray/auth_token of the head here or set RAY_AUTH_TOKEN to what it "
                "holds (docs/scaling.md)"
            )
    raise UserError(
        f"cannot reach a Ray cluster at {address or 'this machine'} ({reason}); start one with `ray start --head`, "
        "correct --address, or leave it out to compute on this machine"
    )


@contextmanager
def _errors_to(file: IO[str]) -> Iterator[None]:
    """Let a file have what compiled code says on the standard error; Ray says there, and only there, why it fails."""
    before = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)


def _no_farewell() -> None:
    """Ray's colours would say "back to normal" at the end of the program, and a terminal show that as `[0m`."""
    if (colours := sys.modules.get("colorama.initialise")) is not None:
        atexit.unregister(colours.reset_all)


def _joinable() -> str:
    """The cluster that this machine belongs to; `auto` of Ray takes any, also the private one of another sweep.

    Ray would then ask for a minute whether it may join, and it has no public list of the clusters of a machine.
    """
    from ray._private import services

    if os.environ.get("RAY_ADDRESS"):
        return "auto"  # which Ray takes from there
    closed = private_addresses()
    running: set[str] = services.find_gcs_addresses()  # type: ignore[no-untyped-call]
    latest: str | None = services.find_bootstrap_address(None)  # may be of one that was killed
    found = sorted(running, key=lambda address: address != latest) or ([latest] if latest else [])
    joinable = [address for address in found if address not in closed]
    require(
        bool(joinable),
        "this machine belongs to no Ray cluster"
        + (" (those of other sweeps and runs are private)" if closed else "")
        + "; start one with `ray start --head`, or leave --address out to compute on this machine alone",
    )
    return joinable[0]


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


def _whole(number: float) -> int:
    """Rounded down, but for rounding errors: 1 / 0.1 is ten."""
    return int(number + 1e-9)


def _offer(node: Node) -> str:
    has = node["Resources"]
    return f"{node['NodeManagerAddress']}: {has.get('CPU', 0):g} CPU, {has.get('GPU', 0):g} GPU"
