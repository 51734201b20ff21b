"""The forms of curvature by name."""

from typing import Literal

from fl_lightning.curvature.dense import EigenvaluesAsDiagonal, FullMatrix
from fl_lightning.curvature.diagonal import DiagonalFisher
from fl_lightning.curvature.form import Form
from fl_lightning.curvature.layered import OfInputs, OfInputsAndSlopes, OfLastLayer

FormName = Literal["diagonal", "inputs", "kron", "last_layer", "full", "e_full"]

FORMS: dict[FormName, type[Form]] = {
    "diagonal": DiagonalFisher,
    "inputs": OfInputs,
    "kron": OfInputsAndSlopes,
    "last_layer": OfLastLayer,
    "full": FullMatrix,
    "e_full": EigenvaluesAsDiagonal,
}
