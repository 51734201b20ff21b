"""BayesADMM: ADMM over Gaussians instead of points, every client trained by IVON.

    lambda_S = (S_S (mu_S - x_0), S_S)           natural parameters of the server's q_S; at first N(x_0, 1/prior)
    client     q_n = argmin  (m_n / T) E_q[L_n] + <eta_n, E_q[t]> + rho KL(q || q_S)        eta_n: its dual, 0 at first
               that is, IVON with the prior lambda_S - eta_n / rho and m_n / (T rho) samples
    dual       eta_n <- eta_n + damping rho (lambda_n - lambda_S)
    server     lambda_S <- (1 - a) mean_n lambda_n + a (lambda_0 + sum_n eta_n)              a = 1 / (1 + rho N)

x_0 are the model's initial weights. A dual is a Gaussian factor, as in expectation propagation; at the fixed point it
is the client's likelihood. If likelihoods are Gaussian, the first round with rho = 1 / N and damping 1 is exact. But
where N times a client's curvature exceeds that of all, lambda_S - eta_n / rho is then no density, and is clipped at the
prior (`prior_clips` counts it): the larger rho, the rarer that is, and the slower duals grow. With rho = 1 it is EP's
cavity.

Moellenhoff, Swaroop, Doshi-Velez, Khan: Federated ADMM from Bayesian Duality, ICLR 2026.

Where the published code differs, or is wrong:
- the predictions that it calls Bayesian sample from the global worker's optimiser, whose precision is never updated:
  from the initial precision, not from the learnt posterior;
- its toy example and its training code have opposite signs of the dual; here eta_n grows towards the client's
  likelihood, and is taken out of the client's prior loss;
- its random numbers are the same for every client and round; here every client, round and step has its own;
- clients' step sizes go through one shared dictionary, so that all have the last client's;
- the mean runs over the clients of the round, the sum over all duals: partial participation is ours.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fl_lightning.client_state import ClientMemory, RunningTotal
from fl_lightning.errors import require
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.quotient import Factor, below, change, clips
from fl_lightning.method import Cohort, Context, HasPosterior, Local, Method, MethodPosterior, Server
from fl_lightning.methods.parts import ep_cavity
from fl_lightning.methods.parts.ep_cavity import Report
from fl_lightning.optimisers.ivon import Ivon, require_own_momentum, require_settings
from fl_lightning.params import Params, cast_like, weighted_sum, zip_map
from fl_lightning.penalty import Quadratic
from fl_lightning.training import Training


class State(NamedTuple):
    """The server's posterior, and the clients' duals.

    Attributes:
        params: mu_S.
        precision: S_S.
        origin: x_0.
        duals: eta_n of every client that was seen.
        total: Their sum.
    """

    params: Params
    precision: Params
    origin: Params
    duals: ClientMemory[Factor]
    total: RunningTotal[Factor]


@dataclass(frozen=True)
class BayesADMM(Method, HasPosterior):
    """ADMM over Gaussian posteriors, each client trained by IVON against the server's and its own dual.

    Attributes:
        rho: Weight of the KL term towards the server's posterior; null is 1 / clients, exact for Gaussian likelihoods.
        damping: Share of a dual's step that is made.
        prior: Precision of the prior around the initial weights (delta_0), in units of a posterior over all samples.
        temperature: Temperature of the likelihood (T): curvatures are divided by it.
        curvature_start: IVON's curvature per sample before it has learnt any (h_0).
        gradient_decay: IVON's decay of the gradient's moving average (b1).
        curvature_decay: IVON's decay of the curvature's moving average (b2).
    """

    display_name: ClassVar[str] = "BayesADMM"

    rho: float | None = 1.0
    damping: float = 1.0
    prior: float = 1.0
    temperature: float = 0.1
    curvature_start: float = 0.1
    gradient_decay: float = 0.9
    curvature_decay: float = 0.99

    def __post_init__(self) -> None:
        infinity = float("inf")
        require(
            self.rho is None or 0 < self.rho < infinity,
            f"method.rho must be finite and > 0, or null for 1 / clients, got {self.rho}",
        )
        require(0 < self.damping <= 1, f"method.damping must lie in (0, 1], got {self.damping}")
        for name in ("prior", "temperature"):
            value = getattr(self, name)
            require(0 < value < infinity, f"method.{name} must be finite and > 0, got {value}")
        require_settings(self.curvature_start, self.gradient_decay, self.curvature_decay)

    def check(self, training: Training, server: Server) -> None:
        require_own_momentum(training)

    def init(self, params: Params, num_clients: int) -> State:
        precision = zip_map(lambda p: torch.full_like(p, self.prior), params)
        flat = Factor.flat(params)
        return State(params, precision, params, ClientMemory.blank(flat), RunningTotal.without_rows(flat))

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        rho, duals = self._rho(cohort), [state.duals[n] for n in cohort.members]
        samples = [cohort.server.sizes[n] / (self.temperature * rho) for n in cohort.members]
        return ep_cavity.broadcast(Diagonal(state.params, state.precision), state.origin, duals, samples, rho)

    def penalty(self, context: Context) -> Quadratic:
        return ep_cavity.prior_loss(context, self.prior)

    def local_optimiser(self, training: Training, context: Context) -> Ivon:
        decays = self.gradient_decay, self.curvature_decay
        return ep_cavity.ivon(training, context, self.prior, self.curvature_start, decays)

    def report(self, local: Local, context: Context) -> Report:
        return ep_cavity.found(local.params, local.optimiser_state.curvature, context, self.prior)

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        state, moment, found = self._mixture(state, cohort, reports)
        precision = zip_map(lambda s: s.clamp(min=self.prior), found)
        params = zip_map(lambda x, v, s: x.double() + v / s, state.origin, moment, precision)
        return state._replace(params=cast_like(params, state.origin), precision=cast_like(precision, state.origin))

    def _mixture(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> tuple[State, Params, Params]:
        """The state with the duals after a round, and the server's moment and precision.

        In float64; the precision may lie below the prior.
        """
        rho, owners = self._rho(cohort), _owners(cohort.server)
        before = Diagonal(state.params, state.precision)
        steps = {
            n: change(Diagonal(*report), before, state.origin)
            for n, report in sorted(zip(cohort.members, reports, strict=True))
        }
        rows = {n: state.duals[n].moved(step, self.damping * rho) for n, step in steps.items()}
        sums = state.total.changed(state.duals, rows)
        total, equal = sums.rounded(), [1 / len(steps)] * len(steps)
        a = 1 / (1 + rho * owners)

        def mixed(now: Tensor, step: Tensor, dual: Tensor) -> Tensor:
            return (1 - a) * (now + step) + a * dual

        # The server as it is now, as a factor beside the prior, whose own natural parameters are (0, prior).
        start = Diagonal(state.origin, zip_map(lambda s: torch.full_like(s, self.prior), state.precision))
        now = change(before, start, state.origin)
        mean_moment = weighted_sum((step.moment for step in steps.values()), equal)
        mean_precision = weighted_sum((step.precision for step in steps.values()), equal)
        moment = zip_map(mixed, now.moment, mean_moment, total.moment)
        found = zip_map(mixed, now.precision, mean_precision, total.precision)
        after = state._replace(duals=state.duals.replaced(rows), total=sums)
        return after, moment, zip_map(lambda s: s + self.prior, found)

    def posteriors(self, cohort: Cohort, reports: Sequence[Report]) -> list[Gaussian]:
        return [Diagonal(*report) for report in reports]

    def posterior(self, state: State, round: int, training: Training, sizes: Sequence[int]) -> MethodPosterior:
        return MethodPosterior(Diagonal(state.params, state.precision), prior=self.prior)

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        context = self.broadcast(before, cohort)
        taken = [context.of_member(position).own.precision for position in range(len(cohort.members))]
        return {
            **ep_cavity.of_precision(after.precision),
            "server_clips": float(below(self._mixture(before, cohort, reports)[-1], self.prior)),
            "prior_clips": [float(clips(before.precision, one, self.prior)) for one in taken],
            "duals_negative": ep_cavity.negatives([after.duals[n] for n in cohort.members]),
        }

    def _rho(self, cohort: Cohort) -> float:
        return 1 / _owners(cohort.server) if self.rho is None else self.rho


def _owners(server: Server) -> int:
    """N, the clients that have data."""
    return len(server.sizes) - server.sizes.count(0)
