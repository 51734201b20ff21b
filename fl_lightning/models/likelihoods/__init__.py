"""What a model's outputs say of the targets: one likelihood per file, found here by the name of its task."""

from typing import Literal, get_args

from fl_lightning.errors import require
from fl_lightning.models.likelihoods.base import Likelihood
from fl_lightning.models.likelihoods.bernoulli import Binary, MultiLabel
from fl_lightning.models.likelihoods.classification import Classification
from fl_lightning.models.likelihoods.regression import Regression
from fl_lightning.models.likelihoods.tokens import PADDING, Tokens

__all__ = [
    "PADDING",
    "Binary",
    "Classification",
    "Likelihood",
    "MultiLabel",
    "Regression",
    "TaskName",
    "Tokens",
    "likelihood_of",
]

# The values of the setting `data.task`; auto: what the targets look like.
TaskName = Literal["auto", "classification", "binary", "multilabel", "regression", "tokens"]

ALL: tuple[type[Likelihood], ...] = (Classification, Binary, MultiLabel, Regression, Tokens)


def likelihood_of(task: str, noise: float = 1.0) -> Likelihood:
    """The likelihood of a task that is known.

    Args:
        task: Not auto.
        noise: Of a regression; others have none.
    """
    found = next(cls for cls in ALL if cls.task == task)
    if found is Regression:
        return Regression(noise)
    require(
        noise == 1.0,
        f"data.noise is the noise of a regression, got {noise:g} for data.task {task}; leave it out, or use "
        "--data.task regression",
    )
    return found()


assert {"auto", *(cls.task for cls in ALL)} == set(get_args(TaskName))
