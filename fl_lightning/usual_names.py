"""What settings are called elsewhere, in papers and other programs, and the error for one that does not exist here."""

from collections.abc import Callable, Collection, Mapping, Sequence

from fl_lightning.errors import UserError, unknown

# Names that are the last part of a key here (lr, alpha, clients, rounds, epochs, ...) need no entry.
USUAL = {
    "learning_rate": "training.lr",
    "eta": "training.lr",
    "E": "training.epochs",
    "local_epochs": "training.epochs",
    "num_epochs": "training.epochs",
    "B": "training.batch_size",
    "batch": "training.batch_size",
    "batchsize": "training.batch_size",
    "bs": "training.batch_size",
    "optimizer": "training.optimiser",
    "opt": "training.optimiser",
    "lr_schedule": "training.schedule",
    "lr_scheduler": "training.schedule",
    "N": "data.clients",
    "K": "data.clients",
    "num_clients": "data.clients",
    "n_clients": "data.clients",
    "dirichlet_alpha": "data.alpha",
    "α": "data.alpha",
    "dataset": "data",
    "R": "federation.rounds",
    "T": "federation.rounds",
    "num_rounds": "federation.rounds",
    "comm_rounds": "federation.rounds",
    "C": "federation.fraction",
    "participation": "federation.fraction",
    "frac": "federation.fraction",
    "lambda": "method.strength",
    "λ": "method.strength",
    "gamma": "method.damping",
    "γ": "method.damping",
    "algorithm": "method",
    "strategy": "method",
    "network": "model",
    "arch": "model",
    "gpu": "compute.device",
    "random_seed": "seed",
}

# What is said of a run beside its settings.
OF_RUN = ("out", "fresh", "workers", "stop")


class UnknownSetting(UserError):  # noqa: N818 - reads as what it says
    """A setting that the chosen method, dataset, model or engine does not have.

    Attributes:
        key: As it was given.
    """

    def __init__(self, key: str, message: str) -> None:
        super().__init__(message)
        self.key = key


def unknown_setting(
    given: str, known: Collection[str], names: Mapping[str, str], owners: Callable[[str], Sequence[str]]
) -> UnknownSetting:
    """The error for a setting that does not exist, with the one that was probably meant.

    Args:
        given: The key.
        known: All keys there are with these parts.
        names: Of the parts: method, data, model, engine.
        owners: Says which methods (datasets, models, engines) have a setting of that key.
    """
    if given.partition(".")[0] in OF_RUN:
        return UnknownSetting(
            given,
            f"unknown setting {given!r}: it is said beside the settings, as an argument of run in Python and as "
            f"--{given} where a command takes it; it changes no number, so it is no part of a configuration",
        )
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
    """The key that somebody means who comes from a paper or another program.

    >>> usual("training.learning_rate", ["training.lr"]), usual("lr", ["training.lr"]), usual("E", ["training.lr"])
    ('training.lr', 'training.lr', 'training.epochs')
    """
    last = given.rpartition(".")[2].replace("-", "_")
    same = [key for key in known if key.rpartition(".")[2] == last.lower()]
    found = USUAL.get(last) or USUAL.get(last.lower()) or (same[0] if same else None)
    return found if found != given else None
