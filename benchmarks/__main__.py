"""Run the benchmarks, print a table, store it as JSON."""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import works
from benchmarks.augmentation import measure_augmentation
from benchmarks.chunks import measure_chunks
from benchmarks.evaluation import measure_evaluation
from benchmarks.forms import measure_forms
from benchmarks.mapping import measure_mapping
from benchmarks.memory import measure_memory
from benchmarks.population import measure_population
from benchmarks.precision import measure_precision
from benchmarks.speed import measure_speed
from benchmarks.sweeps import measure_sweeps
from benchmarks.table import Row, show
from benchmarks.uncertainty import measure_uncertainty
from benchmarks.workers import measure_workers

PARTS = (
    "1",
    "2",
    "3",
    "forms",
    "precision",
    "evaluation",
    "uncertainty",
    "augmentation",
    "memory",
    "mapping",
    "vmap",
    "population",
    "workers",
    "sweeps",
)
# Whole benchmark in about ten minutes on two quiet cores.
SCALE = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--scale", type=float, default=SCALE, help="share of the full works that is run, up to 1")
    parser.add_argument("--only", default=",".join(PARTS), help=f"comma-separated, of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, default=Path("runs/benchmarks.json"), help="file to write")
    options = parser.parse_args()
    chosen = options.only.split(",")
    unknown = sorted(set(chosen) - set(PARTS))
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    measures: dict[str, Callable[[], list[Row]]] = {
        "1": lambda: speed_of(works.mnist_mlp(options.scale)),
        "2": lambda: speed_of(works.cifar_cnn(options.scale)),
        "3": lambda: speed_of(works.tiny_fits(options.scale)),
        "forms": lambda: measure_forms(works.mnist_mlp(options.scale)),
        "precision": lambda: [
            row for work in (works.mnist_mlp, works.cifar_cnn) for row in measure_precision(work(options.scale))
        ],
        "evaluation": lambda: measure_evaluation(works.mnist_mlp(options.scale)),
        "uncertainty": lambda: measure_uncertainty(works.mnist_mlp(options.scale)),
        "augmentation": measure_augmentation,
        "memory": measure_memory,
        "mapping": measure_mapping,
        "vmap": lambda: measure_chunks(options.scale),
        "population": measure_population,
        "workers": lambda: measure_workers(options.scale),
        "sweeps": measure_sweeps,
    }
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread, scale {options.scale:g}; ratios are medians")
    print("over turns of CPU time, contestants taking turns round by round; aims are upper bounds")
    rows: list[Row] = []
    start = time.perf_counter()
    for part in PARTS:
        if part in chosen:
            fresh = measures[part]()
            show(fresh)
            rows += fresh
    seconds = time.perf_counter() - start
    options.json.parent.mkdir(parents=True, exist_ok=True)
    table = [asdict(row) | {"verdict": row.verdict} for row in rows]
    options.json.write_text(json.dumps({"scale": options.scale, "seconds": seconds, "rows": table}, indent=1))
    missed = sum(row.verdict == "MISSED" for row in rows)
    print(f"{missed} aims missed, {seconds:.0f} s, written to {options.json}")


def speed_of(work: works.Work) -> list[Row]:
    print(f"work {work.name}: {work.share}, {work.rounds} timed rounds, from round 2 on")
    return measure_speed(work)


if __name__ == "__main__":
    main()
