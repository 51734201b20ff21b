"""What methods with a Gaussian factor for every client have in common: the server's posterior without the client's own.

    q_S / t_n^(1/rho)        precision S_S - V_n / rho, and the mean that belongs to it; rho = 1 is EP's cavity

A client knows its factor from its memory, the server's posterior from what it is sent, and reports the posterior that
it found, from which the server knows how the factor has changed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.quotient import Factor, quotient
from fl_lightning.method import Context
from fl_lightning.optimisers.ivon import Ivon
from fl_lightning.params import Params, flatten, numbers, zip_map
from fl_lightning.penalty import Quadratic
from fl_lightning.training import Training


class CavityTerms(NamedTuple):
    """A client's own data about the factor that is taken out.

    Attributes:
        samples: How many samples its likelihood counts for.
        slope: Gradient of -log t_n / rho at mu_S.
        precision: V_n / rho.
    """

    samples: Tensor
    slope: Params
    precision: Params


class Report(NamedTuple):
    """The client's posterior: mean and precision."""

    params: Params
    precision: Params


def broadcast(
    server: Diagonal, origin: Params, factors: Sequence[Factor], samples: Sequence[float], rho: float = 1.0
) -> Context:
    """What a cohort starts from: the server's posterior is sent, the rest its members know by themselves.

    Args:
        server: q_S.
        origin: The point around which factors are written.
        factors: t_n of every member.
        samples: How many samples the likelihood of each counts for.
        rho: What is taken out is t_n^(1/rho).
    """
    gradients = [factor.gradient(server.mean, origin) for factor in factors]
    own = CavityTerms(
        next(iter(server.mean.values())).new_tensor(samples),
        {name: torch.stack([one[name] for one in gradients]) / rho for name in server.mean},
        {name: torch.stack([one.precision[name] for one in factors]) / rho for name in server.mean},
    )
    return Context(server.mean, server.precision, own)


def cavity(context: Context, floor: float) -> Diagonal:
    """What is left for a client; its precision is at least the floor."""
    own: CavityTerms = context.own
    return quotient(Diagonal(context.start, context.shared), own.slope, own.precision, floor)


def prior_loss(context: Context, floor: float) -> Quadratic:
    """The penalty that goes with the mean loss: -log of what is left, over the samples."""
    left, own = cavity(context, floor), context.own
    return Quadratic(left.mean, zip_map(lambda a: a / own.samples, left.precision))


def ivon(training: Training, context: Context, floor: float, start: float, decays: tuple[float, float]) -> Ivon:
    """The rule that trains a Gaussian against what is left, from the client's own curvature, or from h_0 if larger.

    Args:
        training: Learning rate and clipping.
        context: Of one client.
        floor: Of the cavity's precision.
        start: h_0.
        decays: b1 and b2.
    """
    own: CavityTerms = context.own
    prior = zip_map(lambda a: a / own.samples, cavity(context, floor).precision)
    curvature = zip_map(lambda a: (a / own.samples).clamp(min=start), own.precision)
    return Ivon(training, own.samples, prior, curvature, start, *decays)


def found(params: Params, curvature: Params, context: Context, floor: float) -> Report:
    """The posterior of a client whose samples have this curvature each."""
    own: CavityTerms = context.own
    left = cavity(context, floor).precision
    return Report(params, zip_map(lambda c, h: c + own.samples * h, left, curvature))


def of_precision(precision: Params) -> dict[str, float | list[float]]:
    """Numbers worth logging of a posterior's precision."""
    flat = flatten(precision).double()
    return {
        "precision_mean": float(flat.mean()),
        "precision_min": float(flat.min()),
        "precision_max": float(flat.max()),
    }


def negatives(factors: Sequence[Factor]) -> list[float]:
    """How many parameters of each factor have a negative precision, where it is not a density."""
    return [float(sum(numbers((v < 0).sum() for v in factor.precision.values()))) for factor in factors]
