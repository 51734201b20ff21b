"""The command line: fl-lightning run | compare | partition | sweep | uncertainty | report | table | runs | ..."""

import atexit
import importlib
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.metadata import version
from typing import Any

from fl_lightning.errors import PLUGIN_PACKAGE, PluginError, UserError, unknown
from fl_lightning.system import interrupts, program
from fl_lightning.system.plugins import plugin_errors

COMMANDS = {
    "run": "Run one experiment, or resume it.",
    "compare": "Run several methods on the same problem, side by side.",
    "partition": "Preview a partition before training.",
    "sweep": "Run a whole study on Ray Tune: a grid or a search, with seeds.",
    "uncertainty": "Measure the posterior of a finished run: calibration, out-of-distribution inputs.",
    "report": "Write a page with the findings, figures and tables of all runs.",
    "table": "Print one table of the runs, also as LaTeX or CSV.",
    "runs": "List, show, delete, export or import runs.",
    "list": "List the methods, models, datasets, engines or studies.",
    "ui": "Open the MLflow UI on the runs.",
    "doctor": "Check this machine: its devices against the CPU, Ray, MLflow, data, disk.",
    "demo": "Run FOLA against FedAvg on embedded data, in a minute or two.",
}
# Commands that write files of their own, to --out.
WRITE_OUT = ("report", "table")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        0, 1 for a bug of a plug-in, 2 for bad input, 3 for divergence, 130 for Ctrl-C, 143 for SIGTERM.
    """
    if arguments is not None:
        return _carry_out(list(arguments))
    atexit.register(interrupts.ignore)  # the first to be registered is the last to be called
    interrupts.install()
    program.repair_streams()
    program.repair_home()
    warnings.formatwarning = _in_one_line
    code = _carry_out(sys.argv[1:], load=interrupts.ending_at_once)
    if code > 128:
        interrupts.leave(code)
    interrupts.end_at_once()
    try:
        sys.stdout.flush()
    except OSError as error:  # a full disk, or a closed pipe
        if not isinstance(error, BrokenPipeError):
            print(f"fl-lightning: {program.in_words(error) or error}", file=sys.stderr)
        interrupts.leave(code or 2)
    if PLUGIN_PACKAGE in sys.modules and _threads_are_left():
        atexit._run_exitfuncs()
        interrupts.leave(code)  # Python would wait for a thread that a plug-in has left
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
        with plugin_errors():
            code: int = command.main(_as_now(*given))
        return code
    except KeyboardInterrupt:
        return _stopped()
    except UserError as error:
        if interrupts.requested():
            return _stopped()
        return _refused(error, given)
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


def _as_now(command: str, *arguments: str) -> list[str]:
    """The arguments, with `--out` as `--runs` where it was the folder of the runs."""
    if command in WRITE_OUT or not any(word.partition("=")[0] == "--out" for word in arguments):
        return list(arguments)
    print(f"fl-lightning: the folder of the runs is --runs now; {command} takes --out as that, too", file=sys.stderr)
    return [f"--runs{word.removeprefix('--out')}" if word.partition("=")[0] == "--out" else word for word in arguments]


def _threads_are_left() -> bool:
    return any(not one.daemon and one is not threading.main_thread() for one in threading.enumerate())


def _refused(error: UserError, given: Sequence[str]) -> int:
    """Print what is wrong; 1 for a mistake in the code of a plug-in, 2 for a mistake in the input."""
    if not isinstance(error, PluginError):
        print(f"fl-lightning: {error}", file=sys.stderr)
        return 2
    hint = "; --verbose shows the traceback" if given[0] == "run" else ""
    if "--verbose" in given:
        hint = ""
        traceback.print_exception(error, chain=False)  # its notes have the rest
    print(f"fl-lightning: {error}{hint}", file=sys.stderr)
    return 1


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
