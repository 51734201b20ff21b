"""fl-lightning partition: preview a partition before training."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fl_lightning.cli.flags import CommandParser, add_runs, explained, with_files, writable_picture
from fl_lightning.data import feature_skew, heterogeneity
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.partition import Split, counted
from fl_lightning.data.shares import class_counts, content_hash
from fl_lightning.errors import require
from fl_lightning.models.inputs import several
from fl_lightning.runs.config.run_config import RunConfig, chosen_names, configure
from fl_lightning.runs.config.schema import fields_of

# Limits of a readable picture and a readable table.
MOST_SPLITS, MOST_ROWS = 24, 100
MOST_EXAMPLES = 10
# What can be varied: how the data are divided. None of these settings has a comma in its values.
VARIED = (*(f"data.{name}" for name in fields_of(Split)), "seed")

DESCRIPTION = """Preview a partition before training.

It prints samples and classes per client, the label entropy in bits, and the EMD: the sum over classes of the
difference between the client's share and the population's, from 0 (the same mixture) to 2 (the most different).
It also draws a picture. Several values with commas are compared side by side."""
EXAMPLES = """examples:
  fl-lightning partition --data digits --data.alpha 0.01 --data.clients 20
  fl-lightning partition --data digits --data.alpha 0.01,0.1,1 --data.partition dirichlet,dirichlet_balanced

All settings of `fl-lightning run` may be given; those of the chosen dataset and its partition are:
"""


class Preview(NamedTuple):
    """One partition.

    Attributes:
        varied: The settings in which it differs from the others, as given.
        config: All settings.
        counts: Samples per client and class.
        name: Hash of the partition, the tag `partition` of runs that use it.
        examples: An image of each of some clients, if their inputs are skewed.
    """

    varied: dict[str, str]
    config: RunConfig
    counts: Tensor
    name: str
    examples: dict[str, Tensor]

    @property
    def title(self) -> str:
        """Of its panel in the picture."""
        return ", ".join(f"{key.removeprefix('data.')} {value}" for key, value in self.varied.items())


def main(arguments: Sequence[str]) -> int:
    """Show the partitions that the flags describe."""
    parser = _parser()
    options, given = with_files(parser, arguments)
    if options.help:
        parser.epilog = EXAMPLES + explained(chosen_names(given), only=("data", "seed"))
        parser.print_help()
        return 0
    settings = [(varied, configure(own)) for varied, own in side_by_side(given)]
    dataset = settings[0][1].source.load()
    previews = [preview(varied, config, dataset) for varied, config in settings]
    picture = draw(previews, writable_picture(options.picture or options.out / "partition.png"))
    if options.json:
        print(json.dumps(as_json(previews, picture)))
    else:
        print(as_text(previews))
        print(f"\npicture  {picture}")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="fl-lightning partition",
        usage="fl-lightning partition [--config FILE] [--picture FILE.png] [--json] [--KEY VALUE[,VALUE...] ...]",
        description=DESCRIPTION,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="this text; --data NAME adds that dataset's settings")
    parser.add_argument("--config", action="append", default=[], help="YAML file with settings; flags override it")
    add_runs(parser)
    parser.add_argument("--picture", type=Path, help="file of the picture [RUNS/partition.png]")
    parser.add_argument("--json", action="store_true", help="print only one JSON object with all numbers")
    return parser


def side_by_side(settings: Mapping[str, Any]) -> list[tuple[dict[str, str], dict[str, Any]]]:
    """The settings of every combination of values, each with those in which it differs from the others.

    >>> for varied, own in side_by_side({"data": "mnist", "data.alpha": "0.1,1"}):
    ...     print(varied, own)
    {'data.alpha': '0.1'} {'data': 'mnist', 'data.alpha': '0.1'}
    {'data.alpha': '1'} {'data': 'mnist', 'data.alpha': '1'}
    """
    choices: dict[str, list[str]] = {}
    for key, given in settings.items():
        if key in VARIED and isinstance(given, str):
            values = [item.strip() for item in given.split(",")]
            require(all(values), f"--{key} needs a value between commas, got {given!r}")
            choices[key] = list(dict.fromkeys(values))
    combinations = list(product(*choices.values()))
    require(
        len(combinations) <= MOST_SPLITS,
        f"at most {MOST_SPLITS} partitions can be shown side by side, got {len(combinations)}; give fewer values",
    )
    named = [dict(zip(choices, values, strict=True)) for values in combinations]
    return [({key: value for key, value in one.items() if len(choices[key]) > 1}, {**settings, **one}) for one in named]


def preview(varied: dict[str, str], config: RunConfig, dataset: Dataset) -> Preview:
    """Divide the training set as a run would."""
    from fl_lightning.runs.problem import divided  # the training loop with it: not for errors and help

    config = replace(config, split=counted(config.split, dataset.owners))
    division = divided(config, dataset)
    feature_skew.check(dataset, config.split)
    counts = class_counts(dataset.strata, division.clients, dataset.num_strata)
    return Preview(varied, config, counts, content_hash(division.clients), _examples(config, dataset, division.held))


def _examples(config: RunConfig, dataset: Dataset, clients: Sequence[Tensor]) -> dict[str, Tensor]:
    """What the skew does to the images of some clients, from the first to the last."""
    if config.split.feature_skew == "none" or several(dataset.train_x) or len(dataset.shape) != 3:
        return {}
    images = feature_skew.skew(dataset, clients, config.split, config.seed).train_x
    levels = feature_skew.levels(config.split)
    holders = [client for client, indices in enumerate(clients) if len(indices)]
    step = max(1, math.ceil((len(holders) - 1) / (MOST_EXAMPLES - 1)))
    chosen = dict.fromkeys([*holders[::step], holders[-1]])
    return {f"client {n}\n{levels[n]:.3g}": images[clients[n][0]].cpu() for n in chosen}


def draw(previews: Sequence[Preview], path: Path) -> Path:
    """Save the picture."""
    from fl_lightning.runs.plotting import run_figures  # matplotlib: not for errors and help

    if len(previews) == 1:
        one = previews[0]
        return run_figures.save(run_figures.partition(one.counts, _settings(one), one.examples), path)
    return run_figures.save(run_figures.partitions({one.title: one.counts for one in previews}), path)


def as_text(previews: Sequence[Preview]) -> str:
    """The table of the clients if there is one partition, and a row for each."""
    from fl_lightning.system.text import render

    first = previews[0]
    lines = [f"{_settings(first)}; {first.counts.shape[1]} classes", ""]
    if len(previews) == 1:
        lines += [render(_aligned(client_rows(first)[:MOST_ROWS]))]
        if len(first.counts) > MOST_ROWS:
            lines += [f"the first {MOST_ROWS} of {len(first.counts)} clients; --json prints all"]
        lines += [""]
    pooled = heterogeneity.measure(first.counts.sum(0, keepdim=True)).entropy.item()
    return "\n".join(
        [
            *lines,
            render(_aligned([summary_row(one) for one in previews])),
            f"entropy: of the labels, in bits; {pooled:.2f} for all clients together",
            "EMD: 0 for the mixture of classes of all clients together, 2 for the most different",
        ]
    )


def client_rows(one: Preview) -> list[dict[str, str]]:
    """One row per client."""
    measured = heterogeneity.measure(one.counts)
    split = one.config.split
    rows = []
    for client, (counts, level) in enumerate(zip(one.counts, feature_skew.levels(split), strict=True)):
        samples = int(measured.samples[client])
        row = {
            "client": str(client),
            "samples": str(samples),
            "classes": str(int(measured.classes[client])),
            "entropy": f"{measured.entropy[client]:.2f}" if samples else "-",
            "EMD": f"{measured.emd[client]:.2f}" if samples else "-",
            "largest class": f"{int(counts.argmax())} ({counts.max() / samples:4.0%})" if samples else "no samples",
        }
        if split.feature_skew != "none":
            row[split.feature_skew] = f"{level:.3g}"
        rows.append(row)
    return rows


def summary_row(one: Preview) -> dict[str, str]:
    """One partition in one row."""
    summary = heterogeneity.summarise(one.counts)
    row = {key.removeprefix("data."): value for key, value in one.varied.items()}
    return {
        **row,
        "clients": str(summary.clients),
        "empty": str(summary.empty),
        "samples": str(int(one.counts.sum())),
        "smallest": str(summary.smallest),
        "median": f"{summary.median:g}",
        "largest": str(summary.largest),
        "mean classes": f"{summary.classes:.2f}",
        "mean entropy": f"{summary.entropy:.2f}",
        "mean EMD": f"{summary.emd:.3f}",
        "hash": one.name,
    }


def as_json(previews: Sequence[Preview], picture: Path) -> dict[str, Any]:
    """Everything that is known about the partitions."""
    return {
        "data": previews[0].config.names["data"],
        "picture": str(picture),
        "partitions": [
            {
                "settings": {key: value for key, value in one.config.flat().items() if key in VARIED},
                "hash": one.name,
                "summary": heterogeneity.summarise(one.counts)._asdict(),
                "clients": _columns(one),
                "counts": one.counts.tolist(),
            }
            for one in previews
        ],
    }


def _columns(one: Preview) -> dict[str, list[Any]]:
    """The statistics of the clients as lists; null where a client has no samples."""
    columns = {name: column.tolist() for name, column in heterogeneity.measure(one.counts)._asdict().items()}
    if one.config.split.feature_skew != "none":
        columns[one.config.split.feature_skew] = feature_skew.levels(one.config.split)
    return {
        name: [None if isinstance(value, float) and math.isnan(value) else value for value in column]
        for name, column in columns.items()
    }


def _as_written(value: Any) -> Any:
    """As the value of a setting is written down: tuples as lists."""
    return list(value) if isinstance(value, tuple) else value


def _settings(one: Preview) -> str:
    """What the partitions have in common: dataset, kind, number of clients, and what is not as by default."""
    flat, defaults = one.config.flat(), fields_of(Split)
    named = {
        name: flat[f"data.{name}"]
        for name, item in defaults.items()
        if name in ("partition", "clients") or flat[f"data.{name}"] != _as_written(item.default)
    }
    shown = {name: value for name, value in (named | {"seed": flat["seed"]}).items() if _key(name) not in one.varied}
    return ", ".join([f"{flat['data']}", *(f"{name} {value}" for name, value in shown.items())])


def _key(name: str) -> str:
    return name if name == "seed" else f"data.{name}"


def _aligned(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """The rows with numbers at the right of their column."""
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in rows[0]}
    return [{name.rjust(widths[name]): cell.rjust(widths[name]) for name, cell in row.items()} for row in rows]
