"""The optimiser that a LightningModule brings, stepped without Lightning as Lightning would."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl_lightning.errors import UserError, require
from fl_lightning.own import OwnStep


class OwnOptimiser:
    """Optimiser and schedulers of a module's `configure_optimizers`, at work on its own parameters.

    Args:
        step: The module.
        clip_norm: Largest norm of the gradient; None does not clip.
    """

    def __init__(self, step: OwnStep, clip_norm: float | None) -> None:
        from pytorch_lightning.core.optimizer import _configure_optimizers, _configure_schedulers_automatic_opt

        module: Any = step.module
        optimisers, schedulers, monitor = _configure_optimizers(module.configure_optimizers())
        require_one(step.name, optimisers)
        self.optimiser: torch.optim.Optimizer = optimisers[0]
        self.schedulers = _configure_schedulers_automatic_opt(schedulers, monitor)
        self.clip_norm = clip_norm
        if any(config.reduce_on_plateau for config in self.schedulers):
            raise UserError(
                f"{step.name} lowers its learning rate by what it has logged (ReduceLROnPlateau), which only Lightning "
                "keeps; use --engine lightning"
            )

    def step(self, params: Sequence[Tensor], grads: Sequence[Tensor], epoch: int, position: int, ends: bool) -> None:
        """One update of the parameters in place.

        Args:
            params: Of the module.
            grads: Of the whole local loss.
            epoch: Number of the epoch in the round, from 0.
            position: Of the batch in the epoch, from 0.
            ends: Whether it is the last one.
        """
        for parameter, grad in zip(params, grads, strict=True):
            parameter.grad = grad.clone()  # clipping, or the optimiser, may write into it
        if self.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, self.clip_norm)
        self.optimiser.step()
        for config in self.schedulers:
            number = position if config.interval == "step" else epoch
            if (config.interval == "step" or ends) and (number + 1) % config.frequency == 0:
                config.scheduler.step()  # type: ignore[call-arg]  # none that waits for a metric
        for parameter in params:
            parameter.grad = None


def require_one(name: str, optimisers: Sequence[Any]) -> None:
    """Refuse what cannot be stepped once for every batch."""
    found = ", ".join(type(one).__name__ for one in optimisers) or "none"
    require(
        len(optimisers) == 1 and not isinstance(optimisers[0], torch.optim.LBFGS),
        f"{name}.configure_optimizers must return one optimiser that takes one gradient per step, got {found}; "
        "return one such as torch.optim.Adam, or set --training.optimiser sgd",
    )


def require_nothing_frozen(step: OwnStep, frozen: frozenset[str]) -> None:
    """Refuse a module's own optimiser, which has all its parameters, beside a method that freezes some of them."""
    require(
        not frozen,
        f"the method freezes parameters, which the optimiser of {step.name} does not know of; set --training.optimiser "
        "sgd, adam or adamw",
    )
