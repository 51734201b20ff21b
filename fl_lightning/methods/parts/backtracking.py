"""A client that ends worse than it began goes back towards where it began, by halves, until it does not.

    y_n <- x + s (y_n - x),   s the largest of 1, 1/2, 1/4, ... with J_n(x + s (y_n - x)) <= J_n(x)

J_n is what the client has trained on: the mean loss of all its samples, in evaluation mode and without augmentation,
and its penalty. With a cavity's correction added the last steps of a round may leave a client far up: the others' pull
does not end where its own loss saturates. Whoever goes downhill, as on a quadratic loss, is left as it is.

Running statistics, as BatchNorm has, belong to one end of the way: networks that have some are refused.
"""

import math

from fl_lightning.errors import Diverged, require
from fl_lightning.method import Local
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params, zip_map
from fl_lightning.penalty import Penalty

# Shorter steps than 1/64 are none.
HALVINGS = 6


def require_no_running_statistics(who: str, task: Task) -> None:
    """Raise `UserError` for networks whose loss at a model depends on how training has come there."""
    require(
        all(getattr(module, "running_mean", None) is None for module in task.model.modules()),
        f"{who} compares losses along the way and expected a network without running statistics, got one with "
        "BatchNorm; leave it out, or use a model with GroupNorm or without normalisation",
    )


def backtracked(local: Local, start: Params, penalty: Penalty | None) -> Params:
    """The client's model, nearer to `start` if need be.

    Raises:
        Diverged: If the shortest step, or the start itself, has no loss: the next round would begin where this one did.
    """
    most = reached = _objective(local, start, penalty)
    for halving in range(HALVINGS + 1):
        params = local.params if halving == 0 else _between(start, local.params, 0.5**halving)
        reached = _objective(local, params, penalty)
        if reached <= most:  # never, if it is not a number
            return params
    if math.isnan(most) or not math.isfinite(reached):
        raise Diverged(local.plan.round, local.client)
    return start


def _between(start: Params, end: Params, share: float) -> Params:
    return zip_map(lambda x, y: (x.double() + share * (y.double() - x.double())).to(x.dtype), start, end)


def _objective(local: Local, params: Params, penalty: Penalty | None) -> float:
    task, weights = local.task, Weights(params, local.buffers)
    with task.evaluating():
        total = sum(float(task.loss(weights, x, y)) * len(y) for x, y in local.data.blocks())
    return total / len(local.data) + (0.0 if penalty is None else float(penalty.value(params)))
