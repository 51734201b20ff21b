"""The posterior that a method itself keeps, instead of one more round: FOLA's running precision, or that of EP.

    running  H = c Lambda_S             Lambda_S: mean curvature over clients and rounds; c: its scale, see below
    ep       H = (S_S - prior I) / m    S_S: the precision of the posterior itself, a sum over samples and the prior

The curvature of earlier rounds is that of earlier models, and with partial participation of those who took part: these
are the method's own, not the Laplace posterior of its final model. Squared gradients of minibatches are about
as many times too small as a batch has samples, E[g_B^2] = mean^2 + variance / B, hence c.
"""

from collections.abc import Sequence

from fl_lightning.data.batches import ClientData
from fl_lightning.errors import require
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.blocks import Blocks
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.full import Full
from fl_lightning.gaussian.kronecker import Kron
from fl_lightning.method import MethodPosterior
from fl_lightning.metrics.uncertainty.sample_curvature import (
    GRADIENTS,
    INPUTS,
    MATRIX,
    Pooled,
    require_finite,
    total_loss,
)
from fl_lightning.metrics.uncertainty.settings import Form, Uncertainty
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params


def check(name: str, own: MethodPosterior | None, settings: Uncertainty) -> None:
    """Refuse a source that the method does not have, or not in this form.

    Args:
        name: Of the method.
        own: The posterior that the method keeps, if any.
        settings: The source and form that are asked for.
    """
    source = settings.source
    known = None if own is None else ("running" if own.prior is None else "ep")
    what = "curvature over the rounds, as fola does" if source == "running" else "a product of factors, as ep does"
    instead = f"use --uncertainty.source {known}, or final_round" if known else "use final_round, which any method has"
    require(
        known == source,
        f"uncertainty.source {source} expected a method that keeps {what}, got {name}; {instead}",
    )
    assert own is not None
    form = form_of(own.posterior)
    require(
        form is not None,
        f"uncertainty.source {source} does not support the precision of {name}; use --uncertainty.source final_round",
    )
    require(
        form == settings.form,
        f"uncertainty.source {source} has the form in which {name} keeps its precision, {form}, got "
        f"--uncertainty.form {settings.form}; use --uncertainty.form {form}",
    )
    require(
        source == "running" or settings.prior_precision != "marglik",
        "uncertainty.prior_precision marglik expected a prior around 0, got that of ep, which is around the initial "
        "weights; use auto, holdout or a number",
    )


def form_of(posterior: Gaussian) -> Form | None:
    """The form in which a posterior is used; None if it has none of them."""
    if isinstance(posterior, Diagonal):
        return "diagonal"
    if isinstance(posterior, Full):
        return "full"
    if isinstance(posterior, Blocks):
        kinds = [type(block) for block in posterior.blocks.values()]
        if kinds and all(kind is Kron for kind in kinds):
            return "kron"
        if kinds and kinds[0] is Full:  # what is known of the others is left aside: they are taken for certain
            return "last_layer"
    return None


def pooled(own: MethodPosterior, task: Task, weights: Weights, clients: Sequence[ClientData]) -> Pooled:
    """The same as a final round brings, from what the server has already; clients send their losses alone."""
    samples = sum(map(len, clients))
    scale = own.scale if own.prior is None else 1 / samples
    found = _parts(own.posterior, scale, own.prior or 0.0)
    require_finite(found)
    losses = sum(total_loss(task, weights, data) for data in clients)
    return Pooled(found, losses / samples, samples, len(clients))


def _parts(posterior: Gaussian, scale: float, prior: float) -> Params:
    """H by the names that `posterior.build` knows, in float64."""
    if isinstance(posterior, Diagonal):
        return {name: (value.double() - prior).clamp(min=0) * scale for name, value in posterior.precision.items()}
    if isinstance(posterior, Full):
        return {MATRIX: posterior.matrix.double() * scale}
    assert isinstance(posterior, Blocks)
    found: Params = {}
    for weight, block in posterior.blocks.items():
        if isinstance(block, Kron):
            found |= {f"{INPUTS}{weight}": block.inputs.double(), f"{GRADIENTS}{weight}": block.slopes.double() * scale}
        elif isinstance(block, Full):
            found[MATRIX] = block.matrix.double() * scale
    return found
