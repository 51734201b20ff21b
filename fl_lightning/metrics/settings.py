"""What a run measures, and when."""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.errors import require


@dataclass(frozen=True)
class Probe:
    """Further measurements.

    Attributes:
        reference: Folder of a saved run whose final model and curvature stand for the global posterior; AE and LF are
            then logged in every round. null measures neither.
        reference_precision: Precision of the reference: the curvature of all clients' training data at its final model,
            or the precision that the run itself has kept (FOLA).
        ridge_rounds: Rounds after which the accuracy along the ridge between two clients is measured and stored with a
            picture of the precision.
    """

    reference: str | None = None
    reference_precision: Literal["pooled_hessian", "run"] = "pooled_hessian"
    ridge_rounds: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        require(
            all(number >= 1 for number in self.ridge_rounds),
            f"probe.ridge_rounds must hold rounds of at least 1, got {list(self.ridge_rounds)}",
        )
        require(
            self.reference is not None or self.reference_precision == "pooled_hessian",
            f"probe.reference_precision {self.reference_precision} needs a reference; give probe.reference a folder",
        )


@dataclass(frozen=True)
class Evaluation:
    """In which rounds models are measured, and on how many samples.

    Attributes:
        every: Rounds from one measurement to the next (k); the last round is always measured. Between them only what
            costs nothing is logged: training loss, traffic, time, the method's own diagnostics.
        local: Whether the clients' models are measured on the test set (LA); that takes a pass over it for each client.
        local_share: Share of the test set on which the clients' models are measured: stratified, the same for every
            client, round and seed. GA is of the whole test set.
    """

    every: int = 1
    local: bool = True
    local_share: float = 1.0

    def __post_init__(self) -> None:
        require(self.every >= 1, f"evaluation.every must be at least 1, got {self.every}; 1 measures every round")
        require(
            0 < self.local_share <= 1,
            f"evaluation.local_share must be > 0 and <= 1, got {self.local_share:g}; for none use --evaluation.local "
            "false",
        )
        require(
            self.local or self.local_share == 1,
            f"evaluation.local_share {self.local_share:g} is of the clients' models, which evaluation.local false does "
            "not measure; leave one of them out",
        )

    def is_due(self, round: int, rounds: int) -> bool:
        """Whether a round of so many is measured.

        >>> [r for r in range(1, 8) if Evaluation(every=3).is_due(r, 7)]
        [3, 6, 7]
        """
        return round % self.every == 0 or round == rounds
