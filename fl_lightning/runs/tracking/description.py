"""What MLflow says of a run beside its numbers: its name, its tags, its settings."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fl_lightning.data.shares import content_hash
from fl_lightning.errors import require
from fl_lightning.runs import provenance
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.runs.config.schema import PARTS
from fl_lightning.runs.folder import STOPPED_TAG
from fl_lightning.runs.identity import identity, trajectory
from fl_lightning.runs.tracking.sync import marks_of

# A name longer than this says nothing more.
LONGEST_NAME = 200
SYMBOLS = {"training.epochs": "E", "training.batch_size": "B", "data.clients": "N", "federation.fraction": "C"}
# What the program itself says about a run.
PROGRAM_TAGS = frozenset(
    {
        *("method", "data", "model", "partition", "seed", "identity", "trajectory", "status", "diverged", "case"),
        *(STOPPED_TAG, "study", "kind", "package", "torch", "device", provenance.SETTINGS_TAG, provenance.VERSIONS_TAG),
    }
)
PROGRAM_PREFIXES = ("mlflow.", "fl_lightning.", "study.")
# Of the letters of a tag, as MLflow has them; it refuses more only when a run goes on.
LONGEST_KEY, LONGEST_VALUE = 250, 5000


class Description(NamedTuple):
    """The name, tags and settings of a run."""

    name: str
    tags: dict[str, str]
    params: dict[str, Any]


def description_of(
    config: RunConfig, folder: Path, clients: Sequence[Tensor], further: Mapping[str, str]
) -> Description:
    """Describe a run.

    Args:
        config: Its settings.
        folder: Where its files are.
        clients: The samples of each client.
        further: Further tags.

    Raises:
        UserError: If MLflow does not take these tags.
    """
    check_tags(further)
    names = config.names
    tags = {
        **{name: names[name] for name in ("method", "data", "model")},
        "partition": content_hash(clients),
        "seed": str(config.seed),
        "identity": identity(config),
        "trajectory": trajectory(config),
        **provenance.tags(config),
        **further,
    }
    params = config.flat()
    if config.split.partition == "natural":  # as many as the data have owners
        params["data.clients"] = len(clients)
    return Description(run_name(config, tags), {**tags, **marks_of(folder, tags["identity"])}, params)


def check_tags(tags: Mapping[str, str]) -> None:
    """Refuse tags that MLflow does not take."""
    for key, value in tags.items():
        require(
            len(key) <= LONGEST_KEY and len(value) <= LONGEST_VALUE,
            f"expected a tag with a key of at most {LONGEST_KEY} letters and a value of at most {LONGEST_VALUE}, got "
            f"{len(key)} and {len(value)} in {f'{key}={value}'[:30]}...; shorten it",
        )
        require(
            key != "." and not key.startswith(("..", "/")),
            f"expected a tag's key that does not begin as a path does, got {key!r}; begin it with a letter",
        )
        require(
            not re.search("[\0\ud800-\udfff]", value),  # bytes that are not UTF-8
            f"expected a tag's value of letters that can be printed, got {key}={value!r}; leave out the others",
        )


def run_name(config: RunConfig, tags: Mapping[str, str]) -> str:
    """What the UI shows: the method and what was chosen for it first, because long names are cut off.

    Every setting that is not at its default is in it, so that runs which differ have names that differ.
    """
    names, chosen = config.names, config.varied()
    shown = {"method", "data", "data.alpha", "data.root", "federation.rounds", "seed"}
    own = {key: value for key, value in chosen.items() if key.startswith("method.")}
    usual = {part for part, (_, default, _) in PARTS.items() if names[part] == default}
    rest = {key: value for key, value in chosen.items() if key not in shown | own.keys() | usual}
    start = [tags.get("case", names["method"]), *_in_short(own), f"R={config.federation.rounds}", f"seed={config.seed}"]
    return " ".join([*start, names["data"], f"alpha={config.split.alpha:g}", *_in_short(rest)])[:LONGEST_NAME]


def _in_short(settings: Mapping[str, Any]) -> list[str]:
    """As papers write them.

    >>> _in_short({"training.epochs": 5, "method.strength": 10.0, "model": "cnn", "model.hidden": [8, 8]})
    ['E=5', 'strength=10', 'model=cnn', 'hidden=[8,8]']
    """
    return [
        f"{SYMBOLS.get(key, key.rpartition('.')[2])}={f'{value:g}' if isinstance(value, float) else value}".replace(
            ", ", ","
        )
        for key, value in settings.items()
    ]
