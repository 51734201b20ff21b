"""Local optimisers, one per file; the one that the settings name is chosen here."""

from typing import TypeGuard

from fl_lightning.optimisers.adam import Adam
from fl_lightning.optimisers.base import LocalOptimiser
from fl_lightning.optimisers.sgd import Sgd
from fl_lightning.training import Training


def usual(training: Training) -> Sgd | Adam:
    """SGD, Adam or AdamW, as `training.optimiser` says."""
    return Sgd(training) if training.is_sgd else Adam(training)


def is_usual(optimiser: LocalOptimiser) -> TypeGuard[Sgd | Adam]:
    """Whether a rule is one of them, which the Lightning engine leaves to torch.optim, and not a method's own."""
    return isinstance(optimiser, Sgd | Adam)
