"""RegMean: every layer is merged as least squares, so that it computes on each client's inputs what the client's did.

    A_n = (1/m_n) sum_i a_i a_i^T                                   a_i: input of the layer, with a one appended
    M_S <- [sum_n p_n M_n (A_n + gamma I)] [sum_n p_n (A_n + gamma I)]^-1

Jin, Ren, Preotiuc-Pietro, Cheng: Dataless Knowledge Fusion by Merging Weights of Language Models, ICLR 2023.

A named setting of `fola`: the product of Gaussians whose precision is the second moment of the layers' inputs, at the
end of training, without prior loss and memory. The original shrinks the entries of A_n beside the diagonal by a factor
of 0.9 instead of damping it. A_n of the first layer is made of raw inputs (`first_layer average` does not send it).
"""

from dataclasses import dataclass
from typing import Literal

from fl_lightning.methods.fola import Fola


@dataclass(frozen=True)
class RegMean(Fola):
    """One-shot merging: layers weighted by the second moments of their inputs, without labels."""

    curvature: Literal["offline"] = "offline"
    curvature_form: Literal["inputs"] = "inputs"
    strength: float = 0.0
