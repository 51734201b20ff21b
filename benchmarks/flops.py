"""How much arithmetic a study asks for, and about how long a GPU takes for it: `python -m benchmarks.flops`.

FLOPs of a forward pass are counted by torch on the study's own model; a training step takes three of them (one forward,
two backward), an evaluation one. Rounds that runs share are counted once for each run. The hours are bounds from two
sides: by arithmetic, at the rate that is given, and by the number of steps, since the steps of a small network are too
short to fill a GPU; trials that share a GPU overlap the latter. Measure both rates on your GPU first.
"""

import argparse
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning import discovery
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.system.text import render
from tune import grid, study_file

STUDIES = (
    "mnist_curves",
    "cifar_table",
    "cifar_heterogeneity",
    "ablation_prior",
    "ablation_online_offline",
    "cifar_epochs",
)
# Training samples, test samples and shape of one image of the data sets that studies use.
DATA: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "mnist": (60_000, 10_000, (1, 28, 28)),
    "cifar10": (50_000, 10_000, (3, 32, 32)),
}


class Work(NamedTuple):
    """Optimiser steps, and FLOPs of training and of measuring."""

    steps: float
    training: float
    measuring: float


@cache
def forward_flops(model: str, options: tuple[tuple[str, object], ...], shape: tuple[int, ...]) -> int:
    """Of one sample."""
    network = discovery.find("models", model)(shape, 10, **dict(options))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(torch.zeros(1, *shape))
    return int(counter.get_total_flops())


def work_of(config: RunConfig) -> Work:
    """One run, all of its rounds."""
    flat = config.flat()
    samples, tested, shape = DATA[str(flat["data"])]
    samples = round(samples * flat["data.subset"] * (1 - flat["data.holdout"] - flat["data.validation"]))
    tested = round(tested * flat["data.test_subset"])
    options = tuple((key, tuple(v) if isinstance(v, list) else v) for key, v in config.model.options.items())
    flops = forward_flops(config.model.name, options, shape)
    split, federation, evaluation = config.split, config.federation, config.evaluation
    share = (federation.cohort or split.clients * federation.fraction) / split.clients
    trained = samples * share * config.training.epochs * federation.rounds
    models = 1 + split.clients * share * evaluation.local_share * evaluation.local
    measured = tested * models * federation.rounds / evaluation.every
    return Work(trained / (config.training.batch_size or samples), 3 * flops * trained, flops * measured)


def runs_of(study: str, scale: str) -> Iterator[RunConfig]:
    for cell in grid.cells(study_file.load(study, scale)):
        yield from cell.configs


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.flops", description="Arithmetic of studies, and GPU hours.")
    parser.add_argument("studies", nargs="*", default=STUDIES)
    parser.add_argument("--scale", default="paper")
    parser.add_argument("--tflops", type=float, default=5.0, help="what the GPU reaches on these networks")
    parser.add_argument("--ms", type=float, default=1.0, help="milliseconds of a step when nothing else is on the GPU")
    parser.add_argument("--together", type=int, default=4, help="trials that share the GPU")
    given = parser.parse_args()
    rows = []
    for study in given.studies:
        works = [work_of(config) for config in runs_of(study, given.scale)]
        total = Work(*(sum(column) for column in zip(*works, strict=True)))
        arithmetic = (total.training + total.measuring) / (given.tflops * 1e12) / 3600
        launches = total.steps * given.ms / 1000 / given.together / 3600
        rows.append(
            {
                "study": study,
                "runs": str(len(works)),
                "steps (10^6)": f"{total.steps / 1e6:.0f}",
                "training (PFLOP)": f"{total.training / 1e15:.0f}",
                "measuring (PFLOP)": f"{total.measuring / 1e15:.0f}",
                "hours by FLOPs": f"{arithmetic:.1f}",
                "hours by steps": f"{launches:.1f}",
            }
        )
    print(render(rows, markdown=True))


if __name__ == "__main__":
    main()
