"""fl-lightning uncertainty: the posterior of a finished run, and the calibration of its predictions."""

import argparse
import json
import math
import textwrap
from collections.abc import Sequence

from fl_lightning.cli.flags import CommandParser, add_runs, type_name
from fl_lightning.metrics.metric import is_final, kinds_in
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.config.schema import Field, as_text, fields_of
from fl_lightning.system.text import render

SECTION = "uncertainty"
COLUMNS = ("accuracy", "NLL", "Brier", "ECE", "adaptive_ECE", "classwise_ECE", "AURC")
DETECTION = ("AUROC", "AUPR", "FPR95")
EPILOG = """RUN is the folder of a run, its id in MLflow, or the beginning of one. In one extra round without training
all clients send the curvature of their data at the final model. The run's last round gets the numbers, in
its folder and in MLflow.

examples:
  fl-lightning uncertainty runs/fola-mnist-0123456789ab-cdef-20r --ood '[fashion_mnist, noise]'
  fl-lightning uncertainty 3f2a --form diagonal --prior_precision marglik --predictive '[probit, nn]'"""


def main(arguments: Sequence[str]) -> int:
    """Measure the posterior of a run."""
    parser = CommandParser(prog="fl-lightning uncertainty", description=__doc__, epilog=EPILOG)
    parser.add_argument("run", metavar="RUN", help="folder, or MLflow id")
    add_runs(parser)
    parser.add_argument("--json", action="store_true", help="print only one JSON object with all numbers")
    schema = _schema()
    for name, item in schema.items():
        text = f"{item.help} [{as_text(name, item.default)}]".replace("%", "%%")
        parser.add_argument(f"--{name}", metavar=type_name(item.type), help=text, default=None)
        # As `run` calls it, and as messages do.
        parser.add_argument(f"--{SECTION}.{name}", dest=name, help=argparse.SUPPRESS, default=None)
    options = parser.parse_args(list(arguments))
    given = {name: value for name in schema if (value := getattr(options, name)) is not None}
    from analysis.tables import TABLES
    from fl_lightning.cli.progress import Progress
    from fl_lightning.runs.load import config_of, measure_posterior  # imports what only this needs
    from fl_lightning.runs.locate import folder_of_run

    folder = folder_of_run(options.run, options.out)
    changed = {f"{SECTION}.{name}": value for name, value in given.items()}
    settings = configure({**config_of(folder).flat(), **changed}).uncertainty
    with Progress(1, "final round", quiet=options.json, verbose=False) as progress:
        result = measure_posterior(folder, settings, options.out)
        progress.show(1, result.history[-1])
    numbers = {name: value for name, value in result.final.items() if is_final(name) and not math.isnan(value)}
    if options.json:
        print(json.dumps({"run_id": result.run_id, "folder": str(result.folder), **numbers}))
        return 0
    meaning = {entry.key: textwrap.fill(entry.about, 100) for entry in TABLES}  # the words of the report
    print(f"{render(rows(numbers))}\n\n{meaning['calibration']}")
    strange = sorted({name.split("/")[2] for name in numbers if name.count("/") == 2})
    if strange:
        print(f"\n{render(detection_rows(numbers, strange))}\n\n{meaning['detection']}")
    print("", *against_map(numbers, strange), sep="\n")
    prior = numbers["posterior/prior_precision"]
    print(f"posterior  {settings.form}, prior precision {prior:g}, {numbers['posterior/bytes_up'] / 1e6:.2f} MB sent")
    print(f"files      {result.folder}")
    return 0


def rows(numbers: dict[str, float]) -> list[dict[str, str]]:
    """One line for every kind of prediction."""
    kinds = kinds_in(numbers)
    table = []
    for kind in kinds:
        row = {"prediction": kind}
        for column in COLUMNS:
            value = numbers[f"{kind}/{column}"]
            title = f"{column} (%)" if column == "accuracy" else column.replace("_", " ")
            row[title] = f"{100 * value:.2f}" if column == "accuracy" else f"{value:.4f}"
        table.append(row)
    return table


def detection_rows(numbers: dict[str, float], strange: Sequence[str]) -> list[dict[str, str]]:
    """One line for every kind of prediction and of out-of-distribution inputs."""
    kinds = kinds_in(numbers)
    return [
        {"prediction": kind, "out-of-distribution inputs": name}
        | {metric: f"{numbers[f'{kind}/{metric}/{name}']:.4f}" for metric in DETECTION}
        for name in strange
        for kind in kinds
    ]


def against_map(numbers: dict[str, float], strange: Sequence[str]) -> list[str]:
    """Whether each kind of prediction is better than the mean's: on the test set, and at out-of-distribution inputs.

    >>> against_map({"map/NLL": 0.5, "probit/NLL": 0.6, "map/AUROC/noise": 0.7, "probit/AUROC/noise": 0.9}, ["noise"])
    ['probit against map: worse on the test set (NLL 0.6000, map 0.5000), better on noise (AUROC 0.9000, map 0.7000)']
    """
    places = [("NLL", "the test set", -1), *((f"AUROC/{name}", name, 1) for name in strange)]
    return [
        f"{kind} against map: {', '.join(_against_map(numbers, kind, *place) for place in places)}"
        for kind in kinds_in(numbers)
        if kind != "map"
    ]


def _against_map(numbers: dict[str, float], kind: str, metric: str, where: str, way: int) -> str:
    mine, other = numbers[f"{kind}/{metric}"], numbers[f"map/{metric}"]
    word = "level" if mine == other else "better" if way * (mine - other) > 0 else "worse"
    return f"{word} on {where} ({metric.partition('/')[0]} {mine:.4f}, map {other:.4f})"


def _schema() -> dict[str, Field]:
    from fl_lightning.metrics.uncertainty.settings import Uncertainty

    return {name: item for name, item in fields_of(Uncertainty).items() if name != "final_round"}
