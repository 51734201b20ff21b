"""SCAFFOLD: control variates steer every client from its own gradient towards the gradient of all.

    y_n <- y_n - lr (g_n(y_n) + c - c_n)      K_n times from x: the gradient of L_n(y) + <c - c_n, y>
    c_n+ = grad L_n(x)                        option I, one pass over the client's data
    c_n+ = c_n - c + (x - y_n) / (K_n lr)     option II, the mean gradient along the local path
    x   <- x + server_lr sum_n p_n (y_n - x)
    c   <- c + sum_n q_n (c_n+ - c_n)         q_n: the client's weight among all clients, so that c = sum_n q_n c_n

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh: SCAFFOLD: Stochastic Controlled Averaging for Federated Learning,
ICML 2020.

Where published codes disagree with the paper, the defaults are:
- all control variates start at zero, as in the paper; NIID-Bench starts them at the weights of a random network
  (`niid_bench_init` emulates that). All its control variates start equal and every client's first report replaces its
  own, so that start acts only where some clients have not taken part yet: at full participation it cancels;
- q_n follows `federation.weighting` like p_n does: uniform is the paper's method, by samples fits an objective weighted
  by samples; NIID-Bench mixes the two, which biases the correction;
- only parameters are corrected; NIID-Bench corrects BatchNorm's statistics too;
- K_n is what the client really did, also if it is a straggler; PFLlib uses the nominal number of epochs;
- momentum and clipping are refused: with them (x - y_n) / (K_n lr) is not a mean gradient, and the engine would put the
  correction into the buffer, or clip it;
- with a schedule, K_n lr is the sum of the learning rates of the K_n steps;
- adam and adamw go with option I alone, whose control variates are gradients however the client steps; the correction
  is part of the gradient that they see.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning import streams
from fl_lightning.client_state import ClientMemory
from fl_lightning.curvature.fisher import mean_gradient
from fl_lightning.errors import require
from fl_lightning.method import Cohort, Context, Local, Method, Server, ServerData, Traits
from fl_lightning.methods.parts.control_variates import ControlVariates, change_along_path
from fl_lightning.models.task import Weights
from fl_lightning.params import Params, average, flatten, numbers, zeros, zip_map
from fl_lightning.penalty import Linear, Penalty
from fl_lightning.training import Training, require_sgd


class State(NamedTuple):
    """The server's model x and control variate c, and the clients' memory: c_n for each of them."""

    params: Params
    control: Params
    clients: ClientMemory[Params]


class Shared(NamedTuple):
    """What is sent beside the model: c, and the round."""

    control: Params
    round: int


class Report(NamedTuple):
    """The client's model y_n and the change of its control variate, c_n+ - c_n."""

    params: Params
    change: Params


@dataclass(frozen=True)
class Scaffold(Method, ServerData):
    """Correct client drift by control variates, estimates of each client's gradient and of the mean.

    Attributes:
        option: How a client renews its control variate: I takes the gradient of all its data at the server's model, II
            the mean gradient along its path, which costs nothing.
        server_lr: Step size of the server (eta_s, eta_g); 1 takes the mean of the models.
        niid_bench_init: Emulate NIID-Bench, whose control variates start at random network weights instead of zero.
    """

    display_name: ClassVar[str] = "SCAFFOLD"

    option: Literal["I", "II"] = "II"
    server_lr: float = 1.0
    niid_bench_init: bool = False

    def __post_init__(self) -> None:
        require(0 < self.server_lr < float("inf"), f"method.server_lr must be finite and > 0, got {self.server_lr}")

    def check(self, training: Training, server: Server) -> None:
        if self.option == "II":
            why = "method.option II takes control variates from SGD's path"
            require_sgd(training, why, "use --method.option I, or set --training.optimiser sgd")
        require(
            training.momentum == 0,
            "scaffold's control variates are mean gradients of plain SGD, expected training.momentum 0, got "
            f"{training.momentum}; set --training.momentum 0 or use another method",
        )
        require(
            training.clip_norm is None,
            "scaffold's correction must not be clipped, expected training.clip_norm null, got "
            f"{training.clip_norm}; set --training.clip_norm null, or lower training.lr if it diverges",
        )

    def init(self, params: Params, num_clients: int) -> State:
        return State(params, zeros(params), ClientMemory.blank(zeros(params)))

    def prepare(self, state: State, server: Server) -> State:
        if not self.niid_bench_init:
            return state
        # The initial weights in random order, tensor by tensor: they have the model's own distribution, whatever it is.
        stream = streams.generator(server.seed, "scaffold controls")

        def shuffled(value: Tensor) -> Tensor:
            order = torch.randperm(value.numel(), generator=stream).to(value.device)
            return value.reshape(-1)[order].reshape(value.shape)

        control = zip_map(shuffled, state.params)
        return state._replace(control=control, clients=ClientMemory.blank(control))

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        return Context(state.params, Shared(state.control, cohort.round), state.clients.stacked(cohort.members))

    def penalty(self, context: Context) -> Penalty | None:
        shared: Shared = context.shared
        if shared.round == 1:  # all control variates are still equal: no correction, exactly
            return None
        return Linear(zip_map(torch.sub, shared.control, context.own))

    def report(self, local: Local, context: Context) -> Report:
        shared: Shared = context.shared
        if self.option == "I":
            # A context holds no buffers, so those after training stand in for BatchNorm's statistics at x.
            gradient = mean_gradient(local.task, Weights(context.start, local.buffers), local.data)
            return Report(local.params, zip_map(torch.sub, gradient, context.own))
        return Report(local.params, change_along_path(local, context.start, shared.control))

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        params = average(state.params, [report.params for report in reports], cohort.weights, self.server_lr)
        renewed = ControlVariates(state.control, state.clients).renewed(cohort, [report.change for report in reports])
        return State(params, renewed.mean, renewed.clients)

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        corrections = (zip_map(torch.sub, before.control, before.clients[n]) for n in cohort.members)
        control, *of_clients = numbers(flatten(one).double().norm() for one in (after.control, *corrections))
        return {"control_norm": control, "correction_norm": of_clients}

    @property
    def traits(self) -> Traits:
        return Traits(extra_passes=1 if self.option == "I" else 0)
