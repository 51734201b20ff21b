"""Control variates, estimates of every client's gradient and of their mean, as SCAFFOLD and FOLA's cavity use them.

    c_n+ = c_n - c + (x - y_n) / (K_n lr)       the mean gradient along client n's path of K_n steps from x to y_n
    c   <- c + sum_n q_n (c_n+ - c_n)           q_n: the client's weight among all clients, so that c = sum_n q_n c_n

A client that adds <c - c_n, theta> to its loss then moves as the clients do on average. Where something else has acted
at the client, too, such as a prior, its path says less than the gradients do:

    c_n+ = (1/K_n) sum_t g_t                    g_t: gradient of the likelihood alone in step t
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl_lightning.client_state import ClientMemory
from fl_lightning.errors import require
from fl_lightning.method import Cohort, Local, Step
from fl_lightning.params import Params, add_all, flatten, weighted_sum, zeros, zip_map
from fl_lightning.training import Training, require_sgd


class ControlVariates(NamedTuple):
    """The control variates of all.

    Attributes:
        mean: c, that of all clients.
        clients: c_n of every client; zero for those that have not taken part yet.
    """

    mean: Params
    clients: ClientMemory[Params]

    @classmethod
    def blank(cls, params: Params) -> "ControlVariates":
        """All zero."""
        return cls(zeros(params), ClientMemory.blank(zeros(params)))

    def renewed(self, cohort: Cohort, changes: Sequence[Params]) -> "ControlVariates":
        """The control variates after the changes c_n+ - c_n of a cohort."""
        move = weighted_sum(changes, cohort.shares)
        mean = zip_map(lambda c, m: c.double().add(m).to(c.dtype), self.mean, move)
        rows = {
            n: zip_map(torch.add, self.clients[n], change) for n, change in zip(cohort.members, changes, strict=True)
        }
        return ControlVariates(mean, self.clients.replaced(rows))


class Path(NamedTuple):
    """Statistics of a path, and the gradients of the likelihood beside them.

    Attributes:
        own: What the method itself folds up, possibly nothing.
        gradients: The sum of g_t.
    """

    own: Any
    gradients: Params

    def seen(self, own: Any, step: Step) -> "Path":
        """The path after a step, with the method's own statistics after it."""
        if isinstance(step.fraction, float):  # of one client, whose sums stay private
            add_all(list(self.gradients.values()), [step.grad[name] for name in self.gradients])
            return self._replace(own=own)
        return Path(own, zip_map(torch.add, self.gradients, step.grad))

    def change(self, num_steps: int, own: Params) -> Params:
        """c_n+ - c_n of a client whose control variate was c_n."""
        if num_steps == 0:
            return zeros(own)
        return zip_map(lambda g, c: (g.double() / num_steps - c.double()).to(c.dtype), self.gradients, own)


def check(who: str, training: Training) -> None:
    """Raise `UserError` for optimisers along whose path (x - y_n) / (K_n lr) is not a mean gradient."""
    require_sgd(training, f"{who} takes mean gradients from plain SGD")
    require(
        training.momentum == 0,
        f"{who} takes mean gradients from plain SGD, expected training.momentum 0, got {training.momentum}; "
        "set --training.momentum 0 or leave it out",
    )
    require(
        training.clip_norm is None,
        f"{who} adds a correction that must not be clipped, expected training.clip_norm null, got "
        f"{training.clip_norm}; set --training.clip_norm null, or lower training.lr if it diverges",
    )


def change_along_path(local: Local, start: Params, mean: Params) -> Params:
    """The change c_n+ - c_n of a client that has trained from `start` with c - c_n added to its gradient."""
    length = local.training.path_length(local.num_steps)
    if length == 0:  # the path says nothing about the gradient
        return zeros(start)

    def change(x: Tensor, y: Tensor, c: Tensor) -> Tensor:  # c_n itself drops out
        return ((x.double() - y.double()) / length - c.double()).to(x.dtype)

    return zip_map(change, start, local.params, mean)


def excesses(before: ControlVariates, cohort: Cohort, changes: Sequence[Params]) -> list[float]:
    """Distances of the members' new control variates from the mean, sqrt(K_n) ||c_n+ - c+||, in units of the others'.

    The unit is their root mean square. A mean of K gradients is known up to 1/sqrt(K): with the root clients of very
    different sizes are alike.
    """
    after = before.renewed(cohort, changes)
    distances = [
        sqrt(num_steps(cohort, n, epochs)) * _norm(zip_map(_minus, after.clients[n], after.mean))
        for n, epochs in zip(cohort.members, cohort.epochs, strict=True)
    ]
    parts = [weight * distance**2 for weight, distance in zip(cohort.weights, distances, strict=True)]
    result = []
    for position, (weight, distance) in enumerate(zip(cohort.weights, distances, strict=True)):
        others = sum(parts[:position] + parts[position + 1 :])  # not by a difference: one may be all there is
        result.append(distance / sqrt(others / (1 - weight)) if others > 0 else 0.0)
    return result


def limited(before: ControlVariates, cohort: Cohort, changes: Sequence[Params], limit: float | None) -> list[Params]:
    """The changes, limited so that every control variate ends within `limit` times the unit of `excesses`.

    The control variate of a client with few samples can feed on itself: its K_n lr is short, its curvature times lr
    may exceed 2, and the correction keeps it where that is so. With equal K_n a client with at least 1 / (1 + limit) of
    the weight is never limited, since the distances c - c_n add up to zero. None sets no limit.
    """
    if limit is None:
        return list(changes)
    after = before.renewed(cohort, changes)
    result = []
    for n, change, excess in zip(cohort.members, changes, excesses(before, cohort, changes), strict=True):
        if excess > limit:
            share = 1 - limit / excess
            change = zip_map(lambda d, c, own, s=share: d + s * (c - own), change, after.mean, after.clients[n])
        result.append(change)
    return result


def num_steps(cohort: Cohort, client: int, epochs: int) -> int:
    """K_n of a member of the cohort."""
    server = cohort.server
    return epochs * cohort.training.steps_per_epoch(server.sizes[client], server.smallest_batch)


def _minus(a: Tensor, b: Tensor) -> Tensor:
    return a.double() - b.double()


def _norm(params: Params) -> float:
    return float(flatten(params).norm())
