"""What happened in a round: the loop yields one record for each."""

from typing import Any, NamedTuple

from fl_lightning.client_state import Snapshot
from fl_lightning.method import Cohort, Local
from fl_lightning.models.task import Score

# Raised when the numbers of the loop or of what is measured change, or a default of training, federation, compute or
# probe does: part of every run's identity.
VERSION = 1


class ClientResult(NamedTuple):
    """A client of a round, as the consumer sees it.

    Attributes:
        local: The finished client; its model is `local.params`.
        train_loss: Mean task loss along its training.
        prior_loss: Value of the method's penalty at its final model, 0 without one.
        score: Its model on the test set, if a worker has measured it already.
        distance: Of its model from a reference posterior, likewise.
        own: Its model on its own test set, likewise.
    """

    local: Local
    train_loss: float
    prior_loss: float
    score: Score | None = None
    distance: float | None = None
    own: Score | None = None


class RoundRecord(NamedTuple):
    """What happened in a round.

    Attributes:
        round: r = 1, 2, ...
        cohort: The clients that took part.
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
