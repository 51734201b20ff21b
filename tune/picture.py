"""A study without runs: a picture that is computed. `analysis.drawing` draws it.

about: Two Gaussian posteriors in the plane.
draw: {means: [[-1, 0], [1, 2]], covariances: [[[1, 0], [0, 1]], [[1, 0], [0, 1]]], weight: 0.5}
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tune.identity import short_hash


@dataclass(frozen=True)
class Picture:
    """What is drawn.

    Attributes:
        name: Of the study.
        scale: Which of its scales this is.
        about: A sentence.
        draw: Two Gaussian posteriors in the plane: means, covariances, and the weight of the first.
    """

    name: str
    scale: str
    about: str = ""
    draw: Mapping[str, Any] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """A short hash of everything it says."""
        return short_hash(self)

    @property
    def params(self) -> dict[str, Any]:
        """What MLflow shows of it."""
        return {"draw": sorted(self.draw)}
