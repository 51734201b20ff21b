"""The forms of curvature by name, and which of them suits a run."""

from typing import Literal

from fl_lightning.batching import loss_is_likelihood
from fl_lightning.curvature.dense import EigenvaluesAsDiagonal, FullMatrix
from fl_lightning.curvature.diagonal import DiagonalFisher
from fl_lightning.curvature.form import Form
from fl_lightning.curvature.layered import OfInputs, OfInputsAndSlopes, OfLastLayer
from fl_lightning.errors import require
from fl_lightning.method import Method, Server
from fl_lightning.training import Training

FormName = Literal["diagonal", "inputs", "kron", "last_layer", "full", "e_full"]

FORMS: dict[FormName, type[Form]] = {
    "diagonal": DiagonalFisher,
    "inputs": OfInputs,
    "kron": OfInputsAndSlopes,
    "last_layer": OfLastLayer,
    "full": FullMatrix,
    "e_full": EigenvaluesAsDiagonal,
}


def require_suitable(
    name: FormName, form: Form, method: Method, strength: float, training: Training, server: Server
) -> None:
    """Raise `UserError` for a form that does not suit the other settings, the network, or the strength of a prior.

    Args:
        name: Of the form.
        form: The form with the user's choices.
        method: Whose fields beyond their defaults must not be about other forms.
        strength: Of the prior loss, as far as it has a gradient.
        training: How clients train.
        server: What the server has.
    """
    for field in sorted(frozenset().union(*(other.uses for other in FORMS.values())) - form.uses):
        value = getattr(method, field)
        owners = " or ".join(other for other, cls in FORMS.items() if field in cls.uses)
        require(
            value == type(method).__dataclass_fields__[field].default,
            f"method.{field} {value} is for --method.curvature_form {owners}, got {name}; leave one out",
        )
    require(
        not form.needs_likelihood or loss_is_likelihood(server.task, server.holdout),
        f"method.curvature_form {name} is about the likelihood of the outputs, but the training_step of "
        f"{type(server.task.model).__name__} has another loss; use --method.curvature_form diagonal",
    )
    form.check(name, training, server)
    precision = form.certain_precision(server)
    require(
        training.lr * strength * precision < 2 or not training.is_sgd,
        f"method.strength {strength:g} at training.lr {training.lr:g} is sure to diverge with "
        f"--method.curvature_form {name}, whose precision is {precision:g} for a bias; use --method.strength 0, or one "
        f"that is far below 2 / ({precision:g} training.lr)",
    )
