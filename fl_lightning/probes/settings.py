"""What a run measures beside its usual numbers."""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.errors import require


@dataclass(frozen=True)
class Probe:
    """Further measurements.

    Attributes:
        reference: Folder of a saved run whose final model and curvature stand for the global posterior; AE and LF are
            then logged in every round. Null measures neither.
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
