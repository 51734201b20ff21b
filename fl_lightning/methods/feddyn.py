"""FedDyn: every client's objective is bent until its own minimum is the minimum of all.

    y_n = SGD on L_n(theta) - <g_n, theta> + (alpha / 2) ||theta - x||^2 from x
    g_n <- g_n - alpha (y_n - x)
    h   <- h - alpha sum_S q_n (y_n - x)        h = sum_n q_n g_n over all clients
    x   <- sum_S p_n y_n - h / alpha

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama: Federated Learning Based on Dynamic Regularization, ICLR 2021.

q_n is the client's weight in the objective sum_n q_n L_n and follows `federation.weighting` like p_n does; uniform is
the paper's method, q_n = 1/N and p_n = 1/|S|. Where all y_n = x, g_n is the gradient of L_n, and h = 0 says that x is a
minimum of the objective. Until then the server steps further than the mean: in round 1 twice as far.

A client remembers s_n = g_n / alpha, which is minus the sum of its own steps, and the server h / alpha.

Where published codes differ:
- for an objective weighted by samples, the published code keeps plain means and gives client n the weight
  alpha / (N q_n). The minimum is the same, but the penalty depends on what others have, and a client with few samples
  feels one so strong that its steps overshoot (with a hundredth of the mean size, a hundred times as strong);
- the published code trains from x and tests the mean of the clients' models instead (`measured mean`); that is the
  better model in early rounds, where x overshoots, and not the one that the method is about;
- bayes-admm (ICLR 2026) compares with a FedDyn whose quadratic term is the norm without the square, which acts with
  constant force.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.client_state import ClientMemory
from fl_lightning.errors import require
from fl_lightning.method import Cohort, Context, Local, Method, Traits
from fl_lightning.params import Params, average, cast_like, flatten, mean_update, zeros, zip_map
from fl_lightning.penalty import SOFTER, Penalty, Quadratic


class State(NamedTuple):
    """What the server knows.

    Attributes:
        params: The model that is measured: x, or the mean of the clients' models.
        start: The model x at which clients start, if it is another one.
        shift: h / alpha, the weighted mean of all clients' shifts.
        clients: s_n = g_n / alpha of every client.
    """

    params: Params
    start: Params
    shift: Params
    clients: ClientMemory[Params]


class Report(NamedTuple):
    """The client's model y_n."""

    params: Params


@dataclass(frozen=True)
class FedDyn(Method):
    """Dynamic regularisation: a linear and a quadratic penalty that make the clients' minima meet at that of all.

    Attributes:
        strength: Weight of the regulariser (alpha). Good values differ between problems: the paper searches 0.001, 0.01
            and 0.1.
        measured: Which model counts as the result: the server's own (x), at which clients start, or the mean of the
            clients' models, which the published code tests.
    """

    display_name: ClassVar[str] = "FedDyn"

    strength: float = 0.1
    measured: Literal["server", "mean"] = "server"

    def __post_init__(self) -> None:
        require(0 < self.strength < float("inf"), f"method.strength must be finite and > 0, got {self.strength}")

    def init(self, params: Params, num_clients: int) -> State:
        start = dict(params) if self.measured == "mean" else {}
        return State(params, start, zeros(params), ClientMemory.blank(zeros(params)))

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        return Context(self._start(state), own=state.clients.stacked(cohort.members))

    def penalty(self, context: Context) -> Penalty:
        # -<g_n, theta> + alpha/2 ||theta - x||^2 is, up to a constant, a quadratic around x + g_n / alpha.
        return Quadratic(zip_map(torch.add, context.start, context.own), float(self.strength))

    def report(self, local: Local, context: Context) -> Report:
        return Report(local.params)

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        start, models = self._start(state), [report.params for report in reports]
        move = mean_update(start, models, cohort.weights)
        # In float64, because shifts are what is left of sums that cancel.
        shift = zip_map(torch.sub, zip_map(Tensor.double, state.shift), mean_update(start, models, cohort.shares))
        params = zip_map(lambda x, m, s: (x.double() + m - s).to(x.dtype), start, move, shift)

        def shifted(s: Tensor, y: Tensor, x: Tensor) -> Tensor:
            return (s.double() - (y.double() - x.double())).to(s.dtype)

        renewed = {
            n: zip_map(shifted, state.clients[n], model, start) for n, model in zip(cohort.members, models, strict=True)
        }
        shift, clients = cast_like(shift, start), state.clients.replaced(renewed)
        if self.measured == "mean":
            return State(average(start, models, cohort.weights), params, shift, clients)
        return State(params, {}, shift, clients)

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        numbers: dict[str, float | list[float]] = {
            "shift_norm": _norm(after.shift),
            "client_shift_norm": [_norm(after.clients[n]) for n in cohort.members],
        }
        if cohort.training.is_sgd:
            numbers["prior_stability"] = cohort.training.lr * self.strength
        return numbers

    @property
    def traits(self) -> Traits:
        return Traits(overshoot_advice=SOFTER)

    def _start(self, state: State) -> Params:
        return state.start if self.measured == "mean" else state.params


def _norm(params: Params) -> float:
    return float(flatten(params).double().norm())
