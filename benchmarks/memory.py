"""Peak memory of rounds with N=100 clients on the MLP, each in a process of its own.

`python -m benchmarks.memory fola 2` prints one JSON line.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.table import Row
from benchmarks.works import mnist_mlp
from fl_lightning.engines.functional import Functional
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola

METHODS = {"fedavg": FedAvg(), "fola": Fola()}
NUM_CLIENTS = 100


def measure_memory() -> list[Row]:
    """Peaks above the baseline: after one round, and after two with every record dropped before the next."""
    rows = []
    for method in METHODS:
        for rounds in (1, 2):
            command = [sys.executable, "-m", "benchmarks.memory", method, str(rounds)]
            result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            kinds = 1 if method == "fedavg" else 2  # models, precisions
            note = (
                f"{kinds} x {NUM_CLIENTS} x {result['model']:.2f} MB = {kinds * NUM_CLIENTS * result['model']:.0f} MB "
                f"of models{' and precisions' if kinds == 2 else ''}; data {result['data']:.0f} MB are in the "
                f"baseline of {result['baseline']:.0f} MB"
            )
            rows.append(Row("memory", f"{method}, N=100, {rounds} round(s)", result["peak"], "MB", None, note))
    return rows


def peak_of(method: str, rounds: int) -> dict[str, float]:
    """Megabytes: growth of the peak by the rounds, memory in use before them, one model, the data."""
    work = replace(mnist_mlp(scale=1.0), rounds=rounds)
    clients = torch.arange(60_000).split(60_000 // NUM_CLIENTS)
    few = replace(work, clients=clients[:2], cohort=2)
    next(few.run(METHODS[method], Functional()))  # libraries and workspaces
    forget_peak()
    baseline = peak_megabytes()
    records = replace(work, clients=clients, cohort=NUM_CLIENTS).run(METHODS[method], Functional())
    for _ in range(rounds):
        next(records)  # the record is dropped at once
    model = sum(p.numel() * p.element_size() for p in work.model.parameters()) / 1e6
    data = (work.dataset.train_x.numel() + work.dataset.test_x.numel()) * 4 / 1e6
    return {"peak": peak_megabytes() - baseline, "baseline": baseline, "model": model, "data": data}


def forget_peak() -> None:
    """Start the peak anew from what is in use now (Linux): importing libraries takes more than it leaves behind."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak_megabytes() -> float:
    """The peak of this process. Not `ru_maxrss`: a child starts with the peak of the process that started it."""
    line = next(
        line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM")
    )
    return int(line.split()[1]) * 1024 / 1e6


if __name__ == "__main__":
    print(json.dumps(peak_of(sys.argv[1], int(sys.argv[2]))))
