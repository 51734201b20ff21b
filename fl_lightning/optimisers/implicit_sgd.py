"""SGD on the likelihood with an implicit step on a quadratic penalty: stable however stiff the penalty is.

    theta' = SGD(theta, g)                          as `sgd`, without the penalty
    theta <- (theta' + s c) / (1 + s)               s = lr a, for the penalty P = 1/2 sum_j a_j (theta_j - c_j)^2

The second line minimises P(theta) + ||theta - theta'||^2 / (2 lr). Where lr a is small, both are SGD's step up to
O((lr a)^2); where it exceeds 2, SGD diverges, and this goes to the centre.
"""

from dataclasses import dataclass

from torch import Tensor

from fl_lightning.optimisers.base import Gradients, LocalOptimiser
from fl_lightning.optimisers.sgd import Sgd
from fl_lightning.params import Params, zip_map
from fl_lightning.penalty import Quadratic
from fl_lightning.training import Training


@dataclass(frozen=True)
class ImplicitPenalty(LocalOptimiser):
    """SGD whose penalty is taken at the end of the step.

    Attributes:
        training: The settings of SGD.
        penalty: c and a, one stiffness per parameter.
    """

    training: Training
    penalty: Quadratic

    def init(self, params: Params) -> Params:
        return Sgd(self.training).init(params)

    def step(
        self, params: Params, state: Params, gradients: Gradients, noise: Params, number: int
    ) -> tuple[Params, Params]:
        moved, velocity = Sgd(self.training).step(params, state, Gradients(gradients.likelihood), noise, number)
        stiffness = self.penalty.stiffness
        assert isinstance(stiffness, dict)

        def pulled(value: Tensor, centre: Tensor, a: Tensor) -> Tensor:
            s = self.training.lr * a
            return value + (centre - value) * (s / (1 + s))

        return zip_map(pulled, moved, self.penalty.centre, stiffness), velocity
