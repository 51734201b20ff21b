"""Progress bars of a run and of many runs: round, GA and LA, what is being computed, and the time that is left."""

import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from fl_lightning.metrics.metric import GA, LA, Measurement, sign
from fl_lightning.system import activity, interrupts

if TYPE_CHECKING:
    from tune.work import Status


def interval() -> float:
    """Seconds between two states of a bar: a terminal sees it move, a log file gets a line every ten seconds."""
    return 0.1 if sys.stderr.isatty() else 10


def note_line(text: str) -> "tqdm[Any]":
    """A line that shows what is being done before there is anything to count; closing it removes it."""
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
        advice: A sentence of the method about the numbers of a round; printed once.
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
        self._shown_at = time.monotonic()
        self._numbers = ""

    def show(self, round: int, measurement: Measurement) -> None:
        """Advance to this round."""
        interrupts.check()
        self._round = round
        if self._quiet:
            return
        metrics = measurement.metrics
        known = [f"{name} {metrics[name]:.1%}" for name in (GA, LA) if name in metrics]
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
            self.show_work(doing)

    def show_work(self, doing: str) -> None:
        """Show what is being computed, at a readable rate."""
        interrupts.check()
        if self._quiet:
            return
        if self._bar is None:
            self._close_note()
            self._bar = self._start()
        if time.monotonic() - self._shown_at > max(interval(), 0.2):
            self._shown_at = time.monotonic()
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
        self._listening = activity.heard_by(self.show_work, notes=not self._quiet, waiting=self.wait)
        self._listening.__enter__()
        if not self._quiet:
            self._note = note_line(f"{self._label}: loading")
        return self

    def __exit__(self, *exception: object) -> None:
        self._listening.__exit__(None, None, None)
        self.close()


class ProgressLine:
    """One line: runs finished and in all, the best so far, the time that is left."""

    def __init__(self, metric: str, quiet: bool) -> None:
        self._metric, self._quiet = metric, quiet
        self._note: tqdm[Any] | None = None
        self._bar: tqdm[Any] | None = None
        self._shown = ""

    def show(self, status: "Status") -> None:
        """Advance to this state; the same one again only moves the clock."""
        interrupts.check()
        if self._quiet:
            return
        self._close_note()
        if self._bar is None or self._bar.total != status.total:
            self.close()
            self._bar = tqdm(
                total=status.total,
                initial=status.finished,
                desc="runs",
                unit="run",
                mininterval=interval(),
                miniters=0,  # rounds are news, too
                smoothing=0,  # trials end in bursts; only their mean predicts how long the rest takes
                dynamic_ncols=True,
            )
        way = sign(self._metric)
        value = f"{status.best:.1%}" if way > 0 else f"{way * status.best:.4g}"
        best = f"best {self._metric} {value}" if status.best > float("-inf") else ""
        rounds = f"{status.rounds} rounds" if status.rounds else ""
        self._shown = ", ".join(filter(None, [best, rounds]))
        self._bar.set_postfix_str(self._shown, refresh=False)
        self._bar.update(status.finished - self._bar.n)

    def show_work(self, doing: str) -> None:
        """Show what is being done: Ray takes half a minute to start on a busy machine."""
        interrupts.check()
        if self._quiet:
            return
        if self._bar is None:
            self._close_note()
            self._note = note_line(doing)
        elif time.monotonic() - self._bar.last_print_t > max(interval(), 0.2):
            self._bar.set_postfix_str(", ".join(filter(None, [self._shown, doing])))

    def close(self) -> None:
        self._close_note()
        if self._bar is not None:
            self._bar.set_postfix_str(self._shown)
            self._bar.close()
            self._bar = None

    def _close_note(self) -> None:
        if self._note is not None:
            self._note.close()
            self._note = None

    def __enter__(self) -> "ProgressLine":
        self._listening = activity.heard_by(self.show_work, notes=not self._quiet)
        self._listening.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listening.__exit__(None, None, None)
        self.close()
