"""FedProx: FedAvg with a proximal term around the server's model, and stragglers that count.

    J_n(theta) = L_n(theta) + (mu / 2) ||theta - theta_S||^2        theta_S <- sum_n p_n theta_n

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith: Federated Optimization in Heterogeneous Networks, MLSys 2020.

Where the paper and published codes disagree:
- clients are drawn uniformly and averaged by samples, as in the authors' code; the paper draws them with probability
  pi_n and takes the plain mean;
- the norm is squared and covers every parameter; FOLA's text prints it without the square, FedBE's code uses it so and
  on tensors named "weight" only;
- the proximal term has a real gradient; in FOLA's code it is built from detached tensors, so that mu is inert;
- with momentum the gradient of each step's proximal term enters the velocity once; FedNova's code adds it into the
  buffer in place, where it piles up.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from fl_lightning.errors import require
from fl_lightning.method import Cohort, Context, Local, Method
from fl_lightning.params import Params, average
from fl_lightning.penalty import Penalty, Quadratic


class State(NamedTuple):
    """The server's model theta_S."""

    params: Params


class Report(NamedTuple):
    """The client's model theta_n."""

    params: Params


@dataclass(frozen=True)
class FedProx(Method):
    """FedAvg with a proximal term; clients that did not finish their epochs are kept.

    Attributes:
        mu: Weight of the proximal term around the server's model (mu); 0 switches it off. Good values differ:
            the paper searches 0.001, 0.01, 0.1 and 1.
    """

    display_name: ClassVar[str] = "FedProx"

    mu: float = 0.1

    def __post_init__(self) -> None:
        require(0 <= self.mu < float("inf"), f"method.mu must be finite and >= 0, got {self.mu}; 0 is FedAvg")

    def init(self, params: Params, num_clients: int) -> State:
        return State(params)

    def penalty(self, context: Context) -> Penalty | None:
        return None if self.mu == 0 else Quadratic(context.start, float(self.mu))

    def report(self, local: Local, context: Context) -> Report:
        return Report(local.params)

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        return State(average(state.params, [report.params for report in reports], cohort.weights))
