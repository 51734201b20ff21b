"""FedSGD: clients send the gradient at the server's model, the server takes the step.

    g_n = grad L_n(theta_S), over all data of client n        theta_S <- theta_S - lr sum_n p_n g_n

McMahan, Moore, Ramage, Hampson, Aguera y Arcas: Communication-Efficient Learning of Deep Networks from Decentralized
Data, AISTATS 2017.

Up to rounding this is FedAvg with one epoch of one full batch, whatever training.epochs and training.batch_size say.
- training.clip_norm and training.weight_decay hold for every method or for none: g_n is clipped and decayed by the
  client before it is sent, as FedAvg's only step would be.
- A momentum that starts fresh in every round does nothing in a round of one step, nor does a schedule of its steps.
- An adaptive optimiser belongs to the server here: `fedadam` with one epoch of one full batch.
- The local model on which LA is measured is theta_S - lr g_n; it is not sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

from fl_lightning.method import Cohort, Context, FixesTraining, Local, Method, ObservesPath, Server, Step
from fl_lightning.optimisers.base import clipped
from fl_lightning.params import Params, weighted_sum, zeros, zip_map
from fl_lightning.training import Training, require_sgd


class State(NamedTuple):
    """The server's model theta_S."""

    params: Params


class Report(NamedTuple):
    """The client's gradient g_n."""

    grad: Params


@dataclass(frozen=True)
class FedSGD(Method, ObservesPath, FixesTraining):
    """Average the clients' full gradients and take one step per round; epochs and batch size do not matter."""

    display_name: ClassVar[str] = "FedSGD"

    def adapt(self, training: Training) -> Training:
        return replace(training, epochs=1, batch_size=None, momentum=0.0)

    def check(self, training: Training, server: Server) -> None:
        remedy = "use --method fedadam with --training.epochs 1 --training.batch_size null, or --training.optimiser sgd"
        require_sgd(training, "fedsgd sends gradients, with which the server takes a step of SGD", remedy)

    def init(self, params: Params, num_clients: int) -> State:
        return State(params)

    def path_statistics(self, context: Context) -> Params:
        return zeros(context.start)

    def observe(self, statistics: Params, step: Step) -> Params:
        return zip_map(lambda t, g: t + g, statistics, step.grad)  # a copy: there is only one step

    def report(self, local: Local, context: Context) -> Report:
        grad: Params = local.path_statistics
        clip_norm, weight_decay = local.training.clip_norm, local.training.weight_decay
        if clip_norm is not None:
            grad = clipped(grad, clip_norm)
        if weight_decay:
            grad = zip_map(lambda g, p: g.add(p, alpha=weight_decay), grad, context.start)
        return Report(grad)

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        gradient = weighted_sum((report.grad for report in reports), cohort.weights)
        lr = cohort.training.lr
        return State(zip_map(lambda p, g: p.double().sub(g, alpha=lr).to(p.dtype), state.params, gradient))
