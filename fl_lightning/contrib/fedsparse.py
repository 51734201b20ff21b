"""FedSparse: clients learn which hidden units to keep; closed ones are neither computed with nor sent.

    prior      z_j ~ Bern(theta_j),  weights of unit j | z_j = 1 ~ N(w_j, 1/lam),  | z_j = 0 ~ N(0, 1/lam2), lam2 >> lam
    posterior  z_j ~ Bern(pi_j), weights of unit j = v_j if z_j = 1, and 0 otherwise
    P = (1/m_n) [ lam/2 sum_j pi_j |v_j - w_j|^2 + lam0 sum_j |j| pi_j
                  - sum_j (pi_j ln theta_j + (1 - pi_j) ln(1 - theta_j)) ]          lam0 = 1/2 ln(lam2/lam)
    theta_j <- sum_n p_n z_nj,   w_j <- sum_n p_n z_nj v_nj / sum_n p_n z_nj

|j| is the number of weights of unit j, m_n that of the client's samples: the likelihood of the derivation is a sum over
them, ours their mean. z is a hard-concrete gate with log-odds a (hard_concrete.py), drawn anew in every step and
trained with the weights; pi_j = P(z_j != 0). This is hard EM: the entropy of z is left out. Weights without a gate
(biases, the output layer) have pi = 1.

Louizos, Reisser, Soriaga, Welling: An Expectation-Maximization Perspective on Federated Learning, 2021.

No code was published. Choices of ours:
- the objective is derived from the model above;
- p_n follows `federation.weighting`; the paper's is uniform;
- a unit whose theta is below `threshold` is not sent: the client starts it at zero weights;
- where every client has closed a unit, its weights stay as they were.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning import streams
from fl_lightning.contrib.hard_concrete import Gated, log_odds_of, per_unit, probability_open, split, weight_of
from fl_lightning.errors import require
from fl_lightning.method import Cohort, Context, CountsTraffic, Local, Method, OwnNetwork, Server, Traits
from fl_lightning.params import Params, average, count, numbers, weighted_sum, zip_map
from fl_lightning.penalty import Penalty
from fl_lightning.training import Training, require_sgd

# theta never reaches 0 or 1 in a logarithm.
CERTAIN = 1e-3


class State(NamedTuple):
    """The server's network, gates included, and theta, the probability of each gate to be open."""

    params: Params
    theta: Params


class Report(NamedTuple):
    """The client's weights v, zero where closed, and its gates: z, or pi."""

    weights: Params
    gates: Params


@dataclass(frozen=True)
class SpikeAndSlab(Penalty):
    """P of the formulas above.

    Attributes:
        centre: w.
        theta: The prior probability of every gate, by the gate's name; without gates the penalty is FedProx's.
        strength: lam.
        cost: lam0.
        samples: m_n.
        scale: a per unit of the gates' parameters.
    """

    centre: Params
    theta: Params
    strength: float
    cost: float
    samples: float
    scale: float

    def value(self, params: Params) -> Tensor:
        gated = {weight_of(gate): gate for gate in self.theta}
        total = torch.zeros((), dtype=next(iter(params.values())).dtype, device=next(iter(params.values())).device)
        for name, centre in self.centre.items():
            if name not in gated:
                total = total + self.strength / 2 * (params[name] - centre).square().sum()
        for gate in self.theta:
            total = total + (self._open(params, gate) * self._price(params, gate)).sum()
            total = total - torch.log1p(-self._prior(gate)).sum()
        return total / self.samples

    def grad(self, params: Params) -> Params:
        gated = {weight_of(gate): gate for gate in self.theta}
        slopes = {}
        for name, value in params.items():
            if name in self.centre:
                slope = (value - self.centre[name]) * (self.strength / self.samples)
                slopes[name] = slope * per_unit(self._open(params, gated[name]), value) if name in gated else slope
            elif name in self.theta:
                pi = self._open(params, name)
                slopes[name] = pi * (1 - pi) * self._price(params, name) * (self.scale / self.samples)
            else:
                slopes[name] = torch.zeros_like(value)
        return slopes

    def _open(self, params: Params, gate: str) -> Tensor:
        return probability_open(self.scale * params[gate])

    def _prior(self, gate: str) -> Tensor:
        return _likely(self.theta[gate])

    def _price(self, params: Params, gate: str) -> Tensor:
        """What an open gate costs beyond a closed one: the distance, the weights, and the prior against it."""
        offset = (params[weight_of(gate)] - self.centre[weight_of(gate)]).flatten(1)
        return self.strength / 2 * offset.square().sum(1) + self.cost * offset.shape[1] - torch.logit(self._prior(gate))


@dataclass(frozen=True)
class FedSparse(Method, OwnNetwork, CountsTraffic):
    """Federated learning of a sparse network: hidden units that do not pay for themselves are closed and not sent.

    Attributes:
        strength: Precision of the clients' weights around the server's (lam), in units of a single sample: lam / m_n
            is FedProx's mu.
        cost: What each weight of an open unit costs (lam0), in units of the log-likelihood of a single sample.
        theta: Probability of every gate to be open before round 1; 1 leaves all gates open for good.
        threshold: Units with a smaller theta are not sent.
        gates: What clients send of their gates: sample draws them as bits, mean sends their probabilities.
        revive: Whether a unit that is no longer sent may come back, when enough clients open it.
        gate_lr: Learning rate of the gates' log-odds, relative to training.lr.
    """

    display_name: ClassVar[str] = "FedSparse"
    version: ClassVar[int] = 2

    strength: float = 0.1
    cost: float = 0.1
    theta: float = 0.95
    threshold: float = 0.1
    gates: Literal["sample", "mean"] = "sample"
    revive: bool = True
    gate_lr: float = 10.0

    def __post_init__(self) -> None:
        for name in ("strength", "cost"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"method.{name} must be finite and >= 0, got {value}")
        require(0 < self.theta <= 1, f"method.theta must lie in (0, 1], got {self.theta}")
        require(0 <= self.threshold < 1, f"method.threshold must lie in [0, 1), got {self.threshold}")
        require(0 < self.gate_lr < math.inf, f"method.gate_lr must be finite and > 0, got {self.gate_lr}")

    def network(self, module: nn.Module) -> nn.Module:
        start = (
            math.inf if self.theta == 1 else float(log_odds_of(_likely(torch.tensor(self.theta, dtype=torch.float64))))
        )
        return Gated(module, start, self._scale)

    def check(self, training: Training, server: Server) -> None:
        if self.gate_lr != 1 and self.theta < 1:
            why = f"method.gate_lr {self.gate_lr:g} makes gates learn faster through the size of their gradients"
            require_sgd(training, why, "set --method.gate_lr 1, or --training.optimiser sgd")

    def init(self, params: Params, num_clients: int) -> State:
        return State(params, zip_map(lambda gate: torch.full_like(gate, self.theta), split(params)[1]))

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        start = _closed(state.params, zip_map(lambda theta: theta >= self.threshold, state.theta))
        samples = torch.tensor([cohort.server.sizes[n] for n in cohort.members], dtype=torch.float64)
        return Context(start, state.theta, samples)

    def frozen(self, context: Context) -> frozenset[str]:
        return frozenset(context.shared) if self.theta == 1 else frozenset()

    def penalty(self, context: Context) -> Penalty:
        theta = {} if self.theta == 1 else context.shared
        weights = split(context.start)[0]
        return SpikeAndSlab(weights, theta, self.strength, self.cost, float(context.own), self._scale)

    def report(self, local: Local, context: Context) -> Report:
        weights, parameters = split(local.params)
        if self.theta == 1:
            return Report(weights, context.shared)
        gates = zip_map(lambda a: probability_open((self._scale * a).double()), parameters)
        if self.gates == "mean":
            gates = zip_map(lambda pi: torch.where(pi < self.threshold, 0.0, pi), gates)
        else:
            stream = streams.generator(local.plan.seed, "fedsparse gates", local.plan.round, local.client)
            gates = zip_map(lambda pi: torch.bernoulli(pi.cpu(), generator=stream).to(pi.device), gates)
        gates = zip_map(lambda gate, a: gate.to(a.dtype), gates, parameters)
        return Report(_closed(weights, zip_map(lambda gate: gate > 0, gates)), gates)

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        theta = weighted_sum((report.gates for report in reports), cohort.weights)
        weights = average(split(state.params)[0], [report.weights for report in reports], cohort.weights)
        parameters = {}
        for gate, opened in theta.items():
            name = weight_of(gate)
            weights[name] = _mean_of_open(state.params[name], reports, name, gate, cohort.weights)
            if not self.revive:
                theta[gate] = torch.where(state.theta[gate] < self.threshold, 0.0, opened)
            parameters[gate] = (
                state.params[gate] if self.theta == 1 else log_odds_of(_likely(theta[gate])) / self._scale
            )
        params = {name: (weights | parameters)[name].to(value.dtype) for name, value in state.params.items()}
        return State(params, zip_map(lambda new, old: new.to(old.dtype), theta, state.theta))

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        weights = split(after.params)[0]
        number, gates = count(weights), count(after.theta)
        opened = zip_map(lambda theta: theta >= self.threshold, after.theta)
        return {
            "density": _number_of_open(weights, opened) / number,
            "units_open": sum(numbers(is_open.sum() for is_open in opened.values())) / gates,
            "client_density": [
                _number_of_open(weights, zip_map(lambda gate: gate > 0, report.gates)) / number for report in reports
            ],
        }

    def traffic(self, message: Any) -> float:
        """Weights of open units alone; theta or pi are numbers, drawn gates are bits."""
        sent, buffers = message
        if isinstance(sent, Context):
            weights, gates = split(sent.start)[0], sent.shared
            opened = zip_map(lambda theta: theta >= self.threshold, gates)
            return _number_of_open(weights, opened) + count((gates, buffers))
        opened = zip_map(lambda gate: gate > 0, sent.gates)
        packed = math.ceil(count(sent.gates) / 8) / 4 if self.gates == "sample" else count(sent.gates)
        return _number_of_open(sent.weights, opened) + packed + count(buffers)

    @property
    def traits(self) -> Traits:
        return Traits(one_by_one=True)  # chunks of clients would draw other gates than the same clients one by one

    @property
    def _scale(self) -> float:
        return math.sqrt(self.gate_lr)


def _likely(theta: Tensor) -> Tensor:
    return theta.clamp(CERTAIN, 1 - CERTAIN)


def _closed(params: Params, opened: Params) -> Params:
    """The parameters with zeros for the weights of closed units."""
    masked = {
        weight_of(gate): torch.where(per_unit(is_open, params[weight_of(gate)]), params[weight_of(gate)], 0.0)
        for gate, is_open in opened.items()
    }
    return params | masked


def _number_of_open(weights: Params, opened: Params) -> int:
    """How many weights there are outside closed units."""
    sizes = [weights[weight_of(gate)][0].numel() for gate in opened]
    closed = numbers((~is_open).sum() for is_open in opened.values())
    return count(weights) - int(sum(size * number for size, number in zip(sizes, closed, strict=True)))


def _mean_of_open(old: Tensor, reports: Sequence[Report], name: str, gate: str, weights: Sequence[float]) -> Tensor:
    """w_j = sum_n p_n z_nj v_nj / sum_n p_n z_nj, or the old value where no client has the unit."""
    total, base = torch.zeros_like(old, dtype=torch.float64), old.double()
    share = torch.zeros_like(reports[0].gates[gate], dtype=torch.float64)
    for report, weight in zip(reports, weights, strict=True):
        opened = report.gates[gate].double() * weight
        total += per_unit(opened, old) * (report.weights[name].double() - base)
        share += opened
    return base + total / per_unit(share.clamp(min=1e-8), old)
