"""What is tuned of a posterior, never on the test set: its prior's precision, and the temperature of the logits."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fl_lightning.data.batches import ClientData
from fl_lightning.errors import require
from fl_lightning.metrics.uncertainty.linearised import linearise
from fl_lightning.metrics.uncertainty.posterior import Posterior
from fl_lightning.metrics.uncertainty.predictive import log_probit
from fl_lightning.metrics.uncertainty.settings import Uncertainty
from fl_lightning.system import activity

# 10^-4 to 10^4, five for each power of ten.
GRID = tuple(10 ** (step / 5) for step in range(-20, 21))
# Held-out samples that are linearised together.
BLOCK = 100
# ln T is looked for between these ends, to this length.
LOWEST, HIGHEST, LENGTH = math.log(1e-2), math.log(1e2), 1e-8
GOLDEN = (math.sqrt(5) - 1) / 2


def tuned(posterior: Posterior, settings: Uncertainty, held: ClientData | None, own: float | None = None) -> Posterior:
    """The posterior with the prior precision that the settings ask for, and the temperature of the mean's logits.

    Args:
        posterior: With any prior.
        settings: Which precision.
        held: Samples that no client has trained on, if there are any.
        own: The precision of the method's own prior, if the posterior has one: it is the usual choice then.
    """
    posterior = replace(posterior, temperature=settings.temperature)
    held = held if held is not None and len(held) else None
    if held is not None:
        logits, labels = _logits(posterior, held)
        posterior = replace(posterior, logit_temperature=best_temperature(logits, labels))
    if not isinstance(settings.prior_precision, str):
        return posterior.with_prior(float(settings.prior_precision))
    if settings.prior_precision == "auto" and own is not None:
        return posterior.with_prior(own)
    by_holdout = settings.prior_precision == "holdout" or (settings.prior_precision == "auto" and held is not None)
    if not by_holdout:
        return posterior.with_prior(by_marginal_likelihood(posterior))
    require(
        held is not None,
        "uncertainty.prior_precision holdout needs data that no client trains on, got none; use --data.validation 0.1 "
        "or --data.holdout 0.1, or --uncertainty.prior_precision marglik",
    )
    assert held is not None
    return posterior.with_prior(by_holdout_nll(posterior, held))


def by_marginal_likelihood(posterior: Posterior, grid: Sequence[float] = GRID) -> float:
    """The precision of the grid with the largest marginal likelihood."""
    return max(grid, key=lambda tau: posterior.with_prior(tau).log_marginal_likelihood())


def by_holdout_nll(posterior: Posterior, held: ClientData, grid: Sequence[float] = GRID) -> float:
    """The precision of the grid with the smallest NLL of the probit prediction; held-out data are linearised once."""
    columns = zip(*(posterior.with_prior(tau).inverses() for tau in grid), strict=True)
    inverses = [torch.stack(column).to(posterior.task.dtype) for column in columns]
    nll = torch.zeros(len(grid), dtype=torch.float64)
    seen = 0
    for x, y in held.blocks(BLOCK):
        activity.say(f"prior precision, {seen} of {len(held)} samples")
        seen += len(y)
        linear = linearise(posterior.task, posterior.weights, x, last_only=posterior.form == "last_layer")
        features = [block.features(linear.layers) for block in posterior.blocks]
        variances = sum(f.variances(i).double() for f, i in zip(features, inverses, strict=True))
        assert isinstance(variances, Tensor)
        for place, variance in enumerate(variances):
            nll[place] -= log_probit(linear.logits, variance).gather(1, y[:, None]).sum().cpu()
    return grid[int(nll.argmin())]


def _logits(posterior: Posterior, held: ClientData) -> tuple[Tensor, Tensor]:
    with posterior.task.evaluating():
        found = [(posterior.task.logits(posterior.weights, x), y) for x, y in held.blocks()]
    return torch.cat([logits for logits, _ in found]), torch.cat([y for _, y in found])


def best_temperature(logits: Tensor, labels: Tensor) -> float:
    """T that minimises the mean NLL of softmax(f / T) (Guo et al. 2017): golden section in ln T.

    The NLL is convex in 1/T, hence has one valley in ln T. Where every sample is right, or none better than chance, the
    best T lies at 0 or infinity, and the end of the range is taken.

    Args:
        logits: Samples x classes, of held-out data.
        labels: Their classes.
    """
    doubles = logits.double()

    def nll(place: float) -> float:
        return float(torch.nn.functional.cross_entropy(doubles / math.exp(place), labels))

    low, high = LOWEST, HIGHEST
    left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
    at_left, at_right = nll(left), nll(right)
    while high - low > LENGTH:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - GOLDEN * (high - low)
            at_left = nll(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + GOLDEN * (high - low)
            at_right = nll(right)
    return math.exp((low + high) / 2)
