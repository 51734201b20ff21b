"""FedNova: clients that take more local steps do not count more; updates are normalised before they are averaged.

    y_n = T_n steps of SGD, SGD with momentum rho, or proximal SGD from x
    x  <- x - tau_eff sum_n p_n (x - y_n) / |a_n|_1           tau_eff = sum_n p_n |a_n|_1, or min_n |a_n|_1, or a number

a_n are the weights with which the local solver adds up its gradients, x - y_n = lr sum_t a_nt g_t, so that

    |a_n|_1 = T_n                                                           plain SGD
    |a_n|_1 = (T_n - rho (1 - rho^T_n) / (1 - rho)) / (1 - rho)             momentum rho
    |a_n|_1 = (1 - (1 - lr mu)^T_n) / (lr mu)                               proximal term mu/2 |y - x|^2, lr mu <= 1
    |a_n|_1 = T_n                                                           adam, adamw

Each step of adam goes along a mean of gradients, with weights that sum to 1, scaled per parameter. With a schedule, a
step counts by its learning rate over the largest: T_n becomes the sum of these shares.

With server momentum g:  u <- g u + (x - x_new) / lr  and  x <- x - lr u.

Wang, Liu, Liang, Joshi, Poor: Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization,
NeurIPS 2020.

The same as: FedAvg with weights w_n = p_n tau_eff / |a_n|_1. They sum to at least 1 for tau_eff = mean, and to more the
more unequal the clients are, a longer step of the server; watch `effective_weight_sum`.

What we chose:
- tau_eff is made of |a_n|_1 for every solver, so that clients with equal steps are averaged as FedAvg does; the
  published code takes sum_n p_n T_n if mu > 0, a longer step even then;
- mu together with momentum is refused: the published code adds the proximal term into the momentum buffer and applies
  the two recursions for |a_n|_1 one after the other, which fits no solver;
- weight decay and clipping do not enter |a_n|_1, as in the published code: decay counts as part of the gradient, and
  clipping changes the size of gradients, not how they are added up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.method import Cohort, Context, Local, Method, Server
from fl_lightning.methods.fedopt import at_rest, momentum_step
from fl_lightning.params import Params, average, zip_map
from fl_lightning.penalty import Penalty, Quadratic
from fl_lightning.training import Training, require_sgd


class State(NamedTuple):
    """The server's model x and its momentum buffer u, which is empty without server momentum."""

    params: Params
    velocity: Params


class Report(NamedTuple):
    """The client's model y_n and |a_n|_1, one number."""

    params: Params
    norm: Tensor


@dataclass(frozen=True)
class FedNova(Method):
    """Normalise each client's update by its local steps before averaging.

    Attributes:
        tau_eff: Effective steps of the server (tau_eff): mean or min of the clients' normalisers |a_n|_1, or a number.
        mu: Weight of the proximal term in the local solver (mu); 0 is none. Not together with training.momentum.
        server_momentum: Momentum of the server's steps (gmf in the published code); 0 is none.
    """

    display_name: ClassVar[str] = "FedNova"

    tau_eff: Literal["mean", "min"] | float = "mean"
    mu: float = 0.0
    server_momentum: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.tau_eff in ("mean", "min") or (not isinstance(self.tau_eff, str) and 0 < self.tau_eff < math.inf),
            f"method.tau_eff must be mean, min or a finite number > 0, got {self.tau_eff}",
        )
        require(0 <= self.mu < math.inf, f"method.mu must be finite and >= 0, got {self.mu}")
        require(0 <= self.server_momentum < 1, f"method.server_momentum must lie in [0, 1), got {self.server_momentum}")

    def check(self, training: Training, server: Server) -> None:
        require(
            self.mu == 0 or training.momentum == 0,
            f"fednova cannot combine method.mu {self.mu} and training.momentum {training.momentum}; "
            "set --method.mu 0 or --training.momentum 0",
        )
        require(
            training.optimiser != "own",
            "fednova does not support --training.optimiser own, a module's own optimiser; use sgd, adam or adamw",
        )
        if self.mu:
            why = f"fednova cannot combine method.mu {self.mu} and an adaptive optimiser"
            require_sgd(training, why, "set --method.mu 0 or --training.optimiser sgd")

    def init(self, params: Params, num_clients: int) -> State:
        return State(params, at_rest(params, self.server_momentum))

    def penalty(self, context: Context) -> Penalty | None:
        return Quadratic(context.start, float(self.mu)) if self.mu else None

    def report(self, local: Local, context: Context) -> Report:
        training, number = local.training, local.num_steps
        rates = [training.factor(step, number) for step in range(number)]
        norm = solver_norm(rates, training.momentum, training.lr * self.mu)
        return Report(local.params, torch.tensor(norm, dtype=torch.float64))

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        _, weights = self._effective(cohort, reports)
        models, total = [report.params for report in reports], sum(weights)
        shares = [weight / total for weight in weights]
        if not self.server_momentum:
            return State(average(state.params, models, shares, rate=total), {})
        start, lr = zip_map(Tensor.double, state.params), cohort.training.lr
        # With lr 0 the models have not moved, and the quotient is 0 in the limit.
        gradient = zip_map(lambda x, new: (x - new) / (lr or 1.0), start, average(start, models, shares, rate=total))
        return State(*momentum_step(state.params, state.velocity, gradient, self.server_momentum, lr))

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        tau_eff, weights = self._effective(cohort, reports)
        return {"tau_eff": tau_eff, "effective_weight_sum": sum(weights), "effective_weight": weights}

    def _effective(self, cohort: Cohort, reports: Sequence[Report]) -> tuple[float, list[float]]:
        """The effective steps tau_eff, and the weights w_n = p_n tau_eff / |a_n|_1 of the clients."""
        norms = [float(report.norm) for report in reports]
        if self.tau_eff == "mean":
            tau_eff = sum(p * norm for p, norm in zip(cohort.weights, norms, strict=True))
        elif self.tau_eff == "min":
            tau_eff = min(norms)
        else:
            tau_eff = float(self.tau_eff)
        return tau_eff, [p * tau_eff / norm for p, norm in zip(cohort.weights, norms, strict=True)]


def solver_norm(rates: Sequence[float], momentum: float, proximal: float) -> float:
    """The l1 norm |a|_1 of the weights with which a local solver has added up its gradients, by recursion.

    Args:
        rates: The learning rates of the T steps, in units of lr.
        momentum: rho; then no proximal.
        proximal: lr mu: a proximal step leaves |1 - lr mu| of the earlier steps; 0 without a proximal term.

    >>> solver_norm([1, 1, 1], 0.0, 0.0), solver_norm([1, 1, 1], 0.5, 0.0), solver_norm([1, 1, 1], 0.0, 0.5)
    (3.0, 4.25, 1.75)
    """
    norm = newest = 0.0
    for rate in rates:
        newest = momentum * newest + 1  # how much of the gradients is in the step that is taken now
        norm = abs(1 - rate * proximal) * norm + rate * newest
    return norm
