"""fl-lightning doctor: check devices against the CPU, Ray, MLflow, data and disk, with advice for each flaw."""

import argparse
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.cli.flags import CommandParser, add_runs
from fl_lightning.data.readers import fingerprint
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.parallel import ray_cluster
from fl_lightning.errors import UserError
from fl_lightning.loop import federate
from fl_lightning.methods.fola import Fola
from fl_lightning.params import flatten
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import problem_of
from fl_lightning.runs.tracking import store
from fl_lightning.system import devices, memory
from fl_lightning.training import Federation, Training

PACKAGES = ("torch", "pytorch-lightning", "ray", "mlflow")
LEAST_DISK = 2e9
ROUNDS = 3
# The largest difference of parameters after three rounds in float32 that rounding explains.
ROUNDING = 1e-4


UPDATE = "update the device's driver and torch; until then use --compute.device cpu"


class Finding(NamedTuple):
    """A check, its result, and what to do; the remedy is empty where all is well."""

    what: str
    found: str
    remedy: str = ""


def main(arguments: Sequence[str]) -> int:
    """Print each finding at once; 1 if anything needs a remedy."""
    parser = CommandParser(
        prog="fl-lightning doctor",
        description=__doc__,
    )
    add_runs(parser)
    parser.add_argument("--compute.device", dest="device", default="auto", help="device to try [auto]")
    parser.add_argument("--address", help="a Ray cluster, or auto [this machine]")
    options = parser.parse_args(list(arguments))
    amiss = 0
    for check in checks(options):
        for finding in findings(check):
            print(f"{finding.what:<10} {finding.found}", flush=True)
            if finding.remedy:
                amiss += 1
                print(f"{'':<10} -> {finding.remedy}", flush=True)
    print("nothing is amiss" if not amiss else f"amiss: {amiss}")
    return int(amiss > 0)


def checks(options: argparse.Namespace) -> list[Callable[[], Iterator[Finding]]]:
    """In the order in which they are shown."""
    return [
        packages,
        seen_devices,
        lambda: ray_nodes(options.address),
        lambda: mlflow_store(options.out),
        data_root,
        lambda: disk(options.out),
        lambda: three_rounds(options.device),
    ]


def findings(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """Those of one check; a refusal is one of them."""
    try:
        yield from check()
    except UserError as refusal:
        yield Finding("", "refused", str(refusal))
    except Exception as error:  # of a driver, say, that runs no kernel of this torch
        yield Finding("", f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", UPDATE)


def packages() -> Iterator[Finding]:
    yield Finding("python", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("packages", ", ".join(f"{name} {version(name)}" for name in PACKAGES))


def seen_devices() -> Iterator[Finding]:
    """The CPU, and every accelerator that torch sees."""
    free = memory.available(torch.device("cpu"))
    yield Finding("cpu", f"{ray_cluster.local_cpus()} cores, {_in_words(free)} of memory free")
    built = torch.version.cuda or torch.version.hip
    yield Finding("CUDA", f"torch was built for {built}" if built else "torch was built for the CPU alone")
    device, number = devices.accelerator(), devices.count()
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if device is None:
        is_lacking = shutil.which("nvidia-smi") is not None and hidden is None
        remedy = "this machine has nvidia-smi: install a CUDA build of torch that its driver runs" if is_lacking else ""
        yield Finding("GPU", "torch sees none" + (f" (CUDA_VISIBLE_DEVICES={hidden})" if hidden else ""), remedy)
        return
    for index in range(number):
        one = torch.device(device.type, index)
        free = devices.free_memory(one)
        yield Finding(str(one), f"{devices.product_name(one)}, {_in_words(free)} of memory free")


def ray_nodes(address: str | None) -> Iterator[Finding]:
    """What Ray would compute on."""
    if address is None:
        here = ray_cluster.offers(ray_cluster.local_nodes())
        yield Finding("Ray", f"not asked; as torch counts, {here} (--address shows a cluster)")
        return
    with ray_cluster.connected(address, ray_cluster.Resources()) as nodes:
        yield Finding("Ray", f"{len(nodes)} nodes: {ray_cluster.offers(nodes)}")
        for node, seen in zip(nodes, ray_cluster.on_each(nodes, devices.count), strict=True):
            if seen < node["Resources"].get("GPU", 0):
                remedy = "runs with --resources.gpu fail there; install a CUDA build of torch that its driver runs"
                yield Finding("", f"torch sees {seen} GPU on {node['NodeManagerAddress']}", remedy)


def mlflow_store(out: Path) -> Iterator[Finding]:
    """Where runs are tracked."""
    uri = store.store_uri(out)
    database = store.database_of(uri)
    if database is not None and database.exists():
        broken = store.why_broken(database)
        remedy = "the next run sets it aside and makes a new one" if broken else ""
        yield Finding("MLflow", f"{uri}{f', broken: {broken}' if broken else ''}", remedy)
        return
    yield Finding("MLflow", uri if database is None else f"{uri} (made by the first run)")
    store.check_reachable(uri)


def data_root() -> Iterator[Finding]:
    """Where datasets lie."""
    root = fingerprint.data_root(None)
    inside = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    yield Finding("data", f"{root}: {', '.join(inside) or 'nothing yet; --data digits needs nothing'}")


def disk(out: Path) -> Iterator[Finding]:
    """What is free where runs are written."""
    there = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
    free = shutil.disk_usage(there).free
    remedy = f"a sweep fills it; free some, or choose another --runs than {out}" if free < LEAST_DISK else ""
    yield Finding("disk", f"{memory.in_words(free)} free for {out}", remedy)


def three_rounds(name: str) -> Iterator[Finding]:
    """FOLA on digits, on the device and on the CPU."""
    device = devices.named(name)
    found, seconds = trained(str(device))
    yield Finding("rounds", f"{ROUNDS} of FOLA on {device}: {seconds:.1f} s")
    repeats = torch.equal(trained(str(device))[0], found)
    remedy = "torch.use_deterministic_algorithms(True) names the kernel whose sums have no order"
    yield Finding("", "repeated to the bit" if repeats else "other bits when repeated", "" if repeats else remedy)
    if device.type != "cpu":
        expected, seconds = trained("cpu")
        gap = float((found.cpu() - expected).abs().max())
        remedy = f"rounding explains {ROUNDING:g}; {UPDATE}"
        yield Finding(
            "", f"on the CPU: {seconds:.1f} s; parameters differ by {gap:.1g}", "" if gap <= ROUNDING else remedy
        )


def trained(device: str) -> tuple[Tensor, float]:
    """The parameters after a few rounds, and the seconds that they took."""
    problem = problem_of(configure({"data": "digits", "data.clients": 4, "model": "mlp", "compute.device": device}))
    start = time.perf_counter()
    records = federate(Fola(), problem, Training(lr=0.05), Federation(rounds=ROUNDS), Functional(chunk=1))
    params = flatten([record.after.state.params for record in records][-1])
    float(params.sum())  # the device has finished
    return params, time.perf_counter() - start


def _in_words(number: int | None) -> str:
    return "an unknown amount" if number is None else memory.in_words(number)
