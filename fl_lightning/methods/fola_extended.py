"""FOLA beyond the paper: precisions by layers, the cavity, a trust region, the published code's choices.

`fola` is the paper on one page; with its settings both methods give the same bits, and runs are recorded as `fola`.

    J_n(theta) = L_n(theta) + (strength / 2) (theta - mu_S)^T Lambda_S (theta - mu_S)
    F_n        = (1/E) sum_t (b_t / m_n) g_t^2                      g_t: gradient of L_n on batch t, before step t
    Lambda_n   = F_n / r + ((r - 1) / r) Lambda_S
    mu_S      <- sum_n p_n (Lambda_n + gamma) mu_n / sum_n p_n (Lambda_n + gamma)
    Lambda_S  <- sum_n p_n Lambda_n

Liu, Jiang, Zheng, Chen, Qi, Huang, Shao: A Bayesian Federated Learning Framework with Online Laplace Approximation,
TPAMI 2023.

Where the paper's equations, its algorithm and its published code disagree, the defaults are:
- the prior loss has a real gradient: the published code builds it from detached tensors, so that lambda is inert
  (`detached_prior` emulates that);
- squared minibatch gradients, as algorithm and code do: they cost nothing, but are about B times smaller than the
  per-sample squares of the equations (`fisher`);
- the mean over steps, as in the equations: a sum changes the scale of lambda and damping with E or the number of
  steps (`normalisation`);
- Lambda_S starts at zero and gamma is added only where it is used: any initial value is erased in round 1, because
  (r - 1)/r = 0;
- gamma is added on both sides of the product, so that identical clients give an identical server: in the denominator
  alone, as in the code, it shrinks every weight in every round (`damping_place`);
- gamma is relative to the mean precision, because the scale of the Fisher depends on model, batch size and data
  (`damping_mode`);
- gamma stays out of the prior loss: it would be a FedProx term of strength * gamma (`damping_in_prior`).

With `curvature_form` full, F_n and Lambda_n are d x d matrices, F_n = (1/E) sum_t (b_t / m_n) C(theta_t; batch_t) with
C the Hessian of softmax regression, or the Gauss-Newton matrix of another network, and the server solves

    (sum_n p_n Lambda_n + gamma I) mu_S = sum_n p_n (Lambda_n + gamma I) mu_n

With `inputs` and `kron`, a layer's weight and bias M = [W, b] have the precision I (x) A_n or G_n (x) A_n, with A_n the
second moments of the layer's inputs (a, 1) and G_n those of the gradients at its outputs; the server solves

    sum_n p_n (G_n + gamma_G I) M_S (A_n + gamma_A I) = sum_n p_n (G_n + gamma_G I) M_n (A_n + gamma_A I)

with G_n = I and gamma_G = 0 for `inputs`, and keeps the product of the mean factors. The factors are recursed over the
rounds one by one.

With e_full, F_n is the vector of that matrix's eigenvalues, used as if it were a diagonal.

With `cavity`, what the server says to a client leaves the client's own contribution out, as expectation propagation
does. With control variates c_n and c = sum_n q_n c_n (`control_variates.py`), the mean gradients of their losses L_n,

    J_n(theta) = L_n(theta) + <c - c_n, theta> + (strength / 2) (theta - mu_S)^T Lambda_S (theta - mu_S)     r > 1
    c_n       <- (1/K_n) sum_t g_t                       limited, see `control_variates.limited`
    mu_S      <- mu_S + sum_n p_n (mu_n - mu_S)          r > 1; in round 1 the product

Each client then aims at the optimum of all: precisions, which weigh the clients' own optima, act on the models in
round 1 alone. On quadratic losses the optimum of all, with its gradients, is a fixed point for every lambda, which it
is not without the cavity. With strength 0 the path says what c_n is, c_n - c + (mu_S - mu_n) / (K_n lr), and with
aggregation average and no limit this is SCAFFOLD.

With `trust`, the damping of a layer (or of all parameters, if the form knows no layers) is doubled until

    ||mu_S - mu_A|| <= trust sqrt(sum_n ||mu_n - mu_A||^2)          mu_A = sum_n p_n mu_n

as far as all clients together have moved: in directions in which the precisions are small, a product may go farther.

With `backtracking`, a client whose J_n has risen goes back towards mu_S until it has not (`backtracked`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.curvature.fisher import FisherKind
from fl_lightning.curvature.full import EigenOrder
from fl_lightning.errors import Diverged, require
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.damping import Merging, Projection, Solver
from fl_lightning.gaussian.diagnostics import diagnostics
from fl_lightning.gaussian.product import merged
from fl_lightning.method import (
    Cohort,
    Context,
    HasPosterior,
    Local,
    Method,
    MethodPosterior,
    ObservesPath,
    Server,
    StateFromNetwork,
    Step,
    Traits,
)
from fl_lightning.methods.parts import control_variates
from fl_lightning.methods.parts.control_variates import ControlVariates, Path
from fl_lightning.methods.parts.curvature_form import FirstLayer, Form, Measuring, Rest
from fl_lightning.methods.parts.forms_by_name import FORMS, FormName, require_suitable
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params, average, zeros, zip_map
from fl_lightning.penalty import SOFTER, Detached, Linear, Penalty, Sum
from fl_lightning.training import Training

# The shortest step is 1/64.
HALVINGS = 6


def require_no_running_statistics(who: str, task: Task) -> None:
    """Raise `UserError` for networks whose loss at a model depends on how training has come there."""
    require(
        all(getattr(module, "running_mean", None) is None for module in task.model.modules()),
        f"{who} does not support BatchNorm, whose running statistics change the loss; set {who} false, or use a model "
        "with GroupNorm or without normalisation",
    )


def backtracked(local: Local, start: Params, penalty: Penalty | None) -> Params:
    """The client's model, nearer to `start` by halves until it is no worse than that.

        y_n <- x + s (y_n - x),   s the largest of 1, 1/2, 1/4, ... with J_n(x + s (y_n - x)) <= J_n(x)

    J_n is what the client has trained on: the mean loss of all its samples, in evaluation mode and without
    augmentation, and its penalty. With a cavity's correction added the last steps of a round may leave a client far
    up: the others' gradient does not end where its own loss saturates. A client whose loss falls, as on a quadratic
    loss, keeps its model. Networks with running statistics, as BatchNorm has, are refused.

    Raises:
        Diverged: If the shortest step, or the start itself, has no loss: the next round would begin where this one did.
    """
    most = reached = _objective(local, start, penalty)
    for halving in range(HALVINGS + 1):
        params = local.params if halving == 0 else _between(start, local.params, 0.5**halving)
        reached = _objective(local, params, penalty)
        if reached <= most:  # never, if it is not a number
            return params
    if math.isnan(most) or not math.isfinite(reached):
        raise Diverged(local.plan.round, local.client)
    return start


def _between(start: Params, end: Params, share: float) -> Params:
    return zip_map(lambda x, y: (x.double() + share * (y.double() - x.double())).to(x.dtype), start, end)


def _objective(local: Local, params: Params, penalty: Penalty | None) -> float:
    task, weights = local.task, Weights(params, local.buffers)
    with task.evaluating():
        total = sum(float(task.loss(weights, x, y)) * len(y) for x, y in local.data.blocks())
    return total / len(local.data) + (0.0 if penalty is None else float(penalty.value(params)))


class State(NamedTuple):
    """The global posterior.

    Attributes:
        posterior: N(mu_S, Lambda_S^-1).
        variates: c and c_n, with the cavity.
    """

    posterior: Gaussian
    variates: ControlVariates | tuple[()] = ()

    @property
    def params(self) -> Params:
        """The global model mu_S."""
        return self.posterior.mean


class Shared(NamedTuple):
    """What is sent beside the model: Lambda_S, without the mean, the round and, with the cavity, c."""

    prior: Gaussian
    round: int
    control: Params | tuple[()] = ()


class Report(NamedTuple):
    """The local posterior N(mu_n, Lambda_n^-1) and, with the cavity, the change of c_n."""

    posterior: Gaussian
    change: Params | tuple[()] = ()


@dataclass(frozen=True)
class FolaExtended(Method, ObservesPath, HasPosterior, StateFromNetwork):
    """FOLA beyond the paper: precisions by layers, cavity, trust region, choices of the published code.

    Attributes:
        aggregation: How models are combined: product of Gaussians, or plain average (with strength > 0: FedAvg with
            the prior loss).
        strength: Weight of the prior loss (lambda); 0 switches it off. Its scale depends on `normalisation`, `fisher`
            and `curvature_form`: full curvature is larger than squared minibatch gradients, about by the batch size.
        curvature: Curvature accumulated along the local path and over the rounds (online), or taken once at its end
            (offline; then without memory of earlier rounds). The forms by layers take it at the end in both cases.
        fisher: Squared gradients of minibatches, or of single samples; where a diagonal is measured.
        curvature_form: Precision as a diagonal (Fisher); by layers: of their inputs (inputs), of inputs and gradients
            (kron), or of the last layer alone (last_layer); as a full matrix (Hessian or Gauss-Newton); or e_full, the
            eigenvalues of the full one used as a diagonal. A full matrix takes memory with the square of the model.
        eigen_order: Which eigenvalue e_full gives to which parameter: in ascending order, as eigensolvers return them,
            or rank_matched, the largest to the parameter with the largest curvature.
        slopes: Labels of kron's gradients: all classes weighted by their probabilities (exact), one label
            drawn from the predictions, or the sample's own label (empirical); auto is exact up to ten classes, else
            sampled.
        first_layer: Whether inputs and kron treat the first layer like the others, or average it, so that no second
            moments of the raw inputs are sent.
        rest: What last_layer does with all other layers: average them, or give them a diagonal precision.
        solver: How kron solves for the mean: conjugate gradients, or factored, each factor for itself, as FedLPA does.
        projection: What kron keeps of a sum of Kronecker products: the product of the mean factors, or the nearest one.
        prior: Prior loss of the forms by layers with the diagonal of their precision, or exact, which costs more than
            the training step itself.
        damping: Added to every precision where posteriors are multiplied (gamma). For kron to the factor of the inputs.
        damping_slopes: Added to kron's factor of the gradients in the same units; null adds damping to the whole
            product of the factors instead.
        damping_mode: Damping relative to the mean precision (by layers: of the layer), or absolute.
        damping_place: Damping in numerator and denominator of the product, or, as in the published code, in the
            denominator only.
        damping_in_prior: Whether the prior loss uses Lambda_S + gamma instead of Lambda_S.
        normalisation: Online Fisher as the mean over steps, the sum over epochs (published code), or the sum over
            steps (the paper's algorithm).
        round_scaling: Lambda_n = F/r + (r-1)/r Lambda_S (paper), or F + Lambda_S with 1/r in the prior loss (code).
        detached_prior: Emulate the published code, whose prior loss has no gradient.
        cavity: From round 2 on, correct each client by what the others' losses do and its own does not, and average.
        cavity_limit: Largest distance of a client's control variate from the mean, in units of the others' distances;
            null sets no limit.
        trust: How far from the average a product may go, in units of the clients' own distances from it; null is any
            distance.
        backtracking: Whether a client whose loss (prior and cavity included) rose in a round goes back by halves; two
            more forward passes over its data, up to eight if it goes back.
    """

    display_name: ClassVar[str] = "FOLA extended"
    version: ClassVar[int] = 2
    revised: ClassVar[Mapping[str, int]] = {"projection=nearest": 2}
    recorded_as: ClassVar[str] = "fola"

    aggregation: Literal["product", "average"] = "product"
    strength: float = 100.0
    curvature: Literal["online", "offline"] = "online"
    fisher: FisherKind = "minibatch"
    curvature_form: FormName = "diagonal"
    eigen_order: EigenOrder = "ascending"
    slopes: Literal["auto", "exact", "sampled", "empirical"] = "auto"
    first_layer: FirstLayer = "same"
    rest: Rest = "average"
    solver: Solver = "cg"
    projection: Projection = "factors"
    prior: Literal["diagonal", "exact"] = "diagonal"
    damping: float = 1e-2
    damping_slopes: float | None = 1.0
    damping_mode: Literal["relative", "absolute"] = "relative"
    damping_place: Literal["both", "denominator"] = "both"
    damping_in_prior: bool = False
    normalisation: Literal["mean", "sum_epochs", "sum_steps"] = "mean"
    round_scaling: Literal["paper", "code"] = "paper"
    detached_prior: bool = False
    cavity: bool = False
    cavity_limit: float | None = 5.0
    trust: float | None = None
    backtracking: bool = False

    def __post_init__(self) -> None:
        require(0 <= self.strength < float("inf"), f"method.strength must be finite and >= 0, got {self.strength}")
        require(0 <= self.damping < float("inf"), f"method.damping must be finite and >= 0, got {self.damping}")
        require(
            self.damping_slopes is None or 0 <= self.damping_slopes < float("inf"),
            f"method.damping_slopes must be finite and >= 0, or null, got {self.damping_slopes}",
        )
        for name in ("cavity_limit", "trust"):
            value = getattr(self, name)
            require(value is None or value > 0, f"method.{name} must be > 0, or null, got {value}")
        require(
            self.trust is None or self.damping_place == "both",
            "method.trust needs --method.damping_place both, got denominator; set --method.trust null or "
            "--method.damping_place both",
        )

    def check(self, training: Training, server: Server) -> None:
        if self.cavity:
            control_variates.check("method.cavity", training)
        if self.backtracking:
            require_no_running_statistics("method.backtracking", server.task)
        strength = 0.0 if self.detached_prior else self.strength
        require_suitable(self.curvature_form, self._form.measuring, self, strength, training, server)

    def init(self, params: Params, num_clients: int) -> State:
        return State(self._form.nothing(params), self._no_control_variates(params))

    def begin(self, params: Params, num_clients: int, task: Task, x: Tensor) -> State:
        return State(self._form.nothing(params, task, x), self._no_control_variates(params))

    def _no_control_variates(self, params: Params) -> ControlVariates | tuple[()]:
        return ControlVariates.blank(params) if self.cavity else ()

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        prior = state.posterior.with_mean({})
        if not isinstance(state.variates, ControlVariates):
            return Context(state.params, Shared(prior, cohort.round))
        own = state.variates.clients.stacked(cohort.members)
        return Context(state.params, Shared(prior, cohort.round, state.variates.mean), own)

    def penalty(self, context: Context) -> Penalty | None:
        own = self._prior_loss(context)
        if not self.cavity or context.shared.round == 1:  # all control variates are still equal
            return own
        others = Linear(zip_map(torch.sub, context.shared.control, context.own))
        return others if own is None else Sum(others, own)

    def _prior_loss(self, context: Context) -> Penalty | None:
        shared: Shared = context.shared
        if self.strength == 0 or shared.round == 1:  # Lambda_S is still zero
            return None
        prior = shared.prior.with_mean(context.start).prior(self.prior == "exact")
        prior_loss = prior.prior_loss(self._strength_in(shared.round), self._gamma_in_prior(prior))
        return Detached(prior_loss) if self.detached_prior else prior_loss

    def path_statistics(self, context: Context) -> Any:
        statistics = self._form.path_statistics(context.start)
        if not self._sums_gradients:
            return statistics
        return Path(() if statistics is None else statistics, zeros(context.start))

    def observe(self, statistics: Any, step: Step) -> Any:
        if not isinstance(statistics, Path):
            return self._form.observe(statistics, step)
        own = self._form.observe(statistics.own, step) if self.curvature == "online" else ()
        return statistics.seen(own, step)

    def report(self, local: Local, context: Context) -> Report:
        path = local.path_statistics
        finished = local._replace(path_statistics=path.own) if isinstance(path, Path) else local
        if self.backtracking:
            finished = finished._replace(params=backtracked(local, context.start, self.penalty(context)))
        posterior = self._posterior(finished, context)
        if isinstance(path, Path):
            return Report(posterior, path.change(local.num_steps, context.own))
        if self.cavity:
            return Report(posterior, control_variates.change_along_path(local, context.start, context.shared.control))
        return Report(posterior)

    def _posterior(self, local: Local, context: Context) -> Gaussian:
        posterior = self._form.measured(local, context.start)
        if self.curvature == "offline":
            return posterior
        shared: Shared = context.shared
        scale, r = self._form.scale(local.num_epochs), shared.round
        own, earlier = (scale, 1.0) if self._accumulates else (scale / r, (r - 1) / r)
        return posterior.over_rounds(own, shared.prior, earlier)

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        posterior = self._combined(state, cohort, [report.posterior for report in reports])
        if not isinstance(state.variates, ControlVariates):
            return State(posterior)
        changes = control_variates.limited(state.variates, cohort, _changes(reports), self.cavity_limit)
        return State(posterior, state.variates.renewed(cohort, changes))

    def _combined(self, state: State, cohort: Cohort, posteriors: Sequence[Gaussian]) -> Gaussian:
        form, merging = type(posteriors[0]), self._merging
        if self._averages(cohort.round) or (len(posteriors) == 1 and merging.everywhere):
            params = average(state.params, [posterior.mean for posterior in posteriors], cohort.weights)
            return form.summed(posteriors, cohort.weights, merging).with_mean(params)
        return merged(posteriors, cohort.weights, merging)

    def posteriors(self, cohort: Cohort, reports: Sequence[Report]) -> list[Gaussian]:
        posteriors = [report.posterior for report in reports]
        return type(posteriors[0]).damped_posteriors(posteriors, cohort.weights, self._merging)

    def posterior(self, state: State, round: int, training: Training, sizes: Sequence[int]) -> MethodPosterior:
        """Lambda_S as it stands: a mean over samples, but for sums over epochs, steps or rounds, and minibatches."""
        scale = self._form.per_sample(training, sizes)
        return MethodPosterior(state.posterior, scale / round if self._accumulates else scale)

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        posteriors, averages = [report.posterior for report in reports], self._averages(cohort.round)
        numbers = diagnostics(after.posterior, posteriors, cohort.weights, self._merging, averages)
        if isinstance(before.variates, ControlVariates):
            numbers["variate_excess"] = control_variates.excesses(before.variates, cohort, _changes(reports))
        if not cohort.training.is_sgd:  # whose steps have another length than lr times the gradient
            return numbers
        # Of the next round, whose prior this is; a detached prior takes no step.
        strength = 0.0 if self.detached_prior else self._strength_in(cohort.round + 1)
        largest = after.posterior.prior(self.prior == "exact").largest_eigenvalue() if strength else 0.0
        numbers["prior_stability"] = cohort.training.lr * strength * (largest + self._gamma_in_prior(after.posterior))
        return numbers

    @property
    def traits(self) -> Traits:
        return self._form.traits._replace(overshoot_advice=SOFTER)  # backtracking takes no gradients

    @cached_property  # `observe` asks for it in every step
    def _form(self) -> Form:
        """How curvature is measured, in the form that the user has chosen."""
        measuring = Measuring(
            online=self.curvature == "online",
            fisher=self.fisher,
            eigen_order=self.eigen_order,
            equal_steps=self.normalisation == "sum_steps",
            mean_over_epochs=self.normalisation == "mean",
            slopes=None if self.slopes == "auto" else self.slopes,
            first_layer=self.first_layer,
            rest=self.rest,
        )
        return FORMS[self.curvature_form](measuring)

    @property
    def _merging(self) -> Merging:
        """How posteriors are multiplied."""
        return Merging(
            damping=self.damping,
            relative=self.damping_mode == "relative",
            everywhere=self.damping_place == "both",
            trust=self.trust,
            gradients=self.damping_slopes,
            solver=self.solver,
            projection=self.projection,
        )

    def _averages(self, round: int) -> bool:
        """Whether models are averaged: because the user says so, or because they all aim at the same optimum."""
        return self.aggregation == "average" or (self.cavity and round > 1)

    @property
    def _sums_gradients(self) -> bool:
        """Whether c_n needs more than the path, since the prior's gradient acted, too."""
        return self.cavity and self.strength > 0 and not self.detached_prior

    @property
    def _accumulates(self) -> bool:
        return self.round_scaling == "code" and self.curvature == "online"

    def _strength_in(self, round: int) -> float:
        """The weight of the prior loss in a round."""
        return self.strength / round if self._accumulates else self.strength

    def _gamma_in_prior(self, posterior: Gaussian) -> float:
        """What the prior loss adds to a precision."""
        return self._merging.gamma(posterior.trace(), posterior.size) if self.damping_in_prior else 0.0


def _changes(reports: Sequence[Report]) -> list[Params]:
    return [report.change for report in reports if isinstance(report.change, dict)]
