"""python -m fl_lightning.testing: the contract tests of methods, models and datasets by name."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

from fl_lightning import discovery
from fl_lightning.cli.flags import CommandParser
from fl_lightning.errors import PluginError, UserError, require
from fl_lightning.system.plugins import plugin_errors
from fl_lightning.testing.checks import Check, outcome_of
from fl_lightning.testing.methods import method_checks
from fl_lightning.testing.models import model_checks
from fl_lightning.testing.sources import source_checks

# A flag, where its names are found, and the checks of what is found.
KINDS: dict[str, tuple[str, Callable[[type[Any]], list[Check]]]] = {
    "method": ("methods", lambda cls: method_checks(cls())),
    "model": ("models", model_checks),
    "data": ("data", lambda cls: source_checks(cls())),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Check what is named; the exit code is 0 if every promise is kept, 1 if one is broken, 2 for bad input."""
    try:
        with plugin_errors():
            return _main(sys.argv[1:] if arguments is None else arguments)
    except PluginError as error:
        print(f"fl_lightning.testing: {error}", file=sys.stderr)
        return 1
    except UserError as error:
        print(f"fl_lightning.testing: {error}", file=sys.stderr)
        return 2


def _main(arguments: Sequence[str]) -> int:
    parser = CommandParser(prog="python -m fl_lightning.testing", description=__doc__)
    for flag, (kind, _) in KINDS.items():
        parser.add_argument(f"--{flag}", action="append", default=[], help=f"a name of fl-lightning list {kind}")
    options = parser.parse_args(list(arguments))
    named = [(flag, name) for flag in KINDS for name in getattr(options, flag)]
    require(bool(named), "say what to check: --method NAME, --model NAME or --data NAME; several may follow each other")
    classes = [(flag, name, discovery.find(KINDS[flag][0], name)) for flag, name in named]
    return max(_report(f"{flag} {name}", KINDS[flag][1](cls)) for flag, name, cls in classes)


def _report(title: str, checks: Sequence[Check]) -> int:
    """Print one line per check; 1 if a promise is broken."""
    print(title)
    outcomes = [outcome_of(check) for check in checks]
    seen: dict[str, str] = {}
    for name, status, message in outcomes:
        first = seen.setdefault(message, name)
        said = message if first == name else f"as {first}"  # a hook that fails breaks many promises
        print(f"  {status:<8} {name}" + (f": {said}" if message else ""))
    counts = {kind: sum(o.status == kind for o in outcomes) for kind in ("kept", "refused", "broken")}
    print(f"  {', '.join(f'{number} {kind}' for kind, number in counts.items())}")
    return int(counts["broken"] > 0)


if __name__ == "__main__":
    sys.exit(main())
