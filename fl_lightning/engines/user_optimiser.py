"""The optimiser that a user's LightningModule brings, stepped without Lightning as Lightning would."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.errors import UserError, require
from fl_lightning.models.lightning_module import UserStep


class Schedule(NamedTuple):
    """A scheduler of learning rates, with the keys that Lightning documents for it.

    Attributes:
        scheduler: One of torch's.
        interval: After what it is stepped: "epoch" or "step".
        frequency: It is stepped after so many of these.
        monitor: The metric that it waits for, if it does.
    """

    scheduler: Any
    interval: str = "epoch"
    frequency: int = 1
    monitor: str | None = None

    @property
    def waits_for_a_metric(self) -> bool:
        return isinstance(self.scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def documented_form(found: Any) -> tuple[list[Any], list[Schedule]]:
    """Optimisers and schedules in what `configure_optimizers` returns, in any of the forms that Lightning documents.

    These are an optimiser; a list of optimisers; a list of optimisers and one of schedulers; a dict with "optimizer"
    and "lr_scheduler"; several such dicts; and None.
    """
    if found is None:
        return [], []
    if isinstance(found, Mapping):
        given = found.get("lr_scheduler")
        return [found["optimizer"]], [] if given is None else [_schedule(given)]
    if isinstance(found, list | tuple):
        if len(found) == 2 and all(isinstance(part, list | tuple) for part in found):
            return list(found[0]), [_schedule(given) for given in found[1]]
        parts = [documented_form(part) for part in found]
        return [one for part, _ in parts for one in part], [one for _, part in parts for one in part]
    return [found], []


def _schedule(given: Any) -> Schedule:
    if not isinstance(given, Mapping):
        return Schedule(given)
    return Schedule(**{name: given[name] for name in Schedule._fields if name in given})


def configured(step: UserStep, frozen: frozenset[str]) -> Any:
    """What a module's `configure_optimizers` returns, refused unless one optimiser is stepped once for every batch."""
    require(
        not frozen,
        f"the method freezes parameters, which the optimiser of {step.name} does not know of; set --training.optimiser "
        "sgd, adam or adamw",
    )
    returned = step.configure_optimizers()
    optimisers = documented_form(returned)[0]
    found = ", ".join(type(one).__name__ for one in optimisers) or "none"
    require(
        len(optimisers) == 1 and not isinstance(optimisers[0], torch.optim.LBFGS),
        f"{step.name}.configure_optimizers must return one optimiser that takes one gradient per step, got {found}; "
        "return one such as torch.optim.Adam, or set --training.optimiser sgd",
    )
    return returned


class UserOptimiser:
    """Optimiser and schedulers of a module's `configure_optimizers`, at work on its own parameters.

    Args:
        step: The module.
        frozen: Parameters that the method freezes: none may be.
        clip_norm: Largest norm of the gradient; None does not clip.
    """

    def __init__(self, step: UserStep, frozen: frozenset[str], clip_norm: float | None) -> None:
        optimisers, self.schedules = documented_form(configured(step, frozen))
        self.optimiser: torch.optim.Optimizer = optimisers[0]
        self.clip_norm = clip_norm
        if any(schedule.waits_for_a_metric for schedule in self.schedules):
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
        for schedule in self.schedules:
            number = position if schedule.interval == "step" else epoch
            if (schedule.interval == "step" or ends) and (number + 1) % schedule.frequency == 0:
                schedule.scheduler.step()
        for parameter in params:
            parameter.grad = None
