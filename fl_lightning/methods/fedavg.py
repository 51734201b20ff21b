"""FedAvg: train locally, average the models.

    theta_n = SGD on L_n from theta_S        theta_S <- sum_n p_n theta_n

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

from fl_lightning.method import Cohort, Context, Local, Method, Traits
from fl_lightning.params import Params, average


class State(NamedTuple):
    """The server's model theta_S."""

    params: Params


class Report(NamedTuple):
    """The client's model theta_n."""

    params: Params


@dataclass(frozen=True)
class FedAvg(Method):
    """Average the clients' models, weighted by their numbers of samples.

    Attributes:
        stragglers: Leave clients that did not finish their epochs out of the average, as McMahan et al. do, or keep
            them.
    """

    display_name: ClassVar[str] = "FedAvg"

    stragglers: Literal["drop", "keep"] = "drop"

    def init(self, params: Params, num_clients: int) -> State:
        return State(params)

    def report(self, local: Local, context: Context) -> Report:
        return Report(local.params)

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        return State(average(state.params, [report.params for report in reports], cohort.weights))

    @property
    def traits(self) -> Traits:
        return Traits(drops_stragglers=self.stragglers == "drop")
