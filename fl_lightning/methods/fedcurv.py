"""FedCurv: a prior loss around the other clients' last models, weighted by their Fisher information.

    J_n(theta) = L_n(theta) + strength * sum_{j != n} (theta - theta_j)^T diag(u_j) (theta - theta_j)
               = L_n(theta) + strength * [<U - u_n, theta^2> - 2 <V - v_n, theta>] + constant
    u_n        = diagonal empirical Fisher of L_n at theta_n        v_n = u_n theta_n
    U          = sum_j u_j        V = sum_j v_j        theta_S <- sum_n p_n theta_n

The sums run over the clients of the previous round and are not divided by their number, so a good lambda shrinks as
clients are added.

Shoham, Avidov, Keren, Israel, Benditkis, Mor-Yosef, Zeitak: Overcoming Forgetting in Federated Learning on Non-IID
Data, NeurIPS Workshop on Federated Learning for Data Privacy and Confidentiality, 2019.

The authors published no code. Where others' code differs from the paper, we follow the paper:
- the Fisher is summed over all samples; OpenFL's code overwrites it, so that only the last minibatch counts;
- the penalty has its centre at the other clients' models, and a gradient; in FOLA's repository the centre is the
  server's model with a penalty built from detached tensors, which therefore does nothing;
- clients send theta_n and u_n, and the server forms v_n: the paper sends v_n too, which is not needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.client_state import ClientMemory, RunningTotal
from fl_lightning.curvature.fisher import FisherKind, diagonal_fisher
from fl_lightning.data.model_checks import couples_samples
from fl_lightning.errors import require
from fl_lightning.method import Cohort, Context, Local, Method, Server, Traits
from fl_lightning.models.task import Weights
from fl_lightning.params import Params, average, flatten, zeros, zip_map
from fl_lightning.penalty import SOFTER, Penalty
from fl_lightning.training import Training


class Shared(NamedTuple):
    """What is sent beside the model: U, V and the round."""

    fisher: Params
    moment: Params
    round: int


class ClientTerms(NamedTuple):
    """What the client remembers: its own u_n and v_n inside the sums."""

    fisher: Params
    moment: Params


class State(NamedTuple):
    """The server's model theta_S and, for each client, u_n and v_n; zeros for a client that does not count.

    Beside them their sums U and V.
    """

    params: Params
    clients: ClientMemory[ClientTerms]
    total: RunningTotal[ClientTerms]


class Report(NamedTuple):
    """The client's model theta_n and Fisher u_n."""

    params: Params
    fisher: Params


@dataclass(frozen=True)
class OthersPrecisions(Penalty):
    """P(theta) = strength * [<U', theta^2> - 2 <V', theta>]: many quadratics at once, up to a constant.

    Not a `Quadratic`, whose centre V' / U' does not exist where no client has curvature.

    Attributes:
        fisher: U' = U - u_n.
        moment: V' = V - v_n.
        strength: Its weight.
    """

    fisher: Params
    moment: Params
    strength: float

    def value(self, params: Params) -> Tensor:
        terms = zip_map(lambda u, v, p: (p * (u * p - 2 * v)).sum(), self.fisher, self.moment, params)
        return self.strength * torch.stack(list(terms.values())).sum()

    def grad(self, params: Params) -> Params:
        return zip_map(lambda u, v, p: (u * p - v) * (2 * self.strength), self.fisher, self.moment, params)

    def descent(self, lr: float) -> Callable[[Params], None]:
        # The factors are constant in a round: two passes over memory per step instead of four.
        factor = 2 * lr * self.strength
        stiffness = zip_map(lambda u: u * factor, self.fisher)
        offset = zip_map(lambda v: v * -factor, self.moment)

        def descend(params: Params) -> None:
            for name, value in params.items():
                value.sub_(torch.addcmul(offset[name], stiffness[name], value))

        return descend


@dataclass(frozen=True)
class FedCurv(Method):
    """Average of models, each trained with a prior loss around the others', weighted by their diagonal Fisher.

    Attributes:
        strength: Weight of the prior loss (lambda); 0 switches it off. The penalty is a sum over
            clients, so retune it when their number changes.
        fisher: Squared gradients of single samples, as in the paper, or of minibatches, which are about B times
            smaller.
        memory: Centres of the penalty: the models of the last round's clients, as in the paper, or the latest ones of
            all clients that ever took part.
    """

    display_name: ClassVar[str] = "FedCurv"
    version: ClassVar[int] = 2

    strength: float = 1.0
    fisher: FisherKind = "per_sample"
    memory: Literal["last_round", "all"] = "last_round"

    def __post_init__(self) -> None:
        require(0 <= self.strength < float("inf"), f"method.strength must be finite and >= 0, got {self.strength}")

    def check(self, training: Training, server: Server) -> None:
        require(
            self.fisher == "minibatch" or not couples_samples(server.task, server.holdout),
            "method.fisher per_sample needs a model whose samples do not depend on each other, as they do with "
            "BatchNorm; use --method.fisher minibatch or another model",
        )

    def init(self, params: Params, num_clients: int) -> State:
        return State(params, *_nothing(params))

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        total = state.total.rounded()
        own = state.clients.stacked(cohort.members)
        return Context(state.params, Shared(total.fisher, total.moment, cohort.round), own)

    def penalty(self, context: Context) -> Penalty | None:
        shared: Shared = context.shared
        if self.strength == 0 or shared.round == 1:  # no client has sent anything yet
            return None
        others = zip_map(torch.sub, shared.fisher, context.own.fisher)
        return OthersPrecisions(others, zip_map(torch.sub, shared.moment, context.own.moment), self.strength)

    def report(self, local: Local, context: Context) -> Report:
        weights, batch_size = Weights(local.params, local.buffers), local.training.batch_size
        return Report(local.params, diagonal_fisher(local.task, weights, local.data, self.fisher, batch_size))

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        params = average(state.params, [report.params for report in reports], cohort.weights)
        sent = {
            n: ClientTerms(report.fisher, zip_map(torch.mul, report.fisher, report.params))
            for n, report in zip(cohort.members, reports, strict=True)
        }
        # With memory of the last round a client that did not take part has zeros: it is neither part of the sums nor
        # subtracted from them.
        clients, total = (state.clients, state.total) if self.memory == "all" else _nothing(state.params)
        return State(params, clients.replaced(sent), total.changed(clients, sent))

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        if not cohort.training.is_sgd:
            return {}
        # The next cohort is not known yet: the worst client with data. SGD on the penalty overshoots above 1.
        total, clients = after.total.rounded().fisher, after.clients
        others = (n for n, size in enumerate(cohort.server.sizes) if size > 0 and n not in cohort.members)
        if next(others, None) is None:
            left = (zip_map(torch.sub, total, clients[n].fisher) for n in cohort.members)
            largest = max(float(flatten(one).max()) for one in left)
        else:  # its penalty has at most the whole sum, of terms that are not negative
            largest = float(flatten(total).max())
        return {"prior_stability": 2 * cohort.training.lr * self.strength * largest}

    @property
    def traits(self) -> Traits:
        return Traits(extra_passes=1, overshoot_advice=SOFTER)


def _nothing(params: Params) -> tuple[ClientMemory[ClientTerms], RunningTotal[ClientTerms]]:
    """The memory before the first round, and its sum."""
    row = ClientTerms(zeros(params), zeros(params))
    return ClientMemory.blank(row), RunningTotal.without_rows(row)
