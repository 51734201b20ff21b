"""Centralised training, the upper line of every figure: the data of all clients in one place.

    theta <- SGD on the union of D_n over the round's clients, E epochs per round

Not federated, but with the same budget: the rounds, epochs, batches, learning rates and, with partial participation,
the samples of each round are those of the federated methods. With all clients taking part it does not depend on how
the data are split. GA and LA are the same number, and nothing is sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch

from fl_lightning.data.batches import ClientData
from fl_lightning.errors import require
from fl_lightning.method import Cohort, Context, CountsTraffic, Local, Method, Server, ServerData
from fl_lightning.params import Params
from fl_lightning.training import Training


class State(NamedTuple):
    """The model."""

    params: Params


class Report(NamedTuple):
    """The trained model."""

    params: Params


@dataclass(frozen=True)
class Centralised(Method, ServerData, CountsTraffic):
    """Centralised training on the pooled data with the budget of the federated methods: the upper reference.

    Attributes:
        on: Whose data are pooled: those of the round's clients, or the server's (data.holdout), as for pretraining.
    """

    on: Literal["clients", "holdout"] = "clients"

    def check(self, training: Training, server: Server) -> None:
        super().check(training, server)
        require(
            self.on == "clients" or len(server.holdout) > 0,
            "method.on holdout trains on the server's data, and there are none; set data.holdout, 0.2 for instance",
        )

    def init(self, params: Params, num_clients: int) -> State:
        return State(params)

    def gather(self, cohort: Cohort, data: Sequence[ClientData]) -> tuple[Cohort, Sequence[ClientData]]:
        """The cohort's data as those of a single client; their order does not depend on the clients."""
        of_clients = torch.cat([data[n].indices for n in cohort.members]).sort().values
        indices = of_clients if self.on == "clients" else cohort.server.holdout.indices
        alone = cohort._replace(
            members=(0,), weights=(1.0,), shares=(sum(cohort.shares),), epochs=(cohort.training.epochs,), num_clients=1
        )
        return alone, [replace(data[0], client=0, indices=indices)]

    def report(self, local: Local, context: Context) -> Report:
        return Report(local.params)

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        return State(reports[0].params)

    def traffic(self, message: Any) -> float:
        """Nothing is sent: it is all in one place."""
        return 0
