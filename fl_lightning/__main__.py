"""The command line: fl-lightning run | compare | partition | sweep | report | table | list | ui | demo."""

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from fl_lightning.errors import UserError, unknown
from fl_lightning.system import interrupts

COMMANDS = {
    "run": "Run one experiment, or resume it.",
    "compare": "Run several methods on the same problem, side by side.",
    "partition": "Show who would hold which samples, before training.",
    "sweep": "Run a whole study on Ray Tune: a grid or a search, with seeds.",
    "report": "Write a page with the findings, figures and tables of all runs.",
    "table": "Print one table of the runs, also as LaTeX or CSV.",
    "list": "Show the methods, models, datasets, engines or studies there are.",
    "ui": "Open the MLflow UI on the runs.",
    "demo": "FOLA against FedAvg on embedded data.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 2 for bad input, 3 for divergence, 130 for Ctrl-C, 143 for SIGTERM."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"fl_lightning {version('fl_lightning')}")
        return 0
    if arguments is None:
        interrupts.install()
        warnings.formatwarning = _in_one_line
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0 if given else 2
    try:
        if given[0] not in COMMANDS:
            raise unknown("command", given[0], COMMANDS)
        command = importlib.import_module(f"fl_lightning.cli.{given[0]}")
        code: int = command.main(given[1:])
        return code
    except UserError as error:
        print(f"fl-lightning: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nfl-lightning: stopped; finished rounds are saved, the same command goes on", file=sys.stderr)
        return interrupts.exit_code()
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        sys.stderr.close()
        return 0


def _in_one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning as all of the program speaks: without the place in the source."""
    return f"fl-lightning: warning: {message}\n"


def usage() -> str:
    """The help of the program itself."""
    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "Federated learning on heterogeneous data: FOLA and its rivals.",
            "",
            "usage: fl-lightning COMMAND ...",
            "",
            *lines,
            "",
            "fl-lightning COMMAND --help explains a command and all its settings.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
