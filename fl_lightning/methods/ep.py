"""Expectation propagation: the posterior is a product of Gaussian factors, one per client, each made anew in turn.

    q_S = N(mu_S, S_S^-1) ~ N(x_0, 1/prior) prod_n t_n          t_n: moment v_n, diagonal precision V_n; both start at 0
    cavity     C_n = S_S - V_n,   c_n = mu_S + C_n^-1 (V_n (mu_S - x_0) - v_n)         the prior and all other factors
    client     minimises L_n(theta) + (T / 2 m_n) (theta - c_n)^T C_n (theta - c_n) from mu_S, and finds y_n
    tilted     N(y_n, P_n^-1),   P_n = C_n + H_n                  H_n: curvature of the client's m_n samples, over T
    factors    V_n += rho (P_n - S_S),   v_n += rho (P_n (y_n - x_0) - S_S (mu_S - x_0))
    server     S_S = prior + sum_n V_n,   mu_S = x_0 + S_S^-1 sum_n v_n

x_0 are the model's initial weights. Precisions are those of posteriors, sums over samples, unlike FOLA's means. How
H_n is found is `inference`, what is remembered is `memory`:

    ep    client n its own factor t_n, as above
    sep   client none: every t_n stands for the same share pi_n of the whole, q_S over the prior      (stochastic EP)
    adf   client none: the cavity is q_S itself, so that data are counted once per round    (assumed density filtering)

Minka: Expectation Propagation for Approximate Bayesian Inference, UAI 2001. Guo, Greengard, Wang, Gelman, Kim, Xing:
Federated Learning as Variational Inference: A Scalable Expectation Propagation Approach, ICLR 2023 (FedEP, FedSEP).
Ashman, Bui, Nguyen, Markou, Weller, Swaroop, Turner: Partitioned Variational Inference, 2022 (PVI: `inference vi`).
Swaroop, Khan, Doshi-Velez: Connecting Federated ADMM to Bayes, ICLR 2025 (FedLap-Cov: `inference laplace`).

Where published codes differ, or are wrong:
- FedEP's server and clients follow momentum optimisers of their own, so that the server differs from the product of the
  factors and every cavity is wrong; here the server is computed from the factors in every round. Its start after 400
  rounds of FedAvg is left out, and its division by zero for two of its three tasks;
- FedLap-Cov's code takes every client's curvature on CIFAR from the data of all clients;
- stochastic EP without memory is written with the cavity q_S^(1 - pi_n), in which the prior fades from round to round;
  here the prior is taken out before q_S is shared;
- the prior's mean is x_0 and not 0, so that round 1 starts at the initial weights;
- the gradient of the cavity is m/m_n times larger for a small client, and SGD's step on it overshoots: `prior_step`
  implicit solves for the step's end instead, which is stable however small the client is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning.client_state import ClientMemory, RunningTotal
from fl_lightning.curvature.fisher import diagonal_fisher
from fl_lightning.data.model_checks import couples_samples
from fl_lightning.errors import require
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.quotient import Factor, below, change, clips
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
from fl_lightning.methods.parts import ep_cavity
from fl_lightning.methods.parts.ep_cavity import Report
from fl_lightning.models.task import Weights
from fl_lightning.optimisers import usual
from fl_lightning.optimisers.base import LocalOptimiser
from fl_lightning.optimisers.ivon import require_own_momentum, require_settings
from fl_lightning.optimisers.sgd import ImplicitPenalty
from fl_lightning.params import Params, cast_like, flatten, weighted_sum, zeros, zip_map
from fl_lightning.penalty import Quadratic
from fl_lightning.training import Training, require_samples_of_sgd, require_sgd


class EpochSamples(NamedTuple):
    """Posterior samples from SGD: the mean of the iterates of each epoch after a burn-in is one, as in FedPA.

    Their mean and variance are folded up as they come (Welford), so that no sample is kept: three models in float64.

    Attributes:
        total: Sum of the iterates of the present epoch.
        steps: Their number.
        mean: Mean of the samples.
        squares: Sum of their squared distances from it.
        number: How many samples there are.
    """

    total: Params
    steps: Tensor
    mean: Params
    squares: Params
    number: Tensor

    @classmethod
    def none(cls, like: Params) -> "EpochSamples":
        empty = zip_map(lambda value: torch.zeros_like(value, dtype=torch.float64), like)
        zero = next(iter(empty.values())).new_zeros(())
        return cls(empty, zero, empty, empty, zero)

    def seen(self, step: Step, burn_in: int) -> "EpochSamples":
        """After one more step."""
        total = zip_map(lambda t, p: t + p, self.total, step.params)
        steps = self.steps + 1
        number = self.number + 1
        offset = zip_map(lambda t, m: t / steps - m, total, self.mean)
        mean = zip_map(lambda m, o: m + o / number, self.mean, offset)
        squares = zip_map(lambda s, o: s + o.square() * (1 - 1 / number), self.squares, offset)
        ends = torch.as_tensor(step.epoch_ends, device=steps.device)
        counts = ends & torch.as_tensor(step.epoch >= burn_in, device=steps.device)

        def chosen(condition: Tensor, new: Params, old: Params) -> Params:
            return zip_map(lambda a, b: torch.where(condition, a, b), new, old)

        return EpochSamples(
            chosen(ends, zip_map(torch.zeros_like, total), total),
            torch.where(ends, 0.0, steps),
            chosen(counts, mean, self.mean),
            chosen(counts, squares, self.squares),
            torch.where(counts, number, self.number),
        )

    def variance(self) -> Params:
        """The unbiased estimate; zero for fewer than two samples."""
        return zip_map(lambda s: s / (self.number - 1).clamp(min=1), self.squares)


class State(NamedTuple):
    """The server's posterior, and the clients' memory.

    Attributes:
        params: mu_S.
        precision: S_S.
        origin: x_0.
        factors: v_n and V_n of every client that was seen; empty without factors.
        total: Their sums; empty without factors.
    """

    params: Params
    precision: Params
    origin: Params
    factors: ClientMemory[Factor] | tuple[()]
    total: RunningTotal[Factor] | tuple[()]


@dataclass(frozen=True)
class EP(Method, ObservesPath, HasPosterior):
    """Expectation propagation: one Gaussian factor per client, renewed against the product of all others.

    Attributes:
        inference: Where the curvature of a client's data comes from: the Fisher of its samples (laplace), the same for
            every parameter (identity), the spread of its epochs' mean models (samples), or
            training of the Gaussian itself by IVON (vi).
        memory: Whether each client has a factor of its own (ep), or the server's posterior stands in for all of them,
            less the client's share (sep) or as it is (adf).
        damping: Share of a factor's change that is made (rho); null is 1 / clients in the round, as PVI and FedEP have.
        prior: Precision of the prior around the initial weights (delta_0), in units of a posterior over all samples.
        temperature: Temperature of the likelihood (T): curvatures are divided by it.
        prior_step: How a step follows the cavity's gradient: implicit is stable however large it is, explicit is
            plain SGD.
        curvature: Laplace's Fisher at the end of training, or the mean along its path: a client that fits its few
            classes has hardly any curvature at the end.
        floor: Added to laplace's curvature, relative to its mean over all parameters; 0 is the plain Fisher.
        scale: Curvature per sample of identity, and the value that samples are shrunk towards.
        burn_in: Epochs before the first of the samples.
        shrinkage: Weight of the samples' variance against identity's (as FedPA's rho); 0 is identity.
        curvature_start: IVON's curvature per sample before it has learnt any (h_0).
        gradient_decay: IVON's decay of the gradient's moving average (b1).
        curvature_decay: IVON's decay of the curvature's moving average (b2).
    """

    display_name: ClassVar[str] = "EP"

    inference: Literal["laplace", "identity", "samples", "vi"] = "laplace"
    memory: Literal["ep", "sep", "adf"] = "ep"
    damping: float | None = None
    prior: float = 1e-4
    temperature: float = 1.0
    prior_step: Literal["implicit", "explicit"] = "implicit"
    curvature: Literal["end", "path"] = "path"
    floor: float = 0.0
    scale: float = 0.01
    burn_in: int = 1
    shrinkage: float = 0.01
    curvature_start: float = 0.1
    gradient_decay: float = 0.9
    curvature_decay: float = 0.99

    def __post_init__(self) -> None:
        damping, infinity = self.damping, float("inf")
        require(
            damping is None or 0 < damping <= 1,
            f"method.damping must lie in (0, 1], or be null for 1 / clients, got {damping}",
        )
        require(0 <= self.prior < infinity, f"method.prior must be finite and >= 0, got {self.prior}")
        for name in ("temperature", "scale"):
            value = getattr(self, name)
            require(0 < value < infinity, f"method.{name} must be finite and > 0, got {value}")
        for name in ("floor", "shrinkage"):
            value = getattr(self, name)
            require(0 <= value < infinity, f"method.{name} must be finite and >= 0, got {value}")
        require(self.burn_in >= 0, f"method.burn_in must be at least 0, got {self.burn_in}")
        require_settings(self.curvature_start, self.gradient_decay, self.curvature_decay)

    def check(self, training: Training, server: Server) -> None:
        task = server.task
        require(
            self.inference != "laplace" or not couples_samples(task, server.holdout),
            "method.inference laplace needs a model whose samples do not depend on each other, as they do with "
            "BatchNorm; use --method.inference identity or another model",
        )
        require(
            self.inference != "samples" or self.burn_in < training.epochs,
            f"method.burn_in must be less than training.epochs, which is {training.epochs}, got {self.burn_in}: no "
            "epoch is left to sample from; set --training.epochs higher or --method.burn_in lower",
        )
        if self.inference == "samples":
            require_samples_of_sgd("method.inference samples takes", training)
        if self.inference == "vi":
            require_own_momentum(training)
        elif self.prior_step == "implicit":
            why = "method.prior_step implicit ends a step of SGD"
            require_sgd(training, why, "use --method.prior_step explicit, or set --training.optimiser sgd")

    def init(self, params: Params, num_clients: int) -> State:
        precision = zip_map(lambda p: torch.full_like(p, self.prior), params)
        if self.memory != "ep":
            return State(params, precision, params, (), ())
        flat = Factor.flat(params)
        return State(params, precision, params, ClientMemory.blank(flat), RunningTotal.without_rows(flat))

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        factors = [self._factor(state, n, share) for n, share in zip(cohort.members, cohort.shares, strict=True)]
        samples = [cohort.server.sizes[n] / self.temperature for n in cohort.members]
        return ep_cavity.broadcast(Diagonal(state.params, state.precision), state.origin, factors, samples)

    def penalty(self, context: Context) -> Quadratic:
        return ep_cavity.prior_loss(context, self.prior)

    def local_optimiser(self, training: Training, context: Context) -> LocalOptimiser:
        if self.inference == "vi":
            decays = self.gradient_decay, self.curvature_decay
            return ep_cavity.ivon(training, context, self.prior, self.curvature_start, decays)
        return usual(training) if self.prior_step == "explicit" else ImplicitPenalty(training, self.penalty(context))

    def path_statistics(self, context: Context) -> Any:
        if self.inference == "samples":
            return EpochSamples.none(context.start)
        return zeros(context.start) if self._follows_path else None

    def observe(self, statistics: Any, step: Step) -> Any:
        if step.squares is None:
            return statistics.seen(step, self.burn_in)
        return zip_map(lambda t, s: t + s * step.fraction, statistics, step.squares)

    def report(self, local: Local, context: Context) -> Report:
        if self.inference == "vi":
            return ep_cavity.found(local.params, local.optimiser_state.curvature, context, self.prior)
        if self.inference == "laplace":
            fisher = self._fisher(local)
            level = self.floor * flatten(fisher).mean() if self.floor else 0.0
            return ep_cavity.found(local.params, zip_map(lambda f: f + level, fisher), context, self.prior)
        same = zip_map(lambda p: torch.full_like(p, self.scale), local.params)
        identity = ep_cavity.found(local.params, same, context, self.prior)
        if self.inference == "identity" or not bool(local.path_statistics.number):
            return identity
        samples: EpochSamples = local.path_statistics
        trust = 1 / (1 + (float(samples.number) - 1) * self.shrinkage)
        variance = zip_map(lambda i, v: trust / i.double() + (1 - trust) * v, identity.precision, samples.variance())
        precision = zip_map(torch.reciprocal, variance)
        return Report(cast_like(samples.mean, local.params), cast_like(precision, local.params))

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        state, origin, moment, found = self._product(state, cohort, reports)
        precision = zip_map(lambda s: s.clamp(min=self.prior), found)
        params = zip_map(lambda x, v, s: x.double() + torch.where(s > 0, v / s, 0.0), origin, moment, precision)
        return state._replace(params=cast_like(params, origin), precision=cast_like(precision, origin))

    def _product(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> tuple[State, Params, Params, Params]:
        """The state with the factors after a round, the point around which the server is written, moment and precision.

        In float64; factors may be negative, so that the precision may lie below the prior.
        """
        rate, before = self._rate(cohort), Diagonal(state.params, state.precision)
        tilted = {n: Diagonal(*report) for n, report in sorted(zip(cohort.members, reports, strict=True))}
        if isinstance(state.factors, ClientMemory) and isinstance(state.total, RunningTotal):
            old, origin = state.factors, state.origin
            rows = {n: old[n].moved(change(q, before, origin), rate) for n, q in tilted.items()}
            total = state.total.changed(old, rows)
            state = state._replace(factors=old.replaced(rows), total=total)
            moment, found = total.rounded()
            precision = zip_map(lambda v: v.double() + self.prior, found)
        else:  # around mu_S itself, where the server's own moment is zero
            origin = state.params
            changes = [change(q, before, origin) for q in tilted.values()]
            moment = weighted_sum((c.moment for c in changes), [rate] * len(changes))
            found = weighted_sum((c.precision for c in changes), [rate] * len(changes))
            precision = zip_map(lambda s, v: s.double() + v, state.precision, found)
        return state, origin, moment, precision

    def posteriors(self, cohort: Cohort, reports: Sequence[Report]) -> list[Gaussian]:
        return [Diagonal(*report) for report in reports]

    def posterior(self, state: State, round: int, training: Training, sizes: Sequence[int]) -> MethodPosterior:
        return MethodPosterior(Diagonal(state.params, state.precision), prior=self.prior)

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        context = self.broadcast(before, cohort)
        members = [context.of_member(position) for position in range(len(cohort.members))]
        numbers = {
            **ep_cavity.of_precision(after.precision),
            "cavity_clips": [float(clips(before.precision, one.own.precision, self.prior)) for one in members],
            "server_clips": float(below(self._product(before, cohort, reports)[-1], self.prior)),
        }
        if cohort.training.is_sgd:
            stiffest = (ep_cavity.cavity(one, self.prior).largest_eigenvalue() for one in members)
            stability = [
                cohort.training.lr * a / float(one.own.samples) for a, one in zip(stiffest, members, strict=True)
            ]
            numbers |= {"prior_stability": max(stability), "stiffness": stability}
        if isinstance(after.factors, ClientMemory):
            numbers["factors_negative"] = ep_cavity.negatives([after.factors[n] for n in cohort.members])
        return numbers

    @property
    def traits(self) -> Traits:
        explicit = self.inference != "vi" and self.prior_step == "explicit"
        return Traits(
            extra_passes=1 if self.inference == "laplace" and self.curvature == "end" else 0,
            needs_squares=self._follows_path,
            overshoot_advice="use --method.prior_step implicit, or lower training.lr" if explicit else "",
        )

    @property
    def _follows_path(self) -> bool:
        """Whether squared gradients are summed along the path."""
        return self.inference == "laplace" and self.curvature == "path"

    def _rate(self, cohort: Cohort) -> float:
        """Rho."""
        return 1 / len(cohort.members) if self.damping is None else self.damping

    def _fisher(self, local: Local) -> Params:
        """Mean of the squared gradients of the client's samples."""
        if self.curvature == "path":
            return zip_map(lambda t: t / local.num_epochs, local.path_statistics)
        weights = Weights(local.params, local.buffers)
        return diagonal_fisher(local.task, weights, local.data, "per_sample", None)

    def _factor(self, state: State, client: int, share: float) -> Factor:
        """t_n, or what stands for it where clients remember none."""
        if isinstance(state.factors, ClientMemory):
            return state.factors[client]
        if self.memory == "adf":
            return Factor.flat(state.params)
        moment = zip_map(
            lambda s, m, x: s.double() * (m.double() - x.double()), state.precision, state.params, state.origin
        )
        precision = zip_map(lambda s: s - self.prior, state.precision)
        return Factor(zip_map(lambda v: v * share, moment), zip_map(lambda v: v * share, precision))
