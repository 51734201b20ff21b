"""The paper's e-full approximation: the eigenvalues of a full curvature matrix as the diagonal of a precision.

An eigenvalue belongs to a direction in the space of all parameters, not to a single one, so that the result depends on
which eigenvalue is given to which parameter; it also changes with the basis.
"""

from typing import Literal

import torch
from torch import Tensor

from fl_lightning.params import Params, unflatten
from fl_lightning.system import activity

EigenOrder = Literal["ascending", "rank_matched"]


def as_diagonal(matrix: Tensor, like: Params, order: EigenOrder) -> Params:
    """The eigenvalues, one for each parameter.

    ascending: the j-th smallest goes to the j-th parameter, as eigensolvers sort them: all clients' precisions look
    alike, whatever their data. rank_matched: the k-th largest goes to the parameter with the k-th largest diagonal
    entry, the reading that keeps which parameters matter.

    Args:
        matrix: Symmetric, positive semi-definite.
        like: The parameters, for names and shapes.
        order: Which eigenvalue goes where.
    """
    activity.say(f"eigenvalues of {len(matrix):,} parameters")
    values = torch.linalg.eigvalsh(matrix).clamp_(min=0)  # rounding leaves small negative ones
    if order == "rank_matched":
        ranked = torch.empty_like(values)
        ranked[matrix.diagonal().argsort(stable=True)] = values
        values = ranked
    return unflatten(values, like)
