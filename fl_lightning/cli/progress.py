"""One progress bar with round, GA, LA, what is being computed and the time that is left."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from tqdm import tqdm

from fl_lightning.record import Measurement
from fl_lightning.system import activity, interrupts


def interval() -> float:
    """Seconds between two states of a bar: a terminal sees it move, a log file gets a line every ten seconds."""
    return 0.1 if sys.stderr.isatty() else 10


def note_line(text: str) -> "tqdm[Any]":
    """A line that says what is being done before there is anything to count; closing it removes it."""
    line = tqdm(bar_format="{desc}", leave=False, file=sys.stderr, disable=not sys.stderr.isatty(), dynamic_ncols=True)
    line.set_description_str(f"{text} ...")
    return line


class Progress:
    """A bar on the error stream; silent if asked to be.

    It appears when something is computed, so that its rate is that of rounds and not of loading. Rounds that are known
    before that are those of an earlier process.

    Args:
        rounds: Of the run.
        label: Of the bar.
        quiet: Whether to show nothing.
        verbose: Whether to show all metrics of every round.
        advice: What the method says about the numbers of a round; the user hears it once.
    """

    def __init__(
        self,
        rounds: int,
        label: str,
        quiet: bool = False,
        verbose: bool = False,
        advice: Callable[[Mapping[str, float]], str] = lambda metrics: "",
    ) -> None:
        self._rounds, self._label = rounds, label
        self._quiet, self._verbose = quiet, verbose
        self._advice, self._advised = advice, False
        self._note: tqdm[Any] | None = None
        self._bar: tqdm[Any] | None = None
        self._round = 0
        self._told = time.monotonic()
        self._numbers = ""

    def show(self, round: int, measurement: Measurement) -> None:
        """Advance to this round."""
        interrupts.check()
        self._round = round
        if self._quiet:
            return
        metrics = measurement.metrics
        known = [f"{name} {metrics[name]:.1%}" for name in ("GA", "LA") if name in metrics]
        self._numbers = ", ".join(known) or self._numbers  # of the last round that was measured
        if self._verbose:
            self._write(f"round {round}: {', '.join(f'{name} {value:.6g}' for name, value in metrics.items())}")
        if self._bar is None:
            return
        self._bar.set_postfix_str(self._numbers, refresh=False)
        self._bar.update(round - self._bar.n)
        if not self._advised and (advice := self._advice(metrics)):
            self._advised = True
            self._write(f"warning: after round {round}: {advice}")

    def wait(self, doing: str) -> None:
        """Show what is waited for before anything is computed; no part of the rate."""
        if self._bar is None and self._note is not None:
            interrupts.check()
            self._note.set_description_str(f"{self._label}: {doing} ...")
        else:
            self.tell(doing)

    def tell(self, doing: str) -> None:
        """Show what is being computed, as often as one can read it."""
        interrupts.check()
        if self._quiet:
            return
        if self._bar is None:
            self._close_note()
            self._bar = self._start()
        if time.monotonic() - self._told > max(interval(), 0.2):
            self._told = time.monotonic()
            self._bar.set_postfix_str(", ".join(filter(None, [self._numbers, doing])))

    def _start(self) -> "tqdm[Any]":
        if self._round:
            self._write(f"{self._label}: going on after round {self._round}")
        return tqdm(
            total=self._rounds,
            desc=self._label,
            initial=self._round,
            mininterval=interval(),
            unit="round",
            dynamic_ncols=True,
        )

    def _close_note(self) -> None:
        if self._note is not None:
            self._note.close()
            self._note = None

    def _write(self, line: str) -> None:
        tqdm.write(line, file=sys.stderr)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._close_note()
        if self._bar is not None:
            self._bar.set_postfix_str(self._numbers)
            self._bar.close()

    def __enter__(self) -> "Progress":
        self._listening = activity.heard_by(self.tell, notes=not self._quiet, waiting=self.wait)
        self._listening.__enter__()
        if not self._quiet:
            self._note = note_line(f"{self._label}: loading")
        return self

    def __exit__(self, *exception: object) -> None:
        self._listening.__exit__(None, None, None)
        self.close()
