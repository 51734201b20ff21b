"""FOLA, federated online Laplace approximation: Gaussian-product aggregation, a prior loss, an online Fisher.

In round r, client n trains E epochs on its m_n samples, in batches of b_t, and the server weighs it by p_n:

    prior loss      J_n(theta) = L_n(theta) + (lambda / 2) (theta - mu_S)^T Lambda_S (theta - mu_S)
    online Fisher   F_n <- F_n + (b_t / m_n) g_t^2               g_t: gradient of L_n on batch t, before step t
    recursion       Lambda_n = F_n / (E r) + ((r - 1) / r) Lambda_S
    product         mu_S <- sum_n p_n (Lambda_n + gamma) mu_n / sum_n p_n (Lambda_n + gamma)
                    Lambda_S <- sum_n p_n Lambda_n

with lambda = `strength`, and gamma = `damping` times the mean of the diagonal of sum_n p_n Lambda_n.

Liu, Jiang, Zheng, Chen, Qi, Huang, Shao: A Bayesian Federated Learning Framework with Online Laplace Approximation,
TPAMI 2023.

Where the paper's equations, its algorithm and its published code disagree:
- the prior loss has a gradient: the published code detaches it, so that lambda changes nothing;
- g_t is the gradient of a minibatch, as in algorithm and code; per-sample squares, as in the equations, are about b_t
  times larger (`fisher`);
- F_n is divided by E, as in the equations: a sum would change the scale of lambda with E;
- Lambda_S starts at zero: (r - 1) / r = 0 removes any other value in round 1;
- gamma is in numerator and denominator, so that equal clients give an equal server, and not in the prior loss;
- gamma is relative, because the scale of the Fisher depends on model, batch size and data.
`fola_extended` has the other choices as settings.

With `curvature_form` full, Lambda_n and F_n = sum_t (b_t / m_n) C(theta_t; batch_t) are matrices, C the Hessian of
softmax regression or the Gauss-Newton matrix of another network; the product is a linear system. With e_full, F_n is
the vector of the eigenvalues of that matrix, used like a diagonal.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch

from fl_lightning.curvature import full
from fl_lightning.curvature.fisher import FisherKind, accumulate, fisher_at_end
from fl_lightning.curvature.full import EigenOrder, as_diagonal
from fl_lightning.errors import require
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.damping import Merging
from fl_lightning.gaussian.diagnostics import diagnostics
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.full import Full
from fl_lightning.method import (
    Cohort,
    Context,
    HasPosterior,
    Local,
    Method,
    MethodPosterior,
    ObservesPath,
    Server,
    Step,
    Traits,
)
from fl_lightning.methods.parts.curvature_form import Measuring
from fl_lightning.methods.parts.diagonal_form import mean_batch
from fl_lightning.methods.parts.forms_by_name import require_suitable
from fl_lightning.params import Params, average, cast_like, count, flatten, numbers, weighted_sum, zeros
from fl_lightning.penalty import SOFTER, Penalty
from fl_lightning.training import Training


class State(NamedTuple):
    """The global posterior N(mu_S, Lambda_S^-1)."""

    posterior: Gaussian

    @property
    def params(self) -> Params:
        """The global model mu_S."""
        return self.posterior.mean


class Shared(NamedTuple):
    """What is sent beside mu_S: Lambda_S (a Gaussian with an empty mean) and r."""

    prior: Gaussian
    round: int


class Report(NamedTuple):
    """The local posterior N(mu_n, Lambda_n^-1)."""

    posterior: Gaussian


@dataclass(frozen=True)
class Fola(Method, ObservesPath, HasPosterior):
    """Bayesian FL: clients send Gaussian posteriors, the server multiplies them and sends the product as prior.

    Attributes:
        aggregation: Product of Gaussians, or plain average of the models (with strength > 0: FedAvg with prior loss).
        strength: Weight of the prior loss (lambda); 0 switches it off.
        curvature: Accumulated along the local path and over the rounds (online), or taken at the end of local training
            without memory of earlier rounds (offline).
        fisher: Squared gradients of minibatches, or of single samples; for the diagonal.
        curvature_form: Precision as a diagonal (Fisher), as a full matrix (Hessian or Gauss-Newton), or e_full, the
            eigenvalues of the full one used as a diagonal. A full matrix takes memory with the square of the model.
        eigen_order: Which eigenvalue e_full gives to which parameter: in ascending order, as eigensolvers return them,
            or rank_matched, the largest to the parameter with the largest curvature.
        damping: Added to each precision in the product (gamma), in units of the mean precision.
    """

    display_name: ClassVar[str] = "FOLA"
    version: ClassVar[int] = 2  # the same as that of FolaExtended
    extended_by: ClassVar[str] = "fola_extended"

    aggregation: Literal["product", "average"] = "product"
    strength: float = 100.0
    curvature: Literal["online", "offline"] = "online"
    fisher: FisherKind = "minibatch"
    curvature_form: Literal["diagonal", "full", "e_full"] = "diagonal"
    eigen_order: EigenOrder = "ascending"
    damping: float = 1e-2

    @property
    def traits(self) -> Traits:
        online, diagonal = self.curvature == "online", self.curvature_form == "diagonal"
        return Traits(
            extra_passes=0 if online and diagonal else 1,
            one_by_one=online and not diagonal,  # a path grows with each step
            needs_squares=online and self.fisher == "per_sample",
            overshoot_advice=SOFTER,
        )

    def __post_init__(self) -> None:
        require(0 <= self.strength < float("inf"), f"method.strength must be finite and >= 0, got {self.strength}")
        require(0 <= self.damping < float("inf"), f"method.damping must be finite and >= 0, got {self.damping}")

    def check(self, training: Training, server: Server) -> None:
        measuring = Measuring(self.curvature == "online", self.fisher, self.eigen_order)
        require_suitable(self.curvature_form, measuring, self, self.strength, training, server)

    def init(self, params: Params, num_clients: int) -> State:
        """mu_S = initial model, Lambda_S = 0."""
        return State(Full.flat(params) if self.curvature_form == "full" else Diagonal(params, zeros(params)))

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        return Context(state.params, Shared(state.posterior.with_mean({}), cohort.round))

    def penalty(self, context: Context) -> Penalty | None:
        """(lambda / 2) (theta - mu_S)^T Lambda_S (theta - mu_S); nothing in round 1, where Lambda_S = 0."""
        shared: Shared = context.shared
        if self.strength == 0 or shared.round == 1:
            return None
        return shared.prior.with_mean(context.start).prior_loss(self.strength)

    def path_statistics(self, context: Context) -> Any:
        """F_n = 0; for full and e_full an empty path."""
        if self.curvature == "offline":
            return None
        return zeros(context.start) if self.curvature_form == "diagonal" else ()

    def observe(self, statistics: Any, step: Step) -> Any:
        """F_n <- F_n + (b_t / m_n) g_t^2; full and e_full keep theta_t, and are measured in `report`."""
        if self.curvature_form == "diagonal":
            return accumulate(statistics, step)
        return (*statistics, flatten(step.params))

    def report(self, local: Local, context: Context) -> Report:
        """Lambda_n = F_n / (E r) + ((r - 1) / r) Lambda_S; offline, Lambda_n = F_n."""
        fisher = self._curvature(local, context.start)
        if self.curvature == "offline":
            return Report(fisher)
        (prior, r), epochs = context.shared, local.num_epochs
        return Report(fisher.over_rounds(1 / epochs / r, prior, (r - 1) / r))

    def _curvature(self, local: Local, start: Params) -> Diagonal | Full:
        """F_n with mu_n as mean: summed along the path (online), or at its end (offline)."""
        online = self.curvature == "online"
        if self.curvature_form == "diagonal":
            return Diagonal(local.params, local.path_statistics if online else fisher_at_end(local, self.fisher))
        matrix = full.along_path(local, start) if online else full.at_end(local)
        if self.curvature_form == "full":
            return Full(local.params, matrix)
        return Diagonal(local.params, as_diagonal(matrix, local.params, self.eigen_order))

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        """mu_S <- sum_n p_n (Lambda_n + gamma) mu_n / sum_n p_n (Lambda_n + gamma), Lambda_S <- sum_n p_n Lambda_n."""
        posteriors: list[Any] = [report.posterior for report in reports]
        weights, averages = cohort.weights, self.aggregation == "average" or len(posteriors) == 1
        if self.curvature_form == "full" and not averages:  # the same with matrices, by a Cholesky factor
            return State(Full.merged(posteriors, weights, Merging(self.damping)))
        precision = weighted_sum((q.parts() for q in posteriors), weights)  # sum_n p_n Lambda_n, in float64
        if averages:
            mean = average(state.params, [q.mean for q in posteriors], weights)
        else:
            gamma = self.damping * sum(numbers(value.sum() for value in precision.values())) / count(precision)
            mean = product_mean(posteriors, weights, gamma)
        return State(posteriors[0].with_parts(cast_like(precision, posteriors[0].parts())).with_mean(mean))

    def posteriors(self, cohort: Cohort, reports: Sequence[Report]) -> list[Gaussian]:
        posteriors = [report.posterior for report in reports]
        return type(posteriors[0]).damped_posteriors(posteriors, cohort.weights, Merging(self.damping))

    def posterior(self, state: State, round: int, training: Training, sizes: Sequence[int]) -> MethodPosterior:
        """Lambda_S, which squared minibatch gradients make too small by about a batch size."""
        by_batch = self.curvature_form == "diagonal" and self.fisher == "minibatch"
        return MethodPosterior(state.posterior, mean_batch(training, sizes) if by_batch else 1.0)

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        posteriors, averages = [report.posterior for report in reports], self.aggregation == "average"
        numbers = diagnostics(after.posterior, posteriors, cohort.weights, Merging(self.damping), averages)
        if cohort.training.is_sgd:  # of the next round, whose prior this is
            largest = after.posterior.largest_eigenvalue() if self.strength else 0.0
            numbers["prior_stability"] = cohort.training.lr * self.strength * largest
        return numbers


def product_mean(posteriors: Sequence[Diagonal], weights: Sequence[float], gamma: float) -> Params:
    """sum_n p_n (Lambda_n + gamma) mu_n / sum_n p_n (Lambda_n + gamma); the average where no client has precision."""
    mean = {}
    for name, like in posteriors[0].mean.items():
        moment, total = (torch.zeros_like(like, dtype=torch.float64) for _ in range(2))
        for q, p in zip(posteriors, weights, strict=True):
            share = (q.precision[name].double() + gamma).mul_(p)
            total += share
            moment += share.mul_(q.mean[name])
        improper = total == 0
        if gamma == 0 and bool(improper.any()):
            means = weighted_sum(({name: q.mean[name]} for q in posteriors), weights)[name]
            moment, total = torch.where(improper, means, moment), torch.where(improper, 1.0, total)
        mean[name] = (moment / total).to(like.dtype)
    return mean
