"""The errors a user can cause or meet; the command line prints them as one line, without a traceback."""

from collections.abc import Iterable
from difflib import get_close_matches

# The modules of plug-ins are named as if they lay in a package of this name.
PLUGIN_PACKAGE = "fl_lightning_plugins"


class UserError(Exception):
    """A setting or a file that cannot work. The message says what was expected, what was given, and what to do."""


class PluginError(UserError):
    """A mistake in the code of a method, model or dataset. The message says where it is.

    Where it was raised is in its notes, which also travel from other processes.
    """


class DiskFull(UserError):  # noqa: N818 - as the system calls it
    """There is no room for what is to be saved: all that comes after it would fail, too."""


class Diverged(Exception):  # noqa: N818 - an outcome, not a mistake
    """Local training or aggregation left the finite numbers."""

    def __init__(self, round: int, client: int | None) -> None:
        where = "the server's aggregate" if client is None else f"the model of client {client}"
        super().__init__(
            f"{where} is not finite in round {round}: training diverged; lower training.lr "
            "or the method's strength, or set training.clip_norm"
        )
        self.round = round
        self.client = client

    def __reduce__(self) -> tuple[type["Diverged"], tuple[int, int | None]]:
        """By its arguments, not by its message: it may come from another process."""
        return Diverged, (self.round, self.client)


def unknown(kind: str, given: str, known: Iterable[str], meant: str | None = None, elsewhere: str = "") -> UserError:
    """The error for a name that does not exist, with the nearest one that does.

    Args:
        kind: What it names.
        given: The name.
        known: All names.
        meant: The one that was probably meant, if that is known better than by its letters.
        elsewhere: Where the names are listed if they are many.

    >>> print(unknown("case", "Fola", ["FOLA", "FedAvg"]))
    unknown case 'Fola': did you mean 'FOLA'? expected one of FOLA, FedAvg
    """
    names = sorted(known)
    by_letters = {name.lower(): name for name in names}
    close = get_close_matches(given.lower(), by_letters, n=1, cutoff=0.6)
    near = [meant] if meant else [by_letters[name] for name in close]
    hint = f"did you mean {near[0]!r}? " if near else ""
    shown = elsewhere if elsewhere and len(names) > 15 else f"expected one of {', '.join(names)}"
    return UserError(f"unknown {kind} {given!r}: {hint}{shown}")


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless the condition holds."""
    if not condition:
        raise UserError(message)
