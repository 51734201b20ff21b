"""When a run need not go on: one rule for single runs, studies and reports.

A rule decides how many rounds there are, and no number of any round. So it is not part of what a run is known by: a run
that was stopped goes on without the rule where it was, and what was computed beyond a rule does not count for it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fl_lightning.errors import require, unknown
from fl_lightning.metrics.metric import GA, sign

# Measured whenever anything is: a round without it was not due.
ALWAYS = GA


@dataclass(frozen=True)
class Stop:
    """When a run need not go on.

    Attributes:
        metric: What is watched.
        at_least: Stop when it has reached this; a metric that is good if small (NLL, RMSE), when it has fallen to it.
        patience: Stop when it has not improved for this many rounds.
    """

    metric: str = GA
    at_least: float = math.inf
    patience: float = math.inf

    def __post_init__(self) -> None:
        require(isinstance(self.metric, str), f"stop.metric must be the name of a metric, got {self.metric!r}")
        require(
            isinstance(self.at_least, int | float) and not math.isnan(self.at_least),
            f"stop.at_least must be a number, got {self.at_least!r}",
        )
        whole = isinstance(self.patience, int) and not isinstance(self.patience, bool) and self.patience >= 1
        require(
            whole or self.patience == math.inf,
            f"stop.patience must be a number of rounds >= 1, got {self.patience!r}",
        )

    def values(self, rounds: Sequence[Mapping[str, float]]) -> list[float]:
        """The metric of every round, NaN where it was not measured.

        Args:
            rounds: The metrics of every round.

        Raises:
            UserError: If others are measured, but not this one.
        """
        for metrics in rounds:
            if self.metric not in metrics and ALWAYS in metrics:
                raise unknown("metric", self.metric, metrics)
        return [metrics.get(self.metric, math.nan) for metrics in rounds]

    def reached(self, values: Sequence[float]) -> bool:
        """Whether the values of the rounds so far are enough; one that was not measured is NaN and decides nothing.

        >>> Stop(patience=2).reached([0.1, 0.3, 0.2]), Stop(patience=2).reached([0.1, 0.3, 0.2, 0.3])
        (False, True)
        """
        if not values or math.isnan(values[-1]):
            return False
        return self._there(values) or len(values) - self._best(values) >= self.patience

    def enough(self, values: Sequence[float]) -> int | None:
        """After how many rounds a run could have stopped; None if not yet.

        >>> Stop(at_least=0.5).enough([0.1, 0.6, 0.7]), Stop(at_least=0.5).enough([0.1])
        (2, None)
        """
        return next((number for number in range(1, len(values) + 1) if self.reached(values[:number])), None)

    def reason(self, values: Sequence[float]) -> str:
        """Why the values are enough, in words.

        >>> Stop(patience=2).reason([0.1, 0.3, 0.2, 0.3])
        'after round 4, because GA has not improved since round 2 (stop.patience 2)'
        """
        start = f"after round {len(values)}, because {self.metric}"
        if self._there(values):
            return f"{start} has reached {values[-1]:.4g} (stop.at_least {self.at_least:g})"
        return f"{start} has not improved since round {self._best(values)} (stop.patience {self.patience:g})"

    def _there(self, values: Sequence[float]) -> bool:
        way = sign(self.metric)
        return math.isfinite(self.at_least) and way * values[-1] >= way * self.at_least

    def _best(self, values: Sequence[float]) -> int:
        """The first round with the best value.

        >>> Stop("NLL", patience=2).enough([0.9, 0.7, 0.8, 0.8]), Stop("NLL", at_least=0.7).enough([1, 0.6])
        (4, 2)
        """
        known, way = [i for i, value in enumerate(values) if not math.isnan(value)], sign(self.metric)
        return 1 + max(known, key=lambda i: (way * values[i], -i))


def stop_of(given: Mapping[str, Any]) -> Stop | None:
    """The rule that settings describe; None if they leave it open.

    >>> stop_of({"patience": None}), stop_of({"patience": 3})
    (None, Stop(metric='GA', at_least=inf, patience=3))
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    if not chosen:
        return None
    require(
        bool(chosen.keys() & {"at_least", "patience"}),
        f"stop.metric {chosen.get('metric')} alone stops nothing; add --stop.patience ROUNDS or --stop.at_least VALUE",
    )
    return Stop(**chosen)
