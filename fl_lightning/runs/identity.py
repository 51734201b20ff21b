"""By what a run is known: the settings that decide its numbers, and the versions of the code that made them.

Settings count where they differ from their defaults, so that a setting which a later version adds, with a default that
changes nothing, does not make strangers of older runs. Code counts by a small number that every part carries (`version`
of a method, model, source or engine; `VERSION` of the loop, the partition, the augmentation) and that is raised when
its numbers change, or when a default does; `tests/golden` fails where this was forgotten. Plug-ins have no such number:
the content of their file stands for it.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl_lightning import discovery
from fl_lightning.data import augment, partition
from fl_lightning.record import VERSION as LOOP_VERSION
from fl_lightning.runs import checkpoint, start_weights
from fl_lightning.runs.config.run_config import RunConfig

# Where the data lie says nothing about the result.
PLACES = frozenset({"data.root"})
# A setting that names weights: a file, a run, or what torchvision publishes.
WEIGHTS = "model.weights"
# Settings that name the folder of another run.
RUNS = ("probe.reference", "federation.start")


def identity(config: RunConfig) -> str:
    """A short hash of everything that decides the numbers of a run."""
    return _short({"settings": _settings(config), "versions": versions(config)}, 12)


def trajectory(config: RunConfig) -> str:
    """Settings and versions that decide the numbers of each round, as two hashes.

    Runs that differ only in how many rounds they take are prefixes of each other.
    """
    return f"{settings_hash(config)}-{_short(versions(config), 4)}"


def settings_hash(config: RunConfig) -> str:
    """A short hash of the settings alone, without the number of rounds: the same for every version of the code."""
    return _short(
        _settings(dataclasses.replace(config, federation=dataclasses.replace(config.federation, rounds=1))), 12
    )


def versions(config: RunConfig) -> dict[str, int | str]:
    """The version of every part of the code that decides the numbers of a run."""
    parts = {name: version_of(cls) for name, cls in config.classes.items()}
    shared = {"loop": LOOP_VERSION, "partition": partition.VERSION, "augmentation": augment.VERSION}
    chosen = {f"{name}={value}" for name, value in vars(config.method).items()}
    return {**parts, **shared, **{key: number for key, number in config.method.revised.items() if key in chosen}}


def version_of(cls: type[Any]) -> int | str:
    """The number that a part carries, 1 if it has none; for a plug-in, what its file holds.

    A preset carries the version of what it is made of, and after it its own, if it has one.
    """
    own = discovery.plugin_hash(cls) or vars(cls).get("version")
    above = discovery.inherited(cls)
    if above is None:
        return own or getattr(cls, "version", 1)
    return version_of(above) if own is None else f"{version_of(above)}.{own}"


def in_words(made_by: Mapping[str, int | str], now: Mapping[str, int | str]) -> str:
    """Where two sets of versions differ.

    >>> in_words({"method": 1, "loop": 1}, {"method": 2, "loop": 1})
    'method version 1, now 2'
    """
    keys = sorted(key for key in {*made_by, *now} if made_by.get(key) != now.get(key))
    return ", ".join(f"{key} version {made_by.get(key, '-')}, now {now.get(key, '-')}" for key in keys)


def _settings(config: RunConfig) -> dict[str, Any]:
    settings = {key: value for key, value in config.recorded().items() if key not in PLACES}
    if (content := config.source.fingerprint()) is not None:  # what a file holds counts, not where it lies
        settings |= {"data.path": None, "data content": content}
    if (weights := settings.get(WEIGHTS)) is not None:  # the same of weights
        settings[WEIGHTS] = start_weights.content(weights, config.model.options)
    for key in RUNS:
        if key in settings:  # which run it is counts, not where it lies
            settings[key] = checkpoint.identity_of(Path(settings[key]))
    return settings


def _short(content: Any, length: int) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:length]
