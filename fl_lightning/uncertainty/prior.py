"""The precision of the prior: given, by the marginal likelihood, or by held-out data; never by the test set."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fl_lightning.data.plan import ClientData
from fl_lightning.errors import require
from fl_lightning.system import activity
from fl_lightning.uncertainty.posterior import Posterior
from fl_lightning.uncertainty.predictive import log_probit
from fl_lightning.uncertainty.settings import Uncertainty
from fl_lightning.uncertainty.slopes import linearise
from fl_lightning.uncertainty.temperature import best_temperature

# 10^-4 to 10^4, five for each power of ten.
GRID = tuple(10 ** (step / 5) for step in range(-20, 21))
# Held-out samples that are linearised together.
BLOCK = 100


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
