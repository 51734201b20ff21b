"""The forms of curvature by name."""

from typing import Literal

from fl_lightning.curvature.dense import EigenvaluesAsDiagonal, FullMatrix
from fl_lightning.curvature.diagonal import DiagonalFisher
from fl_lightning.curvature.form import Form

FormName = Literal["diagonal", "full", "e_full"]

FORMS: dict[FormName, type[Form]] = {
    "diagonal": DiagonalFisher,
    "full": FullMatrix,
    "e_full": EigenvaluesAsDiagonal,
}
