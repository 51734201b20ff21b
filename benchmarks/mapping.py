"""Memory of four runs at once that map the same files, against four that hold copies.

Of each process: resident memory (Rss, where a shared page counts for everybody), its fair share (Pss, where a page that
four processes map counts a quarter), and what is its own (private). Growth by loading and by reading every image once.
`python -m benchmarks.mapping cifar10 map` is one of the processes: it prints a JSON line when it has read everything,
and stays until its input is closed, so that all are measured side by side.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.table import Row
from fl_lightning import configure
from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import UserError

NUM_PROCESSES = 4
SOURCES = ("cifar10", "mnist")


def measure_mapping() -> list[Row]:
    """The growth of all processes together, mapped and copied, for every dataset that is at hand."""
    rows = []
    for source in SOURCES:
        try:
            data = configure({"data": source}).source.load()  # also prepares the copy that is mapped
        except UserError as error:
            print(f"mapping: {source} is left out: {error}")
            continue
        size = sum(tensor.nbytes for tensor in (data.train_x, data.test_x)) / 1e6
        totals = {}
        for way in ("copy", "map"):
            each = processes_at_once(source, way)
            totals[way] = sum(one["pss"] for one in each)
            note = ", ".join(
                f"{key} {'/'.join(f'{one[key]:.0f}' for one in each)}" for key in ("rss", "pss", "shared", "private")
            )
            aim = 1.25 * size if way == "map" else None
            what = f"{source}: {NUM_PROCESSES} processes that {way}, in all"
            rows.append(Row("mapping", what, totals[way], "MB", aim, f"of each: {note}; images {size:.0f} MB"))
    return rows


def processes_at_once(source: str, way: str) -> list[dict[str, float]]:
    """Growth of each process in MB, measured while all of them have read all images."""
    command = [sys.executable, "-m", "benchmarks.mapping", source, way]
    running = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(NUM_PROCESSES)
    ]
    try:
        before = [json.loads(_answer(process)) for process in running]
        for process in running:
            _tell(process, "read")
        for process in running:
            _answer(process)
        for process in running:
            _tell(process, "measure")
        after = [json.loads(_answer(process)) for process in running]
    finally:
        for process in running:
            process.communicate()
    return [{key: now[key] - then[key] for key in now} for then, now in zip(before, after, strict=True)]


def _tell(process: "subprocess.Popen[str]", word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(f"{word}\n")
    process.stdin.flush()


def _answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def be_one(source: str, way: str) -> None:
    """What each process does, step by step, at the parent's command."""
    torch.set_num_threads(1)
    config = configure({"data": source})
    import torchvision.datasets  # noqa: F401

    images, labels = torch.zeros(1000, 3, 32, 32, dtype=torch.uint8), torch.zeros(1000, dtype=torch.long)
    read_everything(Dataset(images, labels, images, labels, num_classes=2))  # libraries and workspaces
    print(json.dumps(memory()), flush=True)
    sys.stdin.readline()
    data = config.source.load()
    if way == "copy":
        data = replace(data, train_x=data.train_x.clone(), test_x=data.test_x.clone())
    print(read_everything(data), flush=True)
    sys.stdin.readline()
    print(json.dumps(memory()), flush=True)
    sys.stdin.readline()


def read_everything(data: Dataset) -> int:
    """Touch every image, in batches, as training and evaluation do."""
    order = torch.randperm(len(data.train_x), generator=torch.Generator().manual_seed(0))
    total = sum(int(data.train_x[batch].amax()) for batch in torch.split(order, 500))
    return total + sum(int(block.amax()) for block in torch.split(data.test_x, 500))


def memory() -> dict[str, float]:
    """Megabytes of this process (Linux)."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    shared = kilobytes["Shared_Clean"] + kilobytes["Shared_Dirty"]
    private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    values = {"rss": kilobytes["Rss"], "pss": kilobytes["Pss"], "shared": shared, "private": private}
    return {key: value * 1024 / 1e6 for key, value in values.items()}


if __name__ == "__main__":
    be_one(sys.argv[1], sys.argv[2])
