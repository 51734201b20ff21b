"""The forms of curvature by name, and which of them suits a run."""

from typing import Literal

from fl_lightning.data.model_checks import loss_is_likelihood
from fl_lightning.errors import UserError, require
from fl_lightning.method import Method, Server
from fl_lightning.methods.parts.curvature_form import Form, Measuring
from fl_lightning.methods.parts.dense_forms import EigenvaluesAsDiagonal, FullMatrix
from fl_lightning.methods.parts.diagonal_form import DiagonalFisher
from fl_lightning.methods.parts.layer_forms import OfInputs, OfInputsAndGradients, OfLastLayer
from fl_lightning.training import Training

FormName = Literal["diagonal", "inputs", "kron", "last_layer", "full", "e_full"]

FORMS: dict[FormName, type[Form]] = {
    "diagonal": DiagonalFisher,
    "inputs": OfInputs,
    "kron": OfInputsAndGradients,
    "last_layer": OfLastLayer,
    "full": FullMatrix,
    "e_full": EigenvaluesAsDiagonal,
}


def require_suitable(
    name: FormName, measuring: Measuring, method: Method, strength: float, training: Training, server: Server
) -> None:
    """Raise `UserError` for a form that does not suit the other settings, the network, or the weight of a prior.

    Args:
        name: Of the form.
        measuring: The user's choices.
        method: Whose fields beyond their defaults must not be about other forms.
        strength: Of the prior loss, as far as it has a gradient.
        training: How clients train.
        server: What the server has.
    """
    form = FORMS[name](measuring)
    for field in sorted(frozenset().union(*(other.uses for other in FORMS.values())) - form.uses):
        _require_used(method, field, name)
    if form.needs_likelihood:
        _require_likelihood(name, server)
    form.check(name, training, server)
    precision = form.certain_precision(server)
    require(
        training.lr * strength * precision < 2 or not training.is_sgd,
        f"method.strength {strength:g} at training.lr {training.lr:g} is sure to diverge with "
        f"--method.curvature_form {name}, whose precision is {precision:g} for a bias; use --method.strength 0, or one "
        f"that is far below 2 / ({precision:g} training.lr)",
    )


def _require_used(method: Method, field: str, form: FormName) -> None:
    """Refuse a setting of a method beyond its default with a form that does not look at it."""
    declared = type(method).__dataclass_fields__.get(field)
    if declared is None or getattr(method, field) == declared.default:
        return
    owners = " or ".join(name for name, cls in FORMS.items() if field in cls.uses)
    raise UserError(
        f"method.{field} {getattr(method, field)} is for --method.curvature_form {owners}, got {form}; remove "
        f"method.{field}, or use --method.curvature_form {owners}"
    )


def _require_likelihood(form: str, server: Server) -> None:
    """Refuse a form that is made of the likelihood where the training step of a user's module has another loss."""
    require(
        loss_is_likelihood(server.task, server.holdout),
        f"method.curvature_form {form} is about the likelihood of the outputs, but the training_step of "
        f"{type(server.task.model).__name__} has another loss; use --method.curvature_form diagonal",
    )
