"""The optimiser that the settings name, as a rule."""

from typing import TypeGuard

from fl_lightning.rules.adam import Adam
from fl_lightning.rules.rule import Rule
from fl_lightning.rules.sgd import Sgd
from fl_lightning.training import Training


def usual(training: Training) -> Sgd | Adam:
    """SGD, Adam or AdamW, as `training.optimiser` says."""
    return Sgd(training) if training.is_sgd else Adam(training)


def is_usual(rule: Rule) -> TypeGuard[Sgd | Adam]:
    """Whether a rule is one of them, which the Lightning engine leaves to torch.optim, and not a method's own."""
    return isinstance(rule, Sgd | Adam)
