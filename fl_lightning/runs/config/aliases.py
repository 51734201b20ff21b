"""What settings are called elsewhere, in papers, other programs and older files, and the error for an unknown one."""

import warnings
from collections.abc import Collection, Mapping
from typing import Any

from fl_lightning import discovery
from fl_lightning.errors import UserError, unknown
from fl_lightning.runs.config.schema import Field, fields_of, owners, typed

# By the setting; names that are the last part of its key (lr, alpha, clients, rounds, epochs, ...) need no entry.
NAMES = {
    "training.lr": "learning_rate eta",
    "training.epochs": "E local_epochs num_epochs",
    "training.batch_size": "B batch batchsize bs",
    "training.optimiser": "optimizer opt",
    "training.schedule": "lr_schedule lr_scheduler",
    "data.clients": "N K num_clients n_clients",
    "data.alpha": "dirichlet_alpha α",
    "data": "dataset",
    "federation.rounds": "R T num_rounds comm_rounds",
    "federation.fraction": "C participation frac",
    "method.strength": "lambda λ",
    "method.damping": "gamma γ",
    "method": "algorithm strategy",
    "model": "network arch",
    "compute.device": "gpu",
    "seed": "random_seed",
}
USUAL = {name: key for key, names in NAMES.items() for name in names.split()}

# What is said of a run beside its settings.
OF_RUN = ("out", "runs", "fresh", "workers", "stop")


class UnknownSetting(UserError):  # noqa: N818 - reads as what it says
    """A setting that the chosen method, dataset, model or engine does not have.

    Attributes:
        key: As it was given.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


class SettingAdvice(UserWarning):
    """A setting that works, and has a better place."""


def with_extended_method(
    settings: Mapping[str, Any], names: dict[str, str]
) -> tuple[Mapping[str, Any], dict[str, str]]:
    """Settings that a method has left to its extended one, as older files and commands give them.

    Those at their defaults are left out; any other one makes it the extended method.
    """
    method = names["method"]
    cls = discovery.find("methods", method)
    extended = vars(cls).get("extended_by")
    if extended is None:
        return settings, names
    mine, more = fields_of(cls), fields_of(discovery.find("methods", extended))
    beyond = {
        key: typed(key, more[name].type, value)
        for key, value in settings.items()
        if key != (name := key.removeprefix("method.")) and name in more and not _takes(mine, name, value)
    }
    changed = [key for key, value in beyond.items() if value != more[key.removeprefix("method.")].default]
    if not changed:
        return {key: value for key, value in settings.items() if key not in beyond}, names
    warnings.warn(
        f"{', '.join(changed)} is a setting of {extended}, so that {method} is read as {extended}; write --method "
        f"{extended}",
        SettingAdvice,
        stacklevel=1,  # one place, so that each is shown once
    )
    return {**settings, "method": extended}, {**names, "method": extended}


def _takes(fields: Mapping[str, Field], name: str, value: Any) -> bool:
    """Whether a setting is among these, with this value."""
    if name not in fields:
        return False
    try:
        typed(name, fields[name].type, value)
    except UserError:
        return False
    return True


def unknown_setting(given: str, known: Collection[str], names: Mapping[str, str]) -> UnknownSetting:
    """The error for a setting that does not exist, with the one that was probably meant.

    Args:
        given: The key.
        known: All keys there are with these parts.
        names: Of the parts: method, data, model, engine.
    """
    if given.partition(".")[0] in OF_RUN:
        return UnknownSetting(
            given,
            f"unknown setting {given!r}: it is said beside the settings, as an argument of run in Python and as "
            f"--{given} where a command takes it; it changes no number, so a configuration does not hold it",
        )
    if given == "seeds":
        several = "fl-lightning compare takes --seeds 3, and a study seeds: 3"
        return UnknownSetting(given, f"unknown setting 'seeds': a run has one, --seed 3; for several, {several}")
    meant = usual(given, known)
    # A usual name of a setting that is there comes before the same letter elsewhere: FOLA's gamma is its damping.
    for key in [] if meant in known else [meant or given, *(f"{part}.{given}" for part in names)]:
        if key not in known and (others := owners(key)):
            part = key.partition(".")[0]
            alias = f" ({key} here)" if key != given else ""
            does = "does" if len(others) == 1 else "do"
            lacking = f"unknown setting {given!r}{alias}: the {part} {names[part]} does not have it"
            return UnknownSetting(given, f"{lacking}, {', '.join(others)} {does}")
    meant = meant if meant in known else None
    section = [other for other in known if other.startswith(given.partition(".")[0] + ".")]
    error = unknown("setting", given, section if section and meant is None else known, meant, "--help lists them all")
    return UnknownSetting(given, str(error))


def usual(given: str, known: Collection[str]) -> str | None:
    """The key of a setting that papers or other programs call otherwise.

    >>> usual("training.learning_rate", ["training.lr"]), usual("lr", ["training.lr"]), usual("E", ["training.lr"])
    ('training.lr', 'training.lr', 'training.epochs')
    """
    last = given.rpartition(".")[2].replace("-", "_")
    same = [key for key in known if key.rpartition(".")[2] == last.lower()]
    found = USUAL.get(last) or USUAL.get(last.lower()) or (same[0] if same else None)
    return found if found != given else None
