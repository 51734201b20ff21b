"""FedIvon: clients train Gaussians by IVON from the server's, and the server takes the product of what they found.

    q_S = N(mu_S, 1/(h_S + delta))               per sample; mu_S starts at the initial weights, h_S at h_0
    client    (mu_n, h_n) = IVON on L_n with m_n / T samples and the prior N(0, T/(m_n delta)), from (mu_S, h_S)
    server    mu_S <- sum_n p_n (h_n + delta) mu_n / sum_n p_n (h_n + delta)        h_S <- sum_n p_n h_n

The server's line is FOLA's product; what differs is where precisions come from: the variational rule learns them on the
way instead of squaring gradients. Clients remember nothing, and have no prior loss.

Pal, Gupta, Sarwar, Rai: Federated Learning with Uncertainty and Personalization via Efficient Second-order
Optimization, TMLR 2025.

No code was published; where the paper leaves a choice, or ours differs:
- the paper weighs the means by h_n; IVON keeps h_n + delta positive but not h_n, whose sum may be zero or less. The
  posterior's precision is the former, and that is what is multiplied here; for a small delta it is the same;
- the noise of a client goes with its own m_n, so that small clients explore more; precisions are those of a sample, and
  the size of a client enters through p_n;
- the personalised variant, which keeps a posterior for every client, is not part of this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.gaussian.damping import Merging
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.method import Cohort, Context, HasPosterior, Local, Method, MethodPosterior, Server
from fl_lightning.methods.parts.ep_cavity import of_precision
from fl_lightning.optimisers.ivon import Ivon, require_own_momentum, require_settings
from fl_lightning.params import Params, zeros, zip_map
from fl_lightning.penalty import Quadratic
from fl_lightning.training import Training


class State(NamedTuple):
    """The server's posterior, per sample: mu_S and h_S + delta."""

    posterior: Diagonal

    @property
    def params(self) -> Params:
        """The global model mu_S."""
        return self.posterior.mean


class Report(NamedTuple):
    """A client's posterior, per sample: mu_n and h_n + delta."""

    posterior: Diagonal


@dataclass(frozen=True)
class FedIvon(Method, HasPosterior):
    """Product of Gaussian posteriors that each client trains by IVON, starting at the server's mean and curvature.

    Attributes:
        prior: Precision of the prior around zero, per sample (delta): IVON's weight decay.
        temperature: Temperature of the likelihood (T): a client counts m_n / T samples.
        curvature_start: IVON's curvature per sample before the first round (h_0).
        gradient_decay: IVON's decay of the gradient's moving average (b1).
        curvature_decay: IVON's decay of the curvature's moving average (b2).
    """

    display_name: ClassVar[str] = "FedIvon"

    prior: float = 1e-4
    temperature: float = 0.1
    curvature_start: float = 0.1
    gradient_decay: float = 0.9
    curvature_decay: float = 0.99

    def __post_init__(self) -> None:
        for name in ("prior", "temperature"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"method.{name} must be finite and > 0, got {value}")
        require_settings(self.curvature_start, self.gradient_decay, self.curvature_decay)

    def check(self, training: Training, server: Server) -> None:
        require_own_momentum(training)

    def init(self, params: Params, num_clients: int) -> State:
        return State(Diagonal(params, zip_map(lambda p: torch.full_like(p, self.curvature_start + self.prior), params)))

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        samples = [cohort.server.sizes[n] / self.temperature for n in cohort.members]
        own = next(iter(state.params.values())).new_tensor(samples)
        return Context(state.params, state.posterior.precision, own)

    def penalty(self, context: Context) -> Quadratic:
        return Quadratic(zeros(context.start), self.prior)

    def local_optimiser(self, training: Training, context: Context) -> Ivon:
        samples: Tensor = context.own
        prior = zip_map(lambda p: torch.full_like(p, self.prior), context.start)
        curvature = zip_map(lambda a: a - self.prior, context.shared)
        decays = self.gradient_decay, self.curvature_decay
        return Ivon(training, samples, prior, curvature, self.curvature_start, *decays)

    def report(self, local: Local, context: Context) -> Report:
        return Report(Diagonal(local.params, zip_map(lambda h: h + self.prior, local.optimiser_state.curvature)))

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        return State(Diagonal.merged(self.posteriors(cohort, reports), cohort.weights, Merging()))

    def posteriors(self, cohort: Cohort, reports: Sequence[Report]) -> list[Diagonal]:
        return [report.posterior for report in reports]

    def posterior(self, state: State, round: int, training: Training, sizes: Sequence[int]) -> MethodPosterior:
        """N(mu_S, .) with h_S, the mean curvature per sample."""
        return MethodPosterior(Diagonal(state.params, zip_map(lambda a: a - self.prior, state.posterior.precision)))

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        posteriors = self.posteriors(cohort, reports)
        parts = [p * q.trace() for p, q in zip(cohort.weights, posteriors, strict=True)]
        return {
            **of_precision(after.posterior.precision),
            "weight_shift": Diagonal.weight_shift(posteriors, cohort.weights, Merging()),
            "precision_share": [part / sum(parts) for part in parts],
        }
