"""FedLap: a Laplace approximation with fixed covariance, whose means add up to the server's model.

    y_n = SGD on L_n(theta) + (delta / m_n) (<v_n, theta> + 1/2 ||theta - mu_S||^2) from mu_S
    v_n  <- v_n + rho (y_n - mu_S)        in the end -(m_n / delta) grad L_n(mu_S), the client's share of the model
    mu_S <- x_0 + sum_n v_n               over all clients; a client that was never seen has v_n = 0

Swaroop, Khan, Doshi-Velez: Connecting Federated ADMM to Bayes, ICLR 2025. The fixed point is the minimum of
sum_n m_n L_n(theta) + (delta / 2) ||theta - x_0||^2, the posterior mode under the prior N(x_0, I / delta): expectation
propagation with all precisions fixed. FedDyn (`feddyn`) is its sibling without a prior.

What we chose:
- the prior is centred at the initial weights x_0 and not at zero, where a network has no gradient to start with;
- rho is 1/|S| unless it is given: the server then moves by the mean of the clients' steps. With rho = 1 all of them are
  added up, which is exact for one client and oversteps by about |S| for clients that agree;
- the objective is a sum over samples by its nature, so that `federation.weighting` has no effect.

bayes-admm, the authors' later code, has the norm without the square, so that its FedLap has a gradient of constant
length; it also gives every client the step size of the last one, and reseeds every client and round alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fl_lightning.client_state import ClientMemory, RunningTotal
from fl_lightning.errors import require
from fl_lightning.method import Cohort, Context, Local, Method, Traits
from fl_lightning.params import Params, flatten, zeros, zip_map
from fl_lightning.penalty import SOFTER, Penalty, Quadratic


class State(NamedTuple):
    """The server's model mu_S, the mean x_0 of the prior, every client's share v_n of the model, and sum_n v_n."""

    params: Params
    prior: Params
    clients: ClientMemory[Params]
    total: RunningTotal[Params]


class ClientTerms(NamedTuple):
    """The client's share v_n, and delta / m_n."""

    share: Params
    stiffness: Tensor


class Report(NamedTuple):
    """The client's model y_n."""

    params: Params


@dataclass(frozen=True)
class FedLap(Method):
    """Laplace with fixed covariance: clients hold shares of the model, which the server adds to the prior's mean.

    Attributes:
        strength: Precision of the prior (delta), against the sum over all samples: a client's weight is delta / m_n.
            The authors have 1 on MNIST and 20 on CIFAR-10.
        damping: How much of its step a client's share takes (rho); null is 1/|S|, one over the clients of the round.
    """

    display_name: ClassVar[str] = "FedLap"

    strength: float = 1.0
    damping: float | None = None

    def __post_init__(self) -> None:
        require(0 < self.strength < float("inf"), f"method.strength must be finite and > 0, got {self.strength}")
        require(
            self.damping is None or 0 < self.damping <= 1,
            f"method.damping must be in (0, 1], or null for one over the clients of a round, got {self.damping}",
        )

    def init(self, params: Params, num_clients: int) -> State:
        nothing = zeros(params)
        return State(params, dict(params), ClientMemory.blank(nothing), RunningTotal.without_rows(nothing))

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        device = next(iter(state.params.values())).device
        stiffness = torch.tensor(self._stiffness(cohort), dtype=torch.float64, device=device)
        return Context(state.params, own=ClientTerms(state.clients.stacked(cohort.members), stiffness))

    def penalty(self, context: Context) -> Penalty:
        own: ClientTerms = context.own
        centre = zip_map(torch.sub, context.start, own.share)
        return Quadratic(centre, zip_map(lambda c: own.stiffness.to(c.dtype).expand_as(c), centre))

    def report(self, local: Local, context: Context) -> Report:
        return Report(local.params)

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        rho = self.damping or 1 / len(reports)

        def renewed(v: Tensor, y: Tensor, mu: Tensor) -> Tensor:
            return v.double().add(y.double() - mu.double(), alpha=rho).to(v.dtype)

        rows = {
            n: zip_map(renewed, state.clients[n], report.params, state.params)
            for n, report in zip(cohort.members, reports, strict=True)
        }
        total = state.total.changed(state.clients, rows)
        params = zip_map(lambda x, v: (x.double() + v.double()).to(x.dtype), state.prior, total.rounded())
        return State(params, state.prior, state.clients.replaced(rows), total)

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        offset = zip_map(torch.sub, after.params, after.prior)
        numbers: dict[str, float | list[float]] = {
            "prior_distance": _norm(offset),
            "client_share_norm": [_norm(after.clients[n]) for n in cohort.members],
        }
        if cohort.training.is_sgd:
            numbers["prior_stability"] = cohort.training.lr * max(self._stiffness(cohort))
        return numbers

    @property
    def traits(self) -> Traits:
        return Traits(overshoot_advice=SOFTER)

    def _stiffness(self, cohort: Cohort) -> list[float]:
        """The weight delta / m_n of every member's prior loss."""
        return [self.strength / cohort.server.sizes[n] for n in cohort.members]


def _norm(params: Params) -> float:
    return float(flatten(params).double().norm())
