"""FedOpt: the mean update of the clients is a gradient for an optimiser of the server.

    Delta = sum_n p_n (y_n - x)        y_n = SGD on L_n from x

    u <- beta_1 u - Delta                     x <- x - eta_s u                             sgd (FedAvgM)
    m <- beta_1 m + (1 - beta_1) Delta        x <- x + eta_s m / (sqrt(v) + tau)           the others, with
    v <- v + Delta^2                                                                       adagrad
    v <- beta_2 v + (1 - beta_2) Delta^2                                                   adam
    v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)                                        yogi

Reddi, Charles, Zaheer, Garrett, Rush, Konecny, Kumar, McMahan: Adaptive Federated Optimization, ICLR 2021;
Hsu, Qi, Brown: Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification, 2019.

Every method of the family is a preset of this file: fedavgm, fedadagrad, fedadam, fedyogi.

Where published codes differ:
- v starts at tau^2 as in the paper; the authors' code has Keras' optimisers, where it is 0 (`second_moment zero`), with
  Keras' beta_2 of 0.999 instead of 0.99 and with a correction of the bias (`bias_correction`), which the paper lacks;
- v adds up squares of the mean update; FedExP's code of FedAdam squares the momentum, which is smaller and smoother;
- tau is outside the root, as in the paper; FedExP's code has it inside;
- momentum of sgd adds whole updates, as Hsu et al. do; it steps 1 / (1 - beta_1) times as far in the long run, whereas
  the m of the others is an average, and steps no further.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.method import Cohort, Context, Local, Method
from fl_lightning.params import Params, average, cast_like, flatten, mean_update, zeros, zip_map


def at_rest(params: Params, momentum: float) -> Params:
    """The velocity u before the first round; without momentum there is none."""
    return zeros(params) if momentum else {}


def momentum_step(
    params: Params, velocity: Params, gradient: Params, momentum: float, rate: float
) -> tuple[Params, Params]:
    """The server's model and velocity after a step of its momentum, computed in float64 and rounded once.

        u <- momentum u + s        x <- x - rate u        s: from where the clients would take the server back to x

    Args:
        params: x.
        velocity: u.
        gradient: s in float64, such as sum_n p_n (x - y_n).
        momentum: How much of the velocity stays, at least 0 and less than 1.
        rate: Step size.
    """
    faster = zip_map(lambda u, s: s.add(u.double(), alpha=momentum), velocity, gradient)
    moved = zip_map(lambda x, u: x.double().sub(u, alpha=rate), params, faster)
    return cast_like(moved, params), cast_like(faster, velocity)


class State(NamedTuple):
    """The server's model x, its velocity u or mean update m, and the mean square v; each is empty where unused."""

    params: Params
    velocity: Params
    squares: Params


class Report(NamedTuple):
    """The client's model y_n."""

    params: Params


@dataclass(frozen=True)
class FedOpt(Method):
    """An optimiser of the server, SGD, Adagrad, Adam or Yogi, follows the clients' mean update.

    Attributes:
        optimiser: Optimiser of the server. sgd has one step size for all parameters, the others one for each: a
            parameter that clients change little steps as far as one that they change much.
        server_lr: Step size of the server (eta_s). For sgd 1 takes the mean of the models. For the others it is about
            how far a weight moves in a round, so tune it together with training.lr.
        server_momentum: Decay rate of the momentum (beta_1); 0 switches it off.
        beta2: Decay rate of the squared updates in adam and yogi (beta_2).
        tau: Degree of adaptivity (tau): parameters whose updates are much smaller step in proportion to them, as with
            sgd.
        second_moment: Where v starts: at tau^2 as in the paper, or at zero as in Keras.
        bias_correction: Divide m and v by 1 - beta^r, as Keras' adam does and the paper does not; for adam and yogi.
    """

    display_name: ClassVar[str] = "FedOpt"

    optimiser: Literal["sgd", "adagrad", "adam", "yogi"] = "adam"
    server_lr: float = 0.03
    server_momentum: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    second_moment: Literal["tau_squared", "zero"] = "tau_squared"
    bias_correction: bool = False

    def __post_init__(self) -> None:
        require(0 < self.server_lr < math.inf, f"method.server_lr must be finite and > 0, got {self.server_lr}")
        require(0 <= self.server_momentum < 1, f"method.server_momentum must be in [0, 1), got {self.server_momentum}")
        require(0 <= self.beta2 < 1, f"method.beta2 must be in [0, 1), got {self.beta2}")
        require(0 < self.tau < math.inf, f"method.tau must be finite and > 0, got {self.tau}")
        require(
            not self.bias_correction or self.optimiser in ("adam", "yogi"),
            "method.bias_correction is for --method.optimiser adam or yogi, whose averages start at zero, got "
            f"{self.optimiser}; remove it, or use --method.optimiser adam",
        )

    def init(self, params: Params, num_clients: int) -> State:
        first = self.tau**2 if self.second_moment == "tau_squared" else 0.0
        squares = zip_map(lambda p: torch.full_like(p, first), params) if self._adapts else {}
        return State(params, at_rest(params, self.server_momentum), squares)

    def report(self, local: Local, context: Context) -> Report:
        return Report(local.params)

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        models = [report.params for report in reports]
        if not self._adapts and not self.server_momentum:
            return State(average(state.params, models, cohort.weights, self.server_lr), {}, {})
        update = mean_update(state.params, models, cohort.weights)
        if not self._adapts:
            gradient = zip_map(torch.neg, update)
            moved = momentum_step(state.params, state.velocity, gradient, self.server_momentum, self.server_lr)
            return State(*moved, {})
        beta = self.server_momentum
        mean = zip_map(lambda m, new: m.double() * beta + new * (1 - beta), state.velocity, update) if beta else update
        squares = zip_map(lambda v, new: self._renewed(v.double(), new.square()), state.squares, update)
        params = zip_map(lambda x, m, v: x.double() + self._step(m, v, cohort.round), state.params, mean, squares)
        velocity = cast_like(mean, state.velocity) if beta else {}
        return State(cast_like(params, state.params), velocity, cast_like(squares, state.squares))

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        update = flatten(mean_update(before.params, [report.params for report in reports], cohort.weights)).norm()
        step = (flatten(after.params).double() - flatten(before.params).double()).norm()
        return {"update_norm": float(update), "server_step": float(step / update) if update else 0.0}

    @property
    def _adapts(self) -> bool:
        """Whether every parameter has a step size of its own."""
        return self.optimiser != "sgd"

    def _renewed(self, v: Tensor, square: Tensor) -> Tensor:
        if self.optimiser == "adagrad":
            return v + square
        if self.optimiser == "adam":
            return v * self.beta2 + square * (1 - self.beta2)
        return v - square * torch.sign(v - square) * (1 - self.beta2)

    def _step(self, m: Tensor, v: Tensor, round: int) -> Tensor:
        if self.bias_correction:
            m, v = m / (1 - self.server_momentum**round), v / (1 - self.beta2**round)
        return m / (v.sqrt() + self.tau) * self.server_lr
