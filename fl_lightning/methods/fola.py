"""FOLA, federated online Laplace approximation: Gaussian-product aggregation, a prior loss, an online Fisher.

    J_n(theta) = L_n(theta) + (strength / 2) (theta - mu_S)^T Lambda_S (theta - mu_S)
    F_n        = (1/E) sum_t (b_t / m_n) g_t^2                      g_t: gradient of L_n on batch t, before step t
    Lambda_n   = F_n / r + ((r - 1) / r) Lambda_S
    mu_S      <- sum_n p_n (Lambda_n + gamma) mu_n / sum_n p_n (Lambda_n + gamma)
    Lambda_S  <- sum_n p_n Lambda_n

Liu, Jiang, Zheng, Chen, Qi, Huang, Shao: A Bayesian Federated Learning Framework with Online Laplace Approximation,
TPAMI 2023.

Where the paper's equations, its algorithm and its published code disagree, the defaults are:
- the prior loss has a real gradient: the published code builds it from detached tensors, so that its strength is inert
  (`detached_prior` emulates that);
- squared minibatch gradients, as algorithm and code do: they cost nothing, but are about B times smaller than the
  per-sample squares of the equations (`fisher`);
- the mean over steps, as in the equations: a sum changes the scale of strength and damping with E or the number of
  steps (`normalisation`);
- Lambda_S starts at zero and gamma is added only where it is used: any initial value is erased in round 1, because
  (r - 1)/r = 0;
- gamma is added on both sides of the product, so that identical clients give an identical server: in the denominator
  alone, as in the code, it shrinks every weight in every round (`damping_place`);
- gamma is relative to the mean precision, because the scale of the Fisher depends on model, batch size and data
  (`damping_mode`);
- gamma is no part of the prior loss: it would be a FedProx term of strength * gamma (`damping_in_prior`).

With `curvature_form` full, F_n and Lambda_n are d x d matrices, F_n = (1/E) sum_t (b_t / m_n) C(theta_t; batch_t) with
C the Hessian of softmax regression, or the Gauss-Newton matrix of another network, and the server solves

    (sum_n p_n Lambda_n + gamma I) mu_S = sum_n p_n (Lambda_n + gamma I) mu_n

With e_full, F_n is the vector of that matrix's eigenvalues, used as if it were a diagonal.

With `cavity`, what the server says to a client leaves the client's own contribution out, as expectation propagation
does. With the slopes c_n of the clients' losses, c = sum_n q_n c_n (SCAFFOLD's control variates, `slopes.py`),

    J_n(theta) = L_n(theta) + <c - c_n, theta> + (strength / 2) (theta - mu_S)^T Lambda_S (theta - mu_S)     r > 1
    c_n       <- c_n - c + (mu_S - mu_n) / (K_n lr)      limited, see `slopes.limited`
    mu_S      <- mu_S + sum_n p_n (mu_n - mu_S)          r > 1; in round 1 the product

Each client then aims at the optimum of all: precisions, which say whose optimum to believe where, weigh the models in
round 1 alone. On quadratic losses the optimum of all, with its slopes, is a fixed point for every strength, which it is
not without the cavity. With strength 0, aggregation average and no limit this is SCAFFOLD.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from fl_lightning import slopes
from fl_lightning.batching import couples_samples
from fl_lightning.curvature import form as curvature_form
from fl_lightning.curvature.e_full import EigenOrder
from fl_lightning.curvature.fisher import FisherKind, diagonal_fisher
from fl_lightning.curvature.form import MATRIX, Form
from fl_lightning.errors import require
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.form import Gaussian
from fl_lightning.gaussian.full import Full, largest_eigenvalue
from fl_lightning.gaussian.prior import PriorLoss
from fl_lightning.gaussian.product import product
from fl_lightning.gaussian.similarity import cosines
from fl_lightning.method import Cohort, Context, Local, Method, Server, Step
from fl_lightning.params import Params, average, cast_like, count, flatten, weighted_sum, zeros, zip_map
from fl_lightning.penalty import Detached, Linear, Penalty, Quadratic, Sum, overshoot_advice
from fl_lightning.slopes import Slopes
from fl_lightning.task import Weights
from fl_lightning.training import Training


class State(NamedTuple):
    """The global posterior N(mu_S, Lambda_S^-1).

    Attributes:
        params: mu_S.
        precision: Lambda_S: named like the parameters, or one matrix.
        raises: How often the damping of a full product had to be multiplied by 10; nothing for the diagonal forms.
        slopes: c and c_n, with the cavity.
    """

    params: Params
    precision: Params
    raises: torch.Tensor | tuple[()] = ()
    slopes: Slopes | tuple[()] = ()


class Shared(NamedTuple):
    """What is sent beside the model: Lambda_S, the round and, with the cavity, c."""

    precision: Params
    round: int
    slope: Params | tuple[()] = ()


# The models after every step, flat: full curvature is taken after training, at the models along its path.
Path = tuple[torch.Tensor, ...]


class Report(NamedTuple):
    """The local posterior N(mu_n, Lambda_n^-1) and, with the cavity, the change of c_n."""

    params: Params
    precision: Params
    change: Params | tuple[()] = ()


@dataclass(frozen=True)
class Fola(Method):
    """Bayesian FL: clients send Gaussian posteriors, the server multiplies them and sends the product as prior.

    Attributes:
        aggregation: How models are combined: product of Gaussians, or plain average (with strength > 0: FedAvg with
            the prior loss).
        strength: Weight of the prior loss (lambda); 0 switches it off. Its scale depends on `normalisation`, `fisher`
            and `curvature_form`: full curvature is larger than squared minibatch gradients, about by the batch size.
        curvature: Fisher accumulated along the local path (online), or taken once at its end (offline; then without
            memory of earlier rounds).
        fisher: Squared gradients of minibatches, or of single samples; for the diagonal form.
        curvature_form: Precision as a diagonal (Fisher), as a full matrix (Hessian or Gauss-Newton), or e_full, the
            eigenvalues of the full one used as a diagonal. A full matrix takes memory with the square of the model.
        eigen_order: Which eigenvalue e_full gives to which parameter: in ascending order, as eigensolvers return them,
            or rank_matched, the largest to the parameter with the largest curvature.
        damping: Added to every precision where posteriors are multiplied (gamma).
        damping_mode: Damping relative to the mean precision, or absolute.
        damping_place: Damping in numerator and denominator of the product, or, as in the published code, in the
            denominator only.
        damping_in_prior: Whether the prior loss uses Lambda_S + gamma instead of Lambda_S.
        normalisation: Online Fisher as the mean over steps, the sum over epochs (published code), or the sum over
            steps (the paper's algorithm).
        round_scaling: Lambda_n = F/r + (r-1)/r Lambda_S (paper), or F + Lambda_S with 1/r in the prior loss (code).
        detached_prior: Emulate the published code, whose prior loss has no gradient.
        cavity: From round 2 on, correct each client by what the others' losses do and its own does not, and average.
        cavity_limit: How many times as far from the mean as the others' a client's slope may be; inf is no limit.
    """

    aggregation: Literal["product", "average"] = "product"
    strength: float = 100.0
    curvature: Literal["online", "offline"] = "online"
    fisher: FisherKind = "minibatch"
    curvature_form: Form = "diagonal"
    eigen_order: EigenOrder = "ascending"
    damping: float = 1e-2
    damping_mode: Literal["relative", "absolute"] = "relative"
    damping_place: Literal["both", "denominator"] = "both"
    damping_in_prior: bool = False
    normalisation: Literal["mean", "sum_epochs", "sum_steps"] = "mean"
    round_scaling: Literal["paper", "code"] = "paper"
    detached_prior: bool = False
    cavity: bool = False
    cavity_limit: float = 5.0

    def __post_init__(self) -> None:
        require(0 <= self.strength < float("inf"), f"method.strength must be finite and >= 0, got {self.strength}")
        require(0 <= self.damping < float("inf"), f"method.damping must be finite and >= 0, got {self.damping}")
        require(self.cavity_limit > 0, f"method.cavity_limit must be > 0, got {self.cavity_limit}")

    def check(self, training: Training, server: Server) -> None:
        if self.cavity:
            slopes.check("method.cavity", training)
        form = self.curvature_form
        require(
            self.eigen_order == "ascending" or form == "e_full",
            f"method.eigen_order {self.eigen_order} is for --method.curvature_form e_full, got {form}; leave one out",
        )
        require(
            self.fisher == "minibatch" or form == "diagonal",
            f"method.fisher {self.fisher} estimates a diagonal, and --method.curvature_form {form} uses none; "
            "leave one out",
        )
        require(
            self.fisher == "minibatch" or not couples_samples(server.task, server.holdout),
            "method.fisher per_sample needs a model whose samples do not depend on each other, as they do with "
            "BatchNorm; use --method.fisher minibatch or another model",
        )
        require(
            self.damping_place == "both" or form != "full",
            "method.damping_place denominator works element by element; use --method.curvature_form diagonal or e_full",
        )
        if form != "diagonal":
            curvature_form.check(form, self.curvature == "online", training, server)

    def init(self, params: Params, num_clients: int) -> State:
        raises = torch.zeros((), dtype=torch.long) if self.curvature_form == "full" else ()
        memory = Slopes.blank(params) if self.cavity else ()
        return State(params, curvature_form.nothing(self.curvature_form, params), raises, memory)

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        if not isinstance(state.slopes, Slopes):
            return Context(state.params, Shared(state.precision, cohort.round))
        shared = Shared(state.precision, cohort.round, state.slopes.mean)
        return Context(state.params, shared, state.slopes.clients.stacked(cohort.members))

    def penalty(self, context: Context) -> Penalty | None:
        prior = self._prior_loss(context)
        if not self.cavity or context.shared.round == 1:  # all slopes are still equal
            return prior
        others = Linear(zip_map(torch.sub, context.shared.slope, context.own))
        return others if prior is None else Sum(others, prior)

    def _prior_loss(self, context: Context) -> Penalty | None:
        prior: Shared = context.shared
        if self.strength == 0 or prior.round == 1:  # Lambda_S is still zero
            return None
        strength = self._strength_in(prior.round)
        gamma = self._gamma_in_prior(prior.precision)
        pull: Penalty
        if self.curvature_form == "full":
            pull = PriorLoss(Full(context.start, prior.precision[MATRIX], gamma), strength)
        else:
            pull = Quadratic(context.start, zip_map(lambda a: (a + gamma) * strength, prior.precision))
        return Detached(pull) if self.detached_prior else pull

    def trace(self, context: Context) -> Params | Path:
        if self.one_by_one:
            return ()
        return zeros(context.start) if self.observes else {}

    def observe(self, trace: Params | Path, step: Step) -> Params | Path:
        if isinstance(trace, tuple):
            return (*trace, flatten(step.params))
        share = 1.0 if self.normalisation == "sum_steps" else step.fraction
        if step.squares is not None:
            return zip_map(lambda t, s: t + s * share, trace, step.squares)
        if isinstance(share, float):
            return zip_map(lambda t, g: torch.addcmul(t, g, g, value=share), trace, step.grad)
        return zip_map(lambda t, g: t + g.square() * share, trace, step.grad)

    def report(self, local: Local, context: Context) -> Report:
        posterior = self._posterior(local, context)
        if not self.cavity:
            return posterior
        return posterior._replace(change=slopes.change_along_path(local, context.start, context.shared.slope))

    def _posterior(self, local: Local, context: Context) -> Report:
        curvature = self._curvature(local, context.start)
        if self.curvature == "offline":
            return Report(local.params, curvature)
        prior: Shared = context.shared
        scale = 1 / local.num_epochs if self.normalisation == "mean" else 1.0
        r = prior.round
        own, earlier = (scale, 1.0) if self._accumulates else (scale / r, (r - 1) / r)
        if self.curvature_form == "full":  # in place on a matrix that nobody else holds: copies would take gigabytes
            matrix = curvature[MATRIX].mul_(own)
            return Report(local.params, {MATRIX: matrix.add_(prior.precision[MATRIX], alpha=earlier)})
        if self._accumulates:
            precision = zip_map(lambda f, a: f * scale + a, curvature, prior.precision)
        else:
            precision = zip_map(lambda f, a: f * own + a * earlier, curvature, prior.precision)
        return Report(local.params, precision)

    def _curvature(self, local: Local, start: Params) -> Params:
        """F_n of this round; online without the factor 1/E."""
        if self.curvature_form == "diagonal":
            if self.curvature == "online":
                trace: Params = local.trace
                return trace
            weights = Weights(local.params, local.buffers)
            return diagonal_fisher(local.task, weights, local.data, self.fisher, local.training.batch_size)
        if self.curvature == "offline":
            return curvature_form.at_end(self.curvature_form, self.eigen_order, local)
        equal = self.normalisation == "sum_steps"
        return curvature_form.along_path(self.curvature_form, self.eigen_order, local, start, local.trace, equal)

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        after = self._merged(state, cohort, reports)
        if not isinstance(state.slopes, Slopes):
            return after
        changes = [report.change for report in reports if isinstance(report.change, dict)]
        changes = slopes.limited(state.slopes, cohort, changes, self.cavity_limit)
        return after._replace(slopes=state.slopes.renewed(cohort, changes))

    def _merged(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        averaged = self._averages(cohort.round) or (len(reports) == 1 and self.damping_place == "both")
        if self.curvature_form == "full" and not averaged:
            gamma = self._common_gamma(cohort, reports)
            combined = Full.product([Full(r.params, r.precision[MATRIX]) for r in reports], cohort.weights, gamma)
            return State(combined.mean, {MATRIX: combined.matrix}, torch.tensor(combined.raises))
        precision = weighted_sum((report.precision for report in reports), cohort.weights)
        gamma = self._gamma(precision)
        if averaged:
            params = average(state.params, [report.params for report in reports], cohort.weights)
        else:
            experts = [Diagonal(report.params, report.precision) for report in reports]
            params = product(experts, cohort.weights, gamma if self.damping_place == "both" else 0.0).mean
            if self.damping_place == "denominator":
                params = zip_map(lambda m, a: (m * _ratio(a, a + gamma)).to(m.dtype), params, precision)
        return State(params, cast_like(precision, state.precision), state.raises)

    def posteriors(self, cohort: Cohort, reports: Sequence[Report]) -> list[Gaussian]:
        gamma = self._common_gamma(cohort, reports) if self.damping_place == "both" else 0.0
        return [
            curvature_form.gaussian(self.curvature_form, report.params, report.precision).damped(gamma)
            for report in reports
        ]

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        form = self.curvature_form
        server = flatten(curvature_form.diagonal_of(form, after.precision)).double()
        levels = torch.tensor([0.0, 0.25, 0.5, 0.75, 1.0], dtype=torch.float64)
        quantiles = _quantiles(server, levels)
        diagonals = [curvature_form.diagonal_of(form, report.precision) for report in reports]
        shares = [float(flatten(diagonal).double().sum()) for diagonal in diagonals]
        shares = [w * share for w, share in zip(cohort.weights, shares, strict=True)]
        total = sum(shares)
        numbers: dict[str, float | list[float]] = {
            f"precision_{name}": value
            for name, value in zip(("min", "q25", "median", "q75", "max"), quantiles, strict=True)
        }
        numbers["precision_mean"] = float(server.mean())
        numbers["precision_share"] = [share / total if total > 0 else 0.0 for share in shares]
        if form == "full":
            numbers["damping_raised"] = float(after.raises) if isinstance(after.raises, torch.Tensor) else 0.0
        else:
            precision = weighted_sum(diagonals, cohort.weights)
            shifted = not self._averages(cohort.round)
            numbers["weight_shift"] = self._weight_shift(reports, precision, cohort.weights) if shifted else 0.0
        if isinstance(before.slopes, Slopes):
            changes = [report.change for report in reports if isinstance(report.change, dict)]
            numbers["slope_excess"] = slopes.excesses(before.slopes, cohort, changes)
        if len(reports) > 1:
            names = ("precision_cosine", "precision_cosine_minmax")
            numbers |= dict(zip(names, cosines([report.precision for report in reports]), strict=True))
        # Of the next round, whose prior this is; a detached prior takes no step.
        strength = 0.0 if self.detached_prior else self._strength_in(cohort.round + 1)
        largest = largest_eigenvalue(after.precision[MATRIX]) if form == "full" and strength else quantiles[-1]
        numbers["prior_stability"] = cohort.training.lr * strength * (largest + self._gamma_in_prior(after.precision))
        return numbers

    def advice(self, metrics: Mapping[str, float]) -> str:
        return overshoot_advice(metrics)

    @property
    def needs_squares(self) -> bool:
        return self.fisher == "per_sample" and self.curvature == "online"

    @property
    def observes(self) -> bool:
        return self.curvature == "online"

    @property
    def one_by_one(self) -> bool:
        return self.curvature_form != "diagonal" and self.curvature == "online"

    @property
    def extra_passes(self) -> int:
        return 0 if self.curvature == "online" and self.curvature_form == "diagonal" else 1

    def _averages(self, round: int) -> bool:
        """Whether models are averaged, because the user says so or because they all aim at the same optimum."""
        return self.aggregation == "average" or (self.cavity and round > 1)

    @property
    def _accumulates(self) -> bool:
        return self.round_scaling == "code" and self.curvature == "online"

    def _strength_in(self, round: int) -> float:
        """The weight of the prior loss in a round."""
        return self.strength / round if self._accumulates else self.strength

    def _gamma(self, precision: Params) -> float:
        """The damping in absolute terms, relative to the mean diagonal of a precision."""
        if self.damping_mode == "absolute":
            return self.damping
        diagonal = curvature_form.diagonal_of(self.curvature_form, precision)
        total = sum(float(value.double().sum()) for value in diagonal.values())
        return self.damping * total / count(diagonal)

    def _gamma_in_prior(self, precision: Params) -> float:
        """What the prior loss adds to a precision."""
        return self._gamma(precision) if self.damping_in_prior else 0.0

    def _common_gamma(self, cohort: Cohort, reports: Sequence[Report]) -> float:
        """The damping of the product of these posteriors: their diagonals are enough to know it."""
        gammas = (self._gamma(report.precision) for report in reports)
        return sum(weight * gamma for weight, gamma in zip(cohort.weights, gammas, strict=True))

    def _weight_shift(self, reports: Sequence[Report], precision: Params, weights: Sequence[float]) -> float:
        """Mean over parameters of the l1 distance of the effective weights p_n Lambda_n / sum from p_n.

        It fades like 1/r, since all clients share the term of Lambda_S: most of the product's effect is in the first
        rounds.
        """
        gamma = self._gamma(precision) if self.damping_place == "both" else 0.0
        shift = 0.0
        for report, weight in zip(reports, weights, strict=True):
            for name, total in precision.items():
                ratio = _ratio(report.precision[name].double().add(gamma), total + gamma)
                shift += weight * float(ratio.sub_(1.0).abs_().sum())
        return shift / count(precision)


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """The quotient part / whole, and 1 where both are zero: without any precision a client counts as in an average."""
    return torch.where(whole > 0, part / whole, 1.0)


def _quantiles(values: torch.Tensor, levels: torch.Tensor) -> list[float]:
    ordered = values.sort().values
    places = (levels * (len(ordered) - 1)).round().long()
    result: list[float] = ordered[places].tolist()
    return result
