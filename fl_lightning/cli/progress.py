"""One progress bar with round, GA, LA and the time that is left."""

import sys
import time
from typing import Any

from tqdm import tqdm

from fl_lightning.record import Measurement
from fl_lightning.system import activity, interrupts


class Progress:
    """A bar on the error stream; silent if asked to be.

    It appears with the first round, so that its rate is that of rounds and not of loading; or earlier, if something
    that takes long has to be told.
    """

    def __init__(self, rounds: int, label: str, quiet: bool = False, verbose: bool = False) -> None:
        self._rounds, self._label = rounds, label
        self._quiet, self._verbose = quiet, verbose
        self._bar: tqdm[Any] | None = None
        self._warned = False
        self._told = time.monotonic()
        self._numbers = ""

    def show(self, round: int, measurement: Measurement) -> None:
        """Advance to this round."""
        interrupts.check()
        if self._quiet:
            return
        if self._bar is None:
            self._bar = self._start(round)
        metrics = measurement.metrics
        self._numbers = f"GA {metrics['GA']:.1%}, LA {metrics['LA']:.1%}"
        self._bar.set_postfix_str(self._numbers, refresh=False)
        self._bar.update(round - self._bar.n)
        if self._verbose:
            numbers = ", ".join(f"{name} {value:.6g}" for name, value in metrics.items())
            self._bar.write(f"round {round}: {numbers}", file=sys.stderr)
        stability = metrics.get("prior_stability", 0.0)
        if stability > 1 and not self._warned:
            self._warned = True
            self._bar.write(
                f"warning: prior_stability, the learning rate times the penalty's largest curvature, is "
                f"{stability:.2g} after round {round}; above 1 its step overshoots, above 2 it diverges: lower "
                "training.lr or method.strength",
                file=sys.stderr,
            )

    def tell(self, doing: str) -> None:
        """Show what is being computed, at most once a second on a terminal, else every ten."""
        interrupts.check()
        if self._quiet or time.monotonic() - self._told < (1 if sys.stderr.isatty() else 10):
            return
        self._told = time.monotonic()
        if self._bar is None:
            self._bar = self._start(0)
        self._bar.set_postfix_str(", ".join(filter(None, [self._numbers, doing])))

    def _start(self, round: int) -> "tqdm[Any]":
        # A terminal sees the bar move; a log file gets a line every ten seconds.
        interval = 0.1 if sys.stderr.isatty() else 10
        return tqdm(
            total=self._rounds,
            desc=self._label,
            initial=round,
            mininterval=interval,
            unit="round",
            dynamic_ncols=True,
        )

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()

    def __enter__(self) -> "Progress":
        self._listening = activity.heard_by(self.tell)
        self._listening.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._listening.__exit__(None, None, None)
        self.close()
