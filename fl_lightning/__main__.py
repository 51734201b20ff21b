"""The command line: fl-lightning run | compare | partition | sweep | uncertainty | report | table | runs | ..."""

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any

from fl_lightning.errors import UserError, unknown
from fl_lightning.system import interrupts, program

COMMANDS = {
    "run": "Run one experiment, or resume it.",
    "compare": "Run several methods on the same problem, side by side.",
    "partition": "Show who would hold which samples, before training.",
    "sweep": "Run a whole study on Ray Tune: a grid or a search, with seeds.",
    "uncertainty": "The posterior of a finished run: calibration, and what it does not know.",
    "report": "Write a page with the findings, figures and tables of all runs.",
    "table": "Print one table of the runs, also as LaTeX or CSV.",
    "runs": "List the runs there are, show one, delete some.",
    "list": "Show the methods, models, datasets, engines or studies there are.",
    "ui": "Open the MLflow UI on the runs.",
    "demo": "FOLA against FedAvg on embedded data.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 2 for bad input, 3 for divergence, 130 for Ctrl-C, 143 for SIGTERM."""
    if arguments is not None:
        return _carry_out(list(arguments))
    interrupts.install()
    program.mend_streams()
    warnings.formatwarning = _in_one_line
    code = _carry_out(sys.argv[1:], load=interrupts.ending_at_once)
    if code > 128:
        interrupts.leave(code)
    try:
        sys.stdout.flush()
    except OSError as error:  # a full disk, or nobody reads
        if not isinstance(error, BrokenPipeError):
            print(f"fl-lightning: {program.in_words(error) or error}", file=sys.stderr)
        interrupts.leave(code or 2)
    return code


def _carry_out(given: list[str], load: Callable[[], AbstractContextManager[None]] = nullcontext) -> int:
    if given == ["--version"]:
        print(f"fl_lightning {version('fl_lightning')}")
        return 0
    if not given or given[0] in ("-h", "--help"):
        print(usage())
        return 0 if given else 2
    try:
        if given[0] not in COMMANDS:
            raise unknown("command", given[0], COMMANDS)
        with load():
            command = importlib.import_module(f"fl_lightning.cli.{given[0]}")
        code: int = command.main(given[1:])
        return code
    except KeyboardInterrupt:
        return _stopped()
    except UserError as error:
        if interrupts.requested():
            return _stopped()
        print(f"fl-lightning: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of our output has gone, as with `| head`
        sys.stderr.close()
        return 0
    except Exception as error:
        if interrupts.requested():
            return _stopped()
        if (words := program.in_words(error)) is None:
            raise
        print(f"fl-lightning: {words}", file=sys.stderr)
        return 2


def _stopped() -> int:
    print("\nfl-lightning: stopped; finished rounds are saved, the same command goes on", file=sys.stderr)
    return interrupts.exit_code()


def _in_one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning as all of the program speaks: without the place in the source."""
    return f"fl-lightning: warning: {message}\n"


def usage() -> str:
    """The help of the program itself."""
    lines = [f"  {name:<11} {text}" for name, text in COMMANDS.items()]
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
