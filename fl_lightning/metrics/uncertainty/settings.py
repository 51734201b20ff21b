"""What a run finds out about its own uncertainty after the last round."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from fl_lightning.errors import require
from fl_lightning.metrics.metric import Predictive

Form = Literal["diagonal", "kron", "last_layer", "full"]
PriorChoice = Literal["auto", "holdout", "marglik"]
GradientKind = Literal["exact", "empirical"]
Source = Literal["final_round", "running", "ep"]


@dataclass(frozen=True)
class Uncertainty:
    """The Laplace posterior of the final model, from one extra round without training.

    Attributes:
        final_round: Whether all clients send the curvature of their data at the final model once more, so that the run
            ends in a posterior: exactly that of the pooled data, whatever the partition.
        source: Source of the curvature. final_round: one more round at the final model; running: what fola has
            accumulated over the rounds, as it stands; ep: the posterior of ep, its presets and bayes_admm. The
            latter two need no extra round; their form is fixed by the method.
        form: Structure of the posterior's precision. diagonal; kron: two Kronecker factors per layer; last_layer: the
            full matrix of the last layer, all others without uncertainty; full: the whole matrix, for small models.
        slopes: exact: the Gauss-Newton matrix, one backward pass for each class; empirical: the Fisher with the labels
            that the samples have, for diagonal and kron alone.
        prior_precision: tau of the prior N(0, 1/tau), a number; marglik: the one with the largest marginal likelihood;
            holdout: the one with the smallest NLL on data.validation, or else data.holdout; auto: holdout if there are
            such data, else marglik; with source ep the method's own prior. Never the test set.
        temperature: Temperature T of the likelihood: the posterior's precision is m/T H + tau I; values below 1 make it
            narrower.
        predictive: How predictions are made. map, the model itself, and with held-out data temperature, its scaled
            logits, are measured in any case. probit: logits that are divided by sqrt(1 + pi/8 variance); glm_mc: draws
            of the linearised logits; nn: draws of the network; ensemble: the mean over the clients' models, or over
            those that FedBE samples.
        draws: Draws of the network for nn.
        glm_draws: Draws of the logits for glm_mc.
        ood: Out-of-distribution inputs: names of datasets (fashion_mnist), noise, rotated, dropped_classes (those of
            data.drop_classes), or files .npy or .npz with inputs. Smaller images are padded, grey ones repeated; the
            dataset itself is left out, and of larger ones as many are taken as the test set has.
    """

    final_round: bool = False
    source: Source = "final_round"
    form: Form = "kron"
    slopes: GradientKind = "exact"
    prior_precision: float | PriorChoice = "auto"
    temperature: float = 1.0
    predictive: tuple[Predictive, ...] = ("probit",)
    draws: int = 30
    glm_draws: int = 100
    ood: tuple[str, ...] = ("noise",)

    def __post_init__(self) -> None:
        prior = self.prior_precision
        require(
            isinstance(prior, str) or (math.isfinite(prior) and prior >= 0),
            f"uncertainty.prior_precision must be a finite number >= 0, or one of {', '.join(get_args(PriorChoice))}, "
            f"got {prior}",
        )
        require(
            math.isfinite(self.temperature) and self.temperature > 0,
            f"uncertainty.temperature must be finite and > 0, got {self.temperature}; 1 is the posterior itself",
        )
        for name in ("draws", "glm_draws"):
            require(getattr(self, name) >= 1, f"uncertainty.{name} must be at least 1, got {getattr(self, name)}")
        require(
            self.slopes == "exact" or self.form in ("diagonal", "kron"),
            f"uncertainty.slopes {self.slopes} goes with the forms diagonal and kron, got {self.form}; use exact",
        )
        require(
            self.slopes == "exact" or self.source == "final_round",
            f"uncertainty.slopes {self.slopes} goes with the source final_round, got {self.source}, whose gradients "
            "are the method's; leave one out",
        )
