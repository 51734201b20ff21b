"""FedExP: FedAvg whose server steps the further, the more the clients' updates differ.

    Delta_n = y_n - x        Delta = sum_n p_n Delta_n        y_n = SGD on L_n from x
    eta_g = max(1, sum_n p_n ||Delta_n||^2 / (2 (||Delta||^2 + |S| epsilon)))        |S|: number of clients in the round
    x <- x + eta_g Delta

Jhunjhunwala, Wang, Joshi: FedExP: Speeding Up Federated Averaging via Extrapolation, ICLR 2023. The step is that of
projections onto convex sets, which clients that can fit their data exactly would be.

The same as: FedAvg wherever clients agree, and for a single client. With N orthogonal updates of equal norm eta_g is
N / 2 (epsilon 0).

The published code measures the mean of the last two models, because extrapolated ones oscillate, and FedAvg beside it
as it is. Here that is a choice (`average_last`), off: methods are compared by the model that clients start from.
Its FedAdam squares the momentum instead of the update, and a misspelt name leaves its FedAvgM(ExP) without momentum.

As there, epsilon falls with the square of `training.lr_decay`, as the squares of the updates do; so with `lr_rounds`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fl_lightning.errors import require
from fl_lightning.method import Cohort, Context, Local, Method
from fl_lightning.params import Params, average, flatten, mean_update, zip_map


class State(NamedTuple):
    """The model that is measured, and the newest one, at which clients start, if that is another."""

    params: Params
    newest: Params


class Report(NamedTuple):
    """The client's model y_n."""

    params: Params


@dataclass(frozen=True)
class FedExP(Method):
    """Extrapolate: the server steps further than the mean of the models where clients' updates disagree.

    Attributes:
        epsilon: Keeps the step finite where the clients' updates cancel (epsilon); in units of a squared update.
        average_last: Measure the mean of the last two models of the server, as the published code does. Clients start
            at the newest all the same.
    """

    display_name: ClassVar[str] = "FedExP"

    epsilon: float = 1e-3
    average_last: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.epsilon < float("inf"), f"method.epsilon must be finite and >= 0, got {self.epsilon}")

    def init(self, params: Params, num_clients: int) -> State:
        return State(params, dict(params) if self.average_last else {})

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        return Context(self._start(state))

    def report(self, local: Local, context: Context) -> Report:
        return Report(local.params)

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        start, models = self._start(state), [report.params for report in reports]
        newest = average(start, models, cohort.weights, self._rate(start, cohort, reports))
        if not self.average_last:
            return State(newest, {})
        if cohort.round == 1:  # no client has trained an earlier model
            return State(dict(newest), newest)
        return State(zip_map(lambda a, b: ((a.double() + b.double()) / 2).to(a.dtype), newest, start), newest)

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        return {"server_step": self._rate(self._start(before), cohort, reports)}

    def _start(self, state: State) -> Params:
        return state.newest if self.average_last else state.params

    def _rate(self, start: Params, cohort: Cohort, reports: Sequence[Report]) -> float:
        """The step size eta_g of the server."""
        models = [report.params for report in reports]
        apart = sum(
            weight * float(flatten(mean_update(start, [model], [1.0])).square().sum())
            for model, weight in zip(models, cohort.weights, strict=True)
        )
        together = float(flatten(mean_update(start, models, cohort.weights)).square().sum())
        training, number = cohort.training, cohort.round
        epsilon = self.epsilon * training.lr_decay ** (2 * (number - 1)) * training.cosine(number) ** 2
        bound = 2 * (together + len(models) * epsilon)
        return max(1.0, apart / bound) if bound > 0 else 1.0
