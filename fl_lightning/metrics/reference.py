"""A saved run as the global posterior N(mu*, Lambda*^-1), and the distance of other models from it.

    D(theta) = 1/2 (theta - mu*)^T Lambda* (theta - mu*)
    AE = D(theta_S), the aggregation error of the server's model after a round
    LF = sum_n p_n D(theta_n), the local forgetting of the clients' models before it is aggregated

D is the negative log-density without its constant. mu* is the final model of the reference run. Lambda* is the
curvature of the pooled training data at mu* (`pooled_hessian`: no matrix is formed; for softmax regression D is half
the mean variance of the logits' shift under the predictions), or the precision that the run kept (`run`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fl_lightning.curvature import gauss_newton
from fl_lightning.data.batches import ClientData
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params, zip_map


class Reference(Protocol):
    """A global posterior."""

    def distances(self, models: Sequence[Params]) -> list[float]:
        """D of several models."""


@dataclass(frozen=True)
class Pooled:
    """Curvature of the pooled data at the reference model, as an operator.

    Attributes:
        task: Model and likelihood.
        weights: mu*.
        data: The training samples of all clients.
    """

    task: Task
    weights: Weights
    data: ClientData

    def distances(self, models: Sequence[Params]) -> list[float]:
        offsets = [zip_map(torch.sub, model, self.weights.params) for model in models]
        return [q / 2 for q in gauss_newton.quadratics(self.task, self.weights, self.data.blocks(), offsets)]


@dataclass(frozen=True)
class Posterior:
    """The posterior that a run has kept itself."""

    posterior: Gaussian

    def distances(self, models: Sequence[Params]) -> list[float]:
        return [float(self.posterior.distance(model)) for model in models]
