"""FedPA, federated posterior averaging: clients sample their posterior by SGD and correct their update with it.

    theta_k  = mean of the iterates of local epoch k, after a burn-in            k = 1 .. l, l posterior samples
    Sigma_n  = rho_l I + (1 - rho_l) S_l        S_l: sample covariance,  rho_l = 1 / (1 + (l - 1) shrinkage)
    Delta_n  = Sigma_n^-1 (theta_S - mean_k theta_k)
    theta_S <- theta_S - server_lr * sum_n p_n Delta_n

Sigma_n is never formed: l - 1 rank-one updates give Delta_n in O(l^2 d) operations and O(l d) memory.

Al-Shedivat, Gillenwater, Xing, Rostamizadeh: Federated Learning via Posterior Averaging: A New Perspective and
Practical Algorithms, ICLR 2021.

Where the two published codes differ, or differ from this one:
- clients send the corrected model theta_S - Delta_n, of the same size as Delta_n: in rounds before `start_round` it is
  the client's model itself, so that these rounds are FedAvg bit for bit;
- a sample is the mean of an epoch, as in the code for neural networks; `window` and `discard` are the windows of steps
  of the code for the synthetic problems;
- `start_round` is 1, not 100: runs here are tens of rounds long, and a default should not switch the method off;
- products are taken in float64, since the samples of a round differ by little; the published code has float32;
- a client whose correction is not finite has weight 0, as in the published code; if that is so for every client, the
  run has diverged, whereas the published code silently goes on with the old model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fl_lightning.errors import require
from fl_lightning.method import Cohort, Context, Local, Method, ObservesPath, Server, Step
from fl_lightning.methods.fedopt import at_rest, momentum_step
from fl_lightning.params import Params, all_finite, average, cast_like, flatten, mean_update, unflatten, zip_map
from fl_lightning.training import Training, require_samples_of_sgd


class State(NamedTuple):
    """The server's model theta_S and its velocity; the latter is empty without momentum."""

    params: Params
    velocity: Params


class PathSums(NamedTuple):
    """For every sample the sum of its iterates in float64, and the number of steps since the burn-in."""

    sums: tuple[Params, ...]
    seen: Tensor


class Report(NamedTuple):
    """The corrected model theta_S - Delta_n; in FedAvg's rounds the client's model."""

    params: Params


@dataclass(frozen=True)
class FedPA(Method, ObservesPath):
    """Average of updates that each client corrects by the covariance of its SGD iterates.

    Attributes:
        burn_in: Local epochs before the first sample; the others give the samples (l = E - burn_in).
        shrinkage: Weight of the samples' covariance against the identity (rho); 0 is the identity, that
            is, the plain mean of the samples. With many samples a large value means large steps, up to
            1 + (l - 1) rho times the plain one.
        window: Steps that are averaged to one sample; null averages every epoch.
        discard: Steps left out between two windows.
        start_round: First round with corrected updates; the rounds before it are FedAvg.
        server_lr: Learning rate of the server (eta_s).
        server_momentum: Momentum of the server; 0 has none.
    """

    display_name: ClassVar[str] = "FedPA"

    burn_in: int = 1
    shrinkage: float = 0.01
    window: int | None = None
    discard: int = 0
    start_round: int = 1
    server_lr: float = 1.0
    server_momentum: float = 0.0

    def __post_init__(self) -> None:
        require(self.burn_in >= 0, f"method.burn_in must be at least 0, got {self.burn_in}")
        require(0 <= self.shrinkage < float("inf"), f"method.shrinkage must be finite and >= 0, got {self.shrinkage}")
        require(
            self.window is None or self.window >= 1,
            f"method.window must be at least 1, or null for a sample per epoch, got {self.window}",
        )
        require(self.discard >= 0, f"method.discard must be at least 0, got {self.discard}")
        require(
            self.discard == 0 or self.window is not None,
            f"method.discard {self.discard} leaves out steps between windows, but there are none; set method.window",
        )
        require(self.start_round >= 1, f"method.start_round must be at least 1, got {self.start_round}")
        require(0 < self.server_lr < float("inf"), f"method.server_lr must be finite and > 0, got {self.server_lr}")
        require(0 <= self.server_momentum < 1, f"method.server_momentum must be in [0, 1), got {self.server_momentum}")

    def check(self, training: Training, server: Server) -> None:
        require_samples_of_sgd("fedpa's samples of the posterior are", training)
        require(
            self.burn_in < training.epochs,
            f"method.burn_in must be less than training.epochs, which is {training.epochs}, got {self.burn_in}: "
            "no epoch is left to sample from; set --training.epochs higher (the paper has 5) or --method.burn_in lower",
        )
        smallest = min((size, n) for n, size in enumerate(server.sizes) if size > 0)
        steps = (training.epochs - self.burn_in) * training.steps_per_epoch(smallest[0], server.smallest_batch)
        require(
            self.window is None or self.window <= steps,
            f"method.window must fit into the steps after the burn-in, got {self.window}, but client {smallest[1]} "
            f"takes only {steps}; lower method.window or training.batch_size, set more training.epochs, or use "
            "--method.window null for one sample per epoch",
        )

    def init(self, params: Params, num_clients: int) -> State:
        return State(params, at_rest(params, self.server_momentum))

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        return Context(state.params, max(self._samples_of(cohort)))  # a Python number: nothing is sent

    def path_statistics(self, context: Context) -> PathSums:
        empty = zip_map(lambda value: torch.zeros_like(value, dtype=torch.float64), context.start)
        seen = next(iter(empty.values())).new_zeros((), dtype=torch.long)
        return PathSums(tuple(empty for _ in range(context.shared)), seen)

    def observe(self, statistics: PathSums, step: Step) -> PathSums:
        sampling = step.epoch >= self.burn_in
        if self.window is None:
            place = step.epoch - self.burn_in
        else:
            period = self.window + self.discard
            inside = sampling & (statistics.seen % period < self.window)
            place = torch.where(inside, statistics.seen // period, -1)
            if isinstance(step.epoch, int):  # not under vmap: a number, so that one sum is touched and not all
                place = int(place)
        sums = tuple(_add_if(place == k, total, step.params) for k, total in enumerate(statistics.sums))
        return PathSums(sums, statistics.seen + sampling)

    def report(self, local: Local, context: Context) -> Report:
        statistics: PathSums = local.path_statistics
        per_epoch = local.num_steps // local.num_epochs
        # Of a cohort with stragglers this client may have taken fewer samples than there is room for, or none.
        number = min(len(statistics.sums), self._num_samples(local.num_epochs, per_epoch))
        if number == 0:
            return Report(local.params)
        samples = [flatten(total) / (self.window or per_epoch) for total in statistics.sums[:number]]
        if number == 1:  # theta_S - (theta_S - theta_1) would only add rounding
            corrected = samples[0]
        else:
            start = flatten(context.start).double()
            corrected = start - posterior_delta(start, samples, self.shrinkage)
        return Report(cast_like(unflatten(corrected, local.params), local.params))

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        models, weights = _finite(reports, cohort.weights)
        if not self.server_momentum:
            return State(average(state.params, models, weights, self.server_lr), state.velocity)
        gradient = zip_map(torch.neg, mean_update(state.params, models, weights))
        return State(*momentum_step(state.params, state.velocity, gradient, self.server_momentum, self.server_lr))

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        start = flatten(before.params).double()
        return {
            "posterior_samples": [float(number) for number in self._samples_of(cohort)],
            "update_norm": [float((start - flatten(report.params).double()).norm()) for report in reports],
            "clients_ignored": float(sum(not all_finite(report.params) for report in reports)),
        }

    def _samples_of(self, cohort: Cohort) -> list[int]:
        """The number of samples l of every member."""
        if cohort.round < self.start_round:
            return [0 for _ in cohort.members]
        server = cohort.server
        per_epoch = [cohort.training.steps_per_epoch(server.sizes[n], server.smallest_batch) for n in cohort.members]
        return [self._num_samples(epochs, steps) for epochs, steps in zip(cohort.epochs, per_epoch, strict=True)]

    def _num_samples(self, epochs: int, steps_per_epoch: int) -> int:
        """How many epochs, or complete windows, there are after the burn-in."""
        left = max(epochs - self.burn_in, 0)
        if self.window is None:
            return left
        return (left * steps_per_epoch + self.discard) // (self.window + self.discard)  # nothing follows the last one


def posterior_delta(start: Tensor, samples: Sequence[Tensor], shrinkage: float) -> Tensor:
    """The solution Delta of Sigma Delta = start - mean of the samples, Sigma being their shrunk covariance.

    Sample k adds a multiple of u u^T to Sigma / rho_l, u being its offset from the mean of those before it; the
    Sherman-Morrison formula follows.

    >>> x, rows = torch.zeros(2), torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    >>> posterior_delta(x, rows, shrinkage=1.0)  # Sigma = I / 2 + [[2, 0], [0, 0]] / 2
    tensor([-1.3333,  0.0000])
    """
    mean, delta = samples[0], start - samples[0]
    solved: list[tuple[Tensor, Tensor]] = []
    for k, sample in enumerate(samples[1:], start=2):
        offset = sample - mean
        direction = offset
        for other, coefficient in solved:
            direction = direction - coefficient * (other @ offset) * other
        gain = shrinkage * (k - 1) / k
        size = offset @ direction
        step = 1 + gain * (k * (offset @ delta) - size) / (1 + gain * size)
        delta = delta - step / k * direction
        mean = mean + offset / k
        solved.append((direction, gain / (1 + gain * size)))
    return delta * (1 + (len(samples) - 1) * shrinkage)


def _add_if(condition: bool | Tensor, total: Params, params: Params) -> Params:
    if isinstance(condition, Tensor):
        return zip_map(lambda t, p: t + torch.where(condition, p, 0.0), total, params)
    return zip_map(torch.add, total, params) if condition else total


def _finite(reports: Sequence[Report], weights: Sequence[float]) -> tuple[list[Params], Sequence[float]]:
    """The models that are finite, and their weights; all of them if none is, for then the run has diverged."""
    are_finite = [all_finite(report.params) for report in reports]
    models = [report.params for report in reports]
    if all(are_finite) or not any(are_finite):
        return models, weights
    total = sum(weight for weight, is_finite in zip(weights, are_finite, strict=True) if is_finite)
    chosen = [(m, w / total) for m, w, is_finite in zip(models, weights, are_finite, strict=True) if is_finite]
    return [model for model, _ in chosen], [weight for _, weight in chosen]
