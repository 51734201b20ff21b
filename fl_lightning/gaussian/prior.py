"""The prior loss of a Gaussian of any form."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fl_lightning.params import Params, flatten, zip_map
from fl_lightning.penalty import Penalty

if TYPE_CHECKING:
    from fl_lightning.gaussian.form import Gaussian


@dataclass(frozen=True)
class PriorLoss(Penalty):
    """P(theta) = (strength / 2) (theta - mu)^T Lambda (theta - mu); its gradient is strength * Lambda (theta - mu).

    Attributes:
        gaussian: mu and Lambda.
        strength: Its weight in the loss.
    """

    gaussian: "Gaussian"
    strength: float

    def value(self, params: Params) -> Tensor:
        return self.value_and_grad(params)[0]

    def grad(self, params: Params) -> Params:
        return self.value_and_grad(params)[1]

    def value_and_grad(self, params: Params) -> tuple[Tensor, Params]:
        offset = zip_map(lambda p, m: p - m, params, self.gaussian.mean)
        slope = zip_map(lambda s: s * self.strength, self.gaussian.apply(offset))
        return 0.5 * torch.dot(flatten(slope), flatten(offset)), slope
