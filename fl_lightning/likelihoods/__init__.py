"""What a model's outputs say of the targets: one likelihood per file, `names.py` has them by the name of their task."""

from fl_lightning.likelihoods.bernoulli import Binary, MultiLabel
from fl_lightning.likelihoods.classification import Classification
from fl_lightning.likelihoods.likelihood import Likelihood
from fl_lightning.likelihoods.regression import Regression
from fl_lightning.likelihoods.tokens import PADDING, Tokens

__all__ = ["PADDING", "Binary", "Classification", "Likelihood", "MultiLabel", "Regression", "Tokens"]
