"""What Ray and MLflow cost per run, how well two cores are used, and what sharing first rounds saves."""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.table import Row
from fl_lightning import experiment
from fl_lightning.config import RunConfig, configure
from fl_lightning.experiment import Outputs
from fl_lightning.loop import federate
from fl_lightning.probes.accuracy import measure
from tune.estimate import forecast
from tune.first_round import share_first_round
from tune.grid import cells
from tune.packing import units
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
SLIM = Outputs(pictures=False, checkpoint=False)


def measure_sweeps() -> list[Row]:
    """Wall time, because several processes are compared; so on a quiet machine only."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return [*_overhead(folder), *_throughput(folder), *_sharing(folder)]


def _overhead(folder: Path) -> list[Row]:
    study = _study(folder, "tiny", TINY % NUM_TINY)
    configs = [config for cell in cells(study) for config in cell.configs]
    start = time.perf_counter()
    for config in configs:
        _bare(config)
    alone = (time.perf_counter() - start) / len(configs)
    start = time.perf_counter()
    for config in configs:
        experiment.finish(experiment.rounds(config, folder / "tracked", outputs=SLIM))
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


def _sharing(folder: Path) -> list[Row]:
    """One trajectory of the paper's grid on a slice of MNIST-shaped data, against its ten runs one by one."""
    study = load("mnist_first_round", "paper")
    varied = {"data": "digits", "training.lr": 0.01, "data.alpha": 0.1, "data.clients": 10, "training.batch_size": 32}
    slice_ = load("mnist_first_round", "paper", {**varied, "engine.chunk": 1})
    configs = [replace(cell.config, seed=0) for cell in cells(slice_)]
    start = time.process_time()
    for _, progress in share_first_round(configs, folder / "together", outputs=lambda _: SLIM):
        experiment.finish(progress)
    together = time.process_time() - start
    start = time.process_time()
    for config in configs:
        experiment.finish(experiment.rounds(config, folder / "apart", outputs=SLIM))
    apart = time.process_time() - start
    whole = _whole_grid(study)
    note = f"{len(configs)} runs (five E, two methods); CPU time, files and MLflow included"
    return [
        Row(
            WORK,
            "shared first round / one by one",
            together / apart,
            "x",
            None,
            f"saves {apart / together:.1f}x; {note}",
        ),
        Row(WORK, "the paper's grid, shared / one by one", 1 / whole, "x", 0.2, f"computed: saves {whole:.1f}x"),
    ]


def _whole_grid(study: Study) -> float:
    """The factor for all runs of the grid, from measured costs per sample and evaluation on digits-sized data."""
    grid = [replace(cell.config, seed=0) for cell in cells(_on_digits(study))]
    cost = forecast(units(grid), 1, keep_checkpoints=False)
    return cost.alone / cost.seconds


def _on_digits(study: Study) -> Study:
    return replace(study, base={**study.base, "data": "digits", "engine.chunk": 1})


def _bare(config: RunConfig) -> None:
    dataset, clients, holdout, task = experiment.build(config)
    records = federate(
        config.method, task, dataset, clients, config.training, config.federation, config.engine, config.seed, holdout
    )
    for record in records:
        measure(config.method, task, dataset, record)


def _study(folder: Path, name: str, text: str) -> Study:
    path = folder / f"{name}.yaml"
    path.write_text(text)
    configure({})  # imports what all contestants need
    return load(str(path))
