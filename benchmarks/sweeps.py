"""What Ray and MLflow cost per run, and how well two cores are used."""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.table import Row
from fl_lightning import experiment
from fl_lightning.loop import federate
from fl_lightning.metrics.round_metrics import measure
from fl_lightning.runs.config.run_config import RunConfig, configure
from fl_lightning.runs.open_run import RunOptions
from fl_lightning.runs.problem import problem_of
from tune.grid import cells
from tune.study import Study
from tune.study_file import load
from tune.sweep import Options, sweep

WORK = "sweeps"
NUM_TINY = 200
TINY = """
base: {data: digits, data.clients: 5, model: softmax, training.lr: 0.1, federation.rounds: 2, engine: functional}
cases: [fedavg]
seeds: %d
"""
# Long enough that starting processes does not decide: some 30 runs of a few seconds.
STEADY = """
base: {data: digits, data.clients: 10, model: mlp, model.hidden: [256, 128], engine: functional, engine.chunk: 1}
environments: {federation.rounds: [30]}
cases: [fedavg, fola]
seeds: 16
"""
SLIM = RunOptions(pictures=False, checkpoint=False)


def measure_sweeps() -> list[Row]:
    """Wall time, because several processes are compared; so on a quiet machine only."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return [*_overhead(folder), *_throughput(folder)]


def _overhead(folder: Path) -> list[Row]:
    study = _study(folder, "tiny", TINY % NUM_TINY)
    configs = [config for cell in cells(study) for config in cell.configs]
    start = time.perf_counter()
    for config in configs:
        _bare(config)
    alone = (time.perf_counter() - start) / len(configs)
    start = time.perf_counter()
    for config in configs:
        experiment.complete(config, folder / "tracked", SLIM)
    tracked = (time.perf_counter() - start) / len(configs)
    start = time.perf_counter()
    sweep(study, Options(folder / "swept", max_concurrent=1), lambda _: None)
    swept = (time.perf_counter() - start) / len(configs)
    note = f"{NUM_TINY} runs of two rounds"
    return [
        Row(WORK, "federate alone, per run", 1000 * alone, "ms", None, note),
        Row(WORK, "files and MLflow, per run", 1000 * (tracked - alone), "ms"),
        Row(WORK, "Ray, per run (cluster start included)", 1000 * (swept - tracked), "ms", None, "one trial at a time"),
    ]


def _throughput(folder: Path) -> list[Row]:
    study = _study(folder, "steady", STEADY)
    half = "import sys; from benchmarks.sweeps import bare_half; bare_half(sys.argv[1], int(sys.argv[2]))"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
    processes = [
        subprocess.Popen([sys.executable, "-c", half, str(folder / "steady.yaml"), str(which)], env=environment)
        for which in (0, 1)
    ]
    for process in processes:
        process.wait()
    bare = time.perf_counter() - start
    start = time.perf_counter()
    sweep(study, Options(folder / "steadily", max_concurrent=2), lambda _: None)
    swept = time.perf_counter() - start
    note = f"{bare:.0f} s in two bare processes, {swept:.0f} s as a sweep, start-up included in both"
    return [Row(WORK, "sweep / two bare processes", swept / bare, "x", 1 / 0.85, note)]


def bare_half(path: str, which: int) -> None:
    """Every other run of a study, without files, MLflow or Ray."""
    torch.set_num_threads(1)
    configs = [config for cell in cells(load(path)) for config in cell.configs]
    for config in configs[which::2]:
        _bare(config)


def _bare(config: RunConfig) -> None:
    problem = problem_of(config)
    records = federate(config.method, problem, config.training, config.federation, config.engine)
    for record in records:
        measure(config.method, problem.task, problem.dataset, record)


def _study(folder: Path, name: str, text: str) -> Study:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    configure({})  # imports what all contestants need
    return load(str(path))
