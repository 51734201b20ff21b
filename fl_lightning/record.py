"""What happened in a round, and what was measured of it: what the loop gives to whoever consumes it."""

from collections.abc import KeysView
from typing import Any, NamedTuple

from fl_lightning.errors import UserError, unknown
from fl_lightning.method import Cohort, Local
from fl_lightning.params import Params
from fl_lightning.task import Score


class ClientResult(NamedTuple):
    """A client of a round, as the consumer sees it.

    Attributes:
        local: The finished client; its model is `local.params`.
        train_loss: Mean task loss along its training.
        prior_loss: Value of the method's penalty at its final model, 0 without one.
        score: Its model on the test set, if somebody has measured that already.
        distance: Of its model from a reference posterior, likewise.
        own: Its model on its own test set, likewise.
    """

    local: Local
    train_loss: float
    prior_loss: float
    score: Score | None = None
    distance: float | None = None
    own: Score | None = None


class Snapshot(NamedTuple):
    """The server after a round: all that is needed to go on."""

    round: int
    state: Any
    buffers: Params


class RoundRecord(NamedTuple):
    """What happened in a round.

    Attributes:
        round: r = 1, 2, ...
        cohort: Who took part.
        before: The server before the round.
        clients: The members of the cohort after training and before aggregation.
        reports: What they sent.
        after: The server after the round.
        bytes_down: Sent to all clients of the cohort, in float32.
        bytes_up: Sent by all of them.
        gradient_evaluations: Gradients of single samples that were computed.
        seconds_local: Time of the local training, and of what else was done where it took place.
        seconds_server: Time of broadcast and aggregation.
        workers_idle: Share of the workers' time in which they had nothing to do; None if there were none.
    """

    round: int
    cohort: Cohort
    before: Snapshot
    clients: list[ClientResult]
    reports: list[Any]
    after: Snapshot
    bytes_down: int
    bytes_up: int
    gradient_evaluations: int
    seconds_local: float
    seconds_server: float
    workers_idle: float | None = None


class Measurement(NamedTuple):
    """The numbers of one round.

    Attributes:
        metrics: One value each for the round, by name.
        clients: One value for each member of the cohort, by name; `client` holds the ids.
    """

    metrics: dict[str, float]
    clients: dict[str, list[Any]]

    def __getitem__(self, key: Any) -> Any:
        """A metric by its name, `measurement["GA"]`, or a field by its position, as tuples have it."""
        if not isinstance(key, str):
            return tuple.__getitem__(self, key)
        if key not in self.metrics:
            if key in ("GA", "LA"):
                raise UserError(
                    f"{key} was not measured in this round, which evaluation.every or evaluation.local leaves out; ask "
                    f'`"{key}" in measurement` first'
                )
            raise unknown("metric", key, self.metrics)
        return self.metrics[key]

    def __contains__(self, key: object) -> bool:
        """Whether the round has this metric."""
        return key in self.metrics

    def keys(self) -> KeysView[str]:
        """The names of the round's metrics."""
        return self.metrics.keys()
