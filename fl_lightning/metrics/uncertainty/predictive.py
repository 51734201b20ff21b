"""Predictions from a posterior.

    map          softmax(f)                                           f: the logits of the mean
    temperature  softmax(f / T), T fitted on held-out data
    probit       softmax(f / sqrt(1 + pi/8 diag S)),  S = J P^-1 J^T   (MacKay 1992; the default of laplace-torch)
    glm_mc       mean of softmax(f + S^1/2 e) over draws of e
    nn           mean of softmax(f(theta)) over draws of theta
    ensemble     sum_n p_n softmax(f_n), over the clients' models or those that a method samples

probit and glm_mc linearise the network at the mean; J is never formed (`linearised`). Draws from a diagonal posterior
are known to underfit where the prior is wide, the linearised network much less: hence the default. The same draws serve
all inputs, so that results do not depend on how inputs are cut into blocks.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fl_lightning import streams
from fl_lightning.errors import require
from fl_lightning.metrics.uncertainty.eigenblocks import DenseBlock
from fl_lightning.metrics.uncertainty.linearised import linearise
from fl_lightning.models.inputs import Inputs, part, split
from fl_lightning.models.task import Weights

if TYPE_CHECKING:
    from fl_lightning.metrics.uncertainty.posterior import Posterior

NO_TEMPERATURE = "the predictive temperature needs held-out data to fit it on, got none; use --data.validation 0.1"
# Numbers in the gradients of a block that are in memory at once: 128 MB in float32.
LARGEST_BLOCK = 2**25
MOST_SAMPLES = 500


class Prediction(NamedTuple):
    """What is predicted for some inputs.

    Attributes:
        log_probabilities: Samples x classes, in float64.
        spread: Standard deviations of the probabilities under the posterior, samples x classes; zero for map and
            temperature, which have none. For probit to first order in the logits. None where not asked for.
        information: Of draws and ensembles, the mutual information of prediction and model: how much they disagree.
    """

    log_probabilities: Tensor
    spread: Tensor | None = None
    information: Tensor | None = None

    @property
    def probabilities(self) -> Tensor:
        """Samples x classes."""
        return self.log_probabilities.exp()

    @property
    def entropy(self) -> Tensor:
        """-sum_k p_k ln p_k of every sample: 0 where one class is certain, ln K where nothing is known."""
        entropy: Tensor = torch.special.entr(self.probabilities).sum(1)
        return entropy


def predict(posterior: "Posterior", x: Inputs, kinds: Sequence[str], spread: bool = False) -> dict[str, Prediction]:
    """Predictions of several kinds for the same inputs, which are linearised once.

    Args:
        posterior: From which.
        x: Inputs as the network takes them.
        kinds: Some of `uncertainty.kinds.KINDS`.
        spread: Whether the standard deviations of the probabilities are wanted.
    """
    parts: dict[str, list[Prediction]] = {kind: [] for kind in kinds}
    drawn = [posterior.draw(number) for number in range(posterior.draws)] if "nn" in kinds else []
    models = [(Weights(params, posterior.weights.buffers), 1 / len(drawn)) for params in drawn]
    inverses = posterior.inverses() if {"probit", "glm_mc"} & set(kinds) else []
    for block in split(x, _block_size(posterior, x, kinds)):
        found = _of_mean(posterior, block, kinds, spread)
        if inverses:
            found |= _linearised(posterior, block, inverses, kinds, spread)
        if "nn" in kinds:
            found["nn"] = _mixture(posterior, models, block, spread)
        if "ensemble" in kinds:
            require(
                len(posterior.members) > 0,
                "the predictive ensemble needs the clients' models of the last round, which this run has not kept; "
                "compute it with --uncertainty.final_round true --uncertainty.predictive '[ensemble]'",
            )
            found["ensemble"] = _mixture(posterior, posterior.members, block, spread)
        for kind in kinds:
            parts[kind].append(found[kind])
    return {kind: _joined(several) for kind, several in parts.items()}


def log_probit(logits: Tensor, variance: Tensor) -> Tensor:
    """MacKay's approximation of the mean of softmax under independent Gaussian logits."""
    return (logits.double() / (1 + math.pi / 8 * variance.double()).sqrt()).log_softmax(1)


def _of_mean(posterior: "Posterior", x: Inputs, kinds: Sequence[str], spread: bool) -> dict[str, Prediction]:
    if not {"map", "temperature"} & set(kinds):
        return {}
    with posterior.task.evaluating():
        logits = posterior.task.logits(posterior.weights, x).double()
    nothing = torch.zeros_like(logits) if spread else None
    scale = posterior.logit_temperature
    require(scale is not None or "temperature" not in kinds, NO_TEMPERATURE)
    return {
        "map": Prediction(logits.log_softmax(1), nothing),
        "temperature": Prediction((logits / (scale or 1.0)).log_softmax(1), nothing),
    }


def _linearised(
    posterior: "Posterior", x: Inputs, inverses: Sequence[Tensor], kinds: Sequence[str], spread: bool
) -> dict[str, Prediction]:
    linear = linearise(posterior.task, posterior.weights, x, last_only=posterior.form == "last_layer")
    logits = linear.logits.double()
    features = [block.features(linear.layers) for block in posterior.blocks]
    found: dict[str, Prediction] = {}
    if "glm_mc" not in kinds and not spread:
        variance = sum(f.variance(i).double() for f, i in zip(features, inverses, strict=True))
        assert isinstance(variance, Tensor)
        return {"probit": Prediction(log_probit(logits, variance))}
    covariance = sum(f.covariance(i).double() for f, i in zip(features, inverses, strict=True))
    assert isinstance(covariance, Tensor)
    if "probit" in kinds:
        logs = log_probit(logits, covariance.diagonal(dim1=1, dim2=2))
        found["probit"] = Prediction(logs, _first_order(logs, covariance) if spread else None)
    if "glm_mc" in kinds:
        values, vectors = torch.linalg.eigh(covariance)
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
        stream = streams.generator(posterior.seed, "logits")
        noise = torch.randn(posterior.glm_draws, logits.shape[1], generator=stream, dtype=torch.float64)
        shifts = noise.to(logits.device) @ root.mT  # samples x draws x classes
        logs = (logits.unsqueeze(1) + shifts).log_softmax(2).transpose(0, 1)
        shares = torch.full((len(logs),), 1 / len(logs), dtype=torch.float64, device=logits.device)
        found["glm_mc"] = _mixed(logs, shares, spread)
    return found


def _first_order(logs: Tensor, covariance: Tensor) -> Tensor:
    """Standard deviations of softmax(f) to first order: of D S D with D = diag p - p p^T."""
    p = logs.exp()
    jacobian = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    return (jacobian @ covariance @ jacobian).diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()


def _mixture(posterior: "Posterior", models: Sequence[tuple[Weights, float]], x: Inputs, spread: bool) -> Prediction:
    with posterior.task.evaluating():
        logs = torch.stack([posterior.task.logits(weights, x).double().log_softmax(1) for weights, _ in models])
    shares = torch.tensor([share for _, share in models], dtype=torch.float64, device=logs.device)
    return _mixed(logs, shares, spread)


def _mixed(logs: Tensor, shares: Tensor, spread: bool) -> Prediction:
    """The mean of several predictions, draws x samples x classes."""
    mean = (logs + shares.log()[:, None, None]).logsumexp(0)
    entropy = torch.special.entr(mean.exp()).sum(1)
    within = torch.einsum("s,sbk->b", shares, torch.special.entr(logs.exp()))
    deviation = None
    if spread:
        deviation = torch.einsum("s,sbk->bk", shares, (logs.exp() - mean.exp()).square()).sqrt()
    return Prediction(mean, deviation, (entropy - within).clamp(min=0))


def _joined(parts: Sequence[Prediction]) -> Prediction:
    logs, spreads, information = zip(*parts, strict=True)
    return Prediction(torch.cat(logs), _cat(spreads), _cat(information))


def _cat(parts: Sequence[Tensor | None]) -> Tensor | None:
    known = [part for part in parts if part is not None]
    return torch.cat(known) if known else None


def _block_size(posterior: "Posterior", x: Inputs, kinds: Sequence[str]) -> int:
    """Samples that are looked at together, so that their gradients fit into memory."""
    if not {"probit", "glm_mc"} & set(kinds):
        return MOST_SAMPLES
    linear = linearise(
        posterior.task, posterior.weights, part(x, slice(0, 1)), last_only=posterior.form == "last_layer"
    )
    stored = sum(layer.gradients.numel() for layer in linear.layers.values())
    # Where a Jacobian is a sum over places, or has to be turned as a whole, it is formed after all.
    formed = [
        block.spectrum.numel()
        for block in posterior.blocks
        if isinstance(block, DenseBlock) or linear.layers[block.weight].rows.shape[1] > 1
    ]
    numbers = stored + sum(formed) * linear.logits.shape[1]
    return max(1, min(MOST_SAMPLES, LARGEST_BLOCK // max(1, numbers)))
