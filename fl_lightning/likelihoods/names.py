"""The likelihoods by the name of their task, as the setting `data.task` has it."""

from typing import Literal, get_args

from fl_lightning.errors import require
from fl_lightning.likelihoods.bernoulli import Binary, MultiLabel
from fl_lightning.likelihoods.classification import Classification
from fl_lightning.likelihoods.likelihood import Likelihood
from fl_lightning.likelihoods.regression import Regression
from fl_lightning.likelihoods.tokens import Tokens

# auto: what the targets look like.
Name = Literal["auto", "classification", "binary", "multilabel", "regression", "tokens"]

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


assert {"auto", *(cls.task for cls in ALL)} == set(get_args(Name))
