"""FedBE: sample models from a posterior over the clients' models, and distil their ensemble into one on the server.

    theta_bar = sum_n p_n theta_n                                    the student starts here
    w_m ~ N(theta_bar, diag(sum_n p_n (theta_n - theta_bar)^2))      m = 1 .. M
    P(x) = mean over {w_m}, theta_bar and {theta_n} of softmax(f(x)),  then P <- P^(1/T) / sum_k P_k^(1/T)
    theta_S <- mean of SGD's iterates on KL(P(x) || softmax(f(x))) over the server's unlabelled data (SWA)

Chen, Chao: FedBE: Making Bayesian Model Ensemble Applicable to Federated Learning, ICLR 2021.

Where the paper, its published code and our setting differ:
- the Gaussian is the paper's; the code's, over normalised updates, unweighted and with a floor on the variance, is
  `gaussian_code`, here without its 0 / 0 where a client did not move a tensor;
- Dirichlet coefficients are g_n, as in the code (`dirichlet`), or g_n p_n / sum, as in the paper
  (`dirichlet_weighted`);
- the divergence is averaged over samples; the code averages over classes too, which makes it K times smaller
  (`kl_mean`);
- the code floors the sharpened probabilities at 1e-8 before it normalises them; we compute in logarithms and need not;
- when no step lies after `swa_start`, the code warns and takes the last iterate; we start averaging after half the
  steps, because a server with little data would never average otherwise;
- the unlabelled data are held out of the training set (`data.holdout`), never taken from the test set; their labels
  are not looked at;
- networks with BatchNorm are refused: statistics do not belong to the parameters that a method sees, so those of
  samples and student could not be recomputed.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import kl_div, log_softmax, softmax

from fl_lightning import streams
from fl_lightning.errors import require
from fl_lightning.method import Cohort, Context, HasEnsemble, Local, Method, Server
from fl_lightning.models.likelihoods.base import require_classes
from fl_lightning.models.task import Weights
from fl_lightning.optimisers.sgd import sgd
from fl_lightning.params import Params, average, cast_like, flatten, weighted_sum, zeros, zip_map
from fl_lightning.training import Training

# Of the published code's Gaussian: factor on the standard deviation, and the least variance of a normalised update.
CODE_SCALE = 0.1
CODE_VARIANCE = 1e-5


class State(NamedTuple):
    """The server's model theta_S."""

    params: Params


class Report(NamedTuple):
    """The client's model theta_n."""

    params: Params


@dataclass(frozen=True)
class FedBE(Method, HasEnsemble):
    """Bayesian model ensemble: the server distils models sampled around the clients' average into one.

    Attributes:
        sampler: Where models are drawn from: a Gaussian as in the paper, the published code's Gaussian over normalised
            updates, or Dirichlet mixtures of the clients' models, without or with the clients' weights.
        samples: Number of sampled models in the ensemble (M).
        concentration: Concentration of the Dirichlet samplers (alpha); large values draw close to the average.
        mean_teaches: Whether the average of the clients' models is in the ensemble.
        clients_teach: Whether the clients' own models are in the ensemble.
        temperature: Temperature of the ensemble's predictions (T); below 1 they become sharper, 1 leaves them.
        server_epochs: Epochs of distillation on the held-out data; 0 is FedAvg.
        server_lr: Learning rate of the student.
        server_momentum: Momentum of the student.
        server_weight_decay: L2 decay of the student.
        server_batch_size: Samples per step of the student.
        swa_start: Steps of the student before its iterates are averaged; half the steps if none would be left.
        swa_frequency: Every so many steps an iterate enters the average; null takes the last iterate instead.
        kl_mean: Whether the divergence is averaged over samples, or over classes too as in the published code.
    """

    display_name: ClassVar[str] = "FedBE"

    sampler: Literal["gaussian_paper", "gaussian_code", "dirichlet", "dirichlet_weighted"] = "gaussian_paper"
    samples: int = 10
    concentration: float = 1.0
    mean_teaches: bool = True
    clients_teach: bool = True
    temperature: float = 0.5
    server_epochs: int = 20
    server_lr: float = 1e-3
    server_momentum: float = 0.9
    server_weight_decay: float = 1e-5
    server_batch_size: int = 128
    swa_start: int = 500
    swa_frequency: int | None = 25
    kl_mean: Literal["samples", "samples_and_classes"] = "samples"

    def __post_init__(self) -> None:
        for name in ("samples", "server_epochs", "server_lr", "server_weight_decay", "swa_start"):
            value = getattr(self, name)
            require(0 <= value < math.inf, f"method.{name} must be finite and >= 0, got {value}")
        for name in ("concentration", "temperature"):
            value = getattr(self, name)
            require(0 < value < math.inf, f"method.{name} must be finite and > 0, got {value}")
        require(0 <= self.server_momentum < 1, f"method.server_momentum must lie in [0, 1), got {self.server_momentum}")
        require(self.server_batch_size >= 1, f"method.server_batch_size must be >= 1, got {self.server_batch_size}")
        require(
            self.swa_frequency is None or self.swa_frequency >= 1,
            f"method.swa_frequency must be >= 1, or null for the last iterate, got {self.swa_frequency}",
        )
        require(
            self.server_epochs == 0 or self.samples > 0 or self.mean_teaches or self.clients_teach,
            "FedBE needs at least one teacher, got method.samples 0 without mean and clients; set method.samples to "
            "10, method.mean_teaches or method.clients_teach to true",
        )

    def check(self, training: Training, server: Server) -> None:
        if self.server_epochs == 0:
            return
        require_classes("the distillation of FedBE", server.task.likelihood)
        require(
            len(server.holdout) > 0,
            "FedBE distils on data of the server, expected data.holdout > 0, got none; use --data.holdout 0.2, "
            "or --method.server_epochs 0 to average only",
        )
        require(
            all(getattr(module, "running_mean", None) is None for module in server.task.model.modules()),
            "FedBE samples parameters and expected a network without running statistics, got one with BatchNorm; "
            "use another --model, or --method.server_epochs 0 to average only",
        )

    def init(self, params: Params, num_clients: int) -> State:
        return State(params)

    def report(self, local: Local, context: Context) -> Report:
        return Report(local.params)

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        mean = average(state.params, [report.params for report in reports], cohort.weights)
        if self.server_epochs == 0:
            return State(mean)
        targets = self.soft_labels(self.teachers(state, cohort, reports), cohort.server)
        return State(self.distil(mean, targets, cohort))

    def teachers(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> Iterator[Params]:
        """The ensemble, one model at a time: samples, average, clients."""
        models = [report.params for report in reports]
        mean = average(state.params, models, cohort.weights)
        if self.sampler in ("gaussian_paper", "gaussian_code"):
            if self.sampler == "gaussian_paper":
                centre, spread = mean, _spread(mean, models, cohort.weights)
            else:
                centre, spread = _gaussian_of_directions(state.params, models)
            for number in range(self.samples):
                noise = _noise(mean, streams.generator(_seed(cohort), "models", number))
                yield cast_like(zip_map(lambda c, s, z: c + s * z, centre, spread, noise), mean)
        else:
            for number in range(self.samples):
                stream = streams.numpy_generator(_seed(cohort), "models", number)
                shares = stream.dirichlet([self.concentration] * len(models))
                if self.sampler == "dirichlet_weighted":
                    shares = shares * cohort.weights / (shares @ cohort.weights)
                yield average(mean, models, shares.tolist())
        if self.mean_teaches:
            yield mean
        if self.clients_teach:
            yield from models

    def ensemble(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> Sequence[Params]:
        return list(self.teachers(state, cohort, reports))

    def soft_labels(self, teachers: Iterable[Params], server: Server) -> Tensor:
        """The ensemble's sharpened predictions for all held-out samples, in storage order."""
        task, number = server.task, 0
        total = torch.zeros((), dtype=torch.float64)
        with task.evaluating():  # teachers speak without dropout
            for teacher in teachers:
                weights = Weights(teacher, task.initial.buffers)
                blocks = [softmax(task.logits(weights, x).double(), dim=1) for x, _ in server.holdout.blocks()]
                total, number = total + torch.cat(blocks), number + 1
        return softmax((total / number).log() / self.temperature, dim=1).to(task.dtype)

    def distil(self, start: Params, targets: Tensor, cohort: Cohort) -> Params:
        """The student: SGD from `start` towards the soft labels, and the mean of its late iterates."""
        task, data, seed = cohort.server.task, cohort.server.holdout, _seed(cohort)
        student = Training(self.server_lr, momentum=self.server_momentum, weight_decay=self.server_weight_decay)
        per = 1 if self.kl_mean == "samples" else targets.shape[1]
        averaged = swa_steps(
            self.server_epochs * math.ceil(len(data) / self.server_batch_size), self.swa_start, self.swa_frequency
        )
        params, velocity = start, zeros(start)
        total = zip_map(lambda p: torch.zeros_like(p, dtype=torch.float64), start)
        with task.in_mode(True), streams.global_noise(seed, "noise"):  # the student learns with dropout, as clients do
            for step, chosen in enumerate(self._batches(len(data), seed), start=1):
                places = chosen.to(targets.device)
                x, _ = data.fetch(data.indices[places])

                def loss(params: Params, x: Tensor = x, goal: Tensor = targets[places]) -> Tensor:
                    logits = task.logits(Weights(params, task.initial.buffers), x)
                    return kl_div(log_softmax(logits, dim=1), goal, reduction="batchmean") / per

                params, velocity = sgd(params, torch.func.grad(loss)(params), velocity, student)
                if step in averaged:
                    total = zip_map(torch.add, total, params)
        return cast_like(zip_map(lambda value: value / len(averaged), total), start)

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        models = [report.params for report in reports]
        mean = average(before.params, models, cohort.weights)
        moved = zip_map(lambda new, old: new.double() - old.double(), after.params, mean)
        return {
            "distilled_distance": float(flatten(moved).norm()),  # of the student from the average
            "clients_spread": float(flatten(_spread(mean, models, cohort.weights)).norm()),  # expected, of a sample
        }

    def _batches(self, size: int, seed: int) -> Iterator[Tensor]:
        """Positions among the held-out samples, shuffled anew in every epoch; the last batch may be smaller."""
        for epoch in range(self.server_epochs):
            order = torch.randperm(size, generator=streams.generator(seed, "batches", epoch))
            yield from torch.split(order, self.server_batch_size)


def swa_steps(total: int, start: int, frequency: int | None) -> range:
    """Which steps 1 .. total enter the average: multiples of the frequency after the start.

    If there is none, those after half the steps, and if there is still none, the last step.

    >>> swa_steps(1580, 500, 25), swa_steps(100, 500, 25), swa_steps(20, 500, 25)
    (range(525, 1581, 25), range(75, 101, 25), range(20, 21))
    """
    if frequency is not None:
        for first in (start, total // 2):
            if steps := range((first // frequency + 1) * frequency, total + 1, frequency):
                return steps
    return range(total, total + 1)


def _seed(cohort: Cohort) -> int:
    """Key of all that the server draws in this round."""
    return streams.key(cohort.server.seed, "fedbe", cohort.round)


def _noise(like: Params, stream: torch.Generator) -> Params:
    # Drawn on the CPU, so that the numbers are the same for every device.
    return zip_map(lambda p: torch.randn(p.shape, generator=stream, dtype=torch.float64).to(p.device), like)


def _spread(mean: Params, models: Sequence[Params], weights: Sequence[float]) -> Params:
    """Standard deviations of the clients' models about their mean, sqrt(sum_n p_n (theta_n - mean)^2), in float64."""
    squares = (zip_map(lambda y, m: (y.double() - m.double()).square(), model, mean) for model in models)
    return zip_map(torch.sqrt, weighted_sum(squares, weights))


def _gaussian_of_directions(start: Params, models: Sequence[Params]) -> tuple[Params, Params]:
    """Centre and standard deviations of the published code's Gaussian, in float64.

    Per tensor, with u_n = (theta_n - theta_S) / l_n, l_n = ||theta_n - theta_S|| and plain means over the clients:
    theta_S + mean(l) (mean(u) + 0.1 sqrt(max(var(u), 1e-5)) z).
    """
    centre, spread = {}, {}
    for name, origin in start.items():
        updates = torch.stack([model[name].double() - origin.double() for model in models])
        lengths = updates.reshape(len(models), -1).norm(dim=1)
        scales = lengths.where(lengths > 0, 1.0).view(-1, *[1] * origin.dim())
        directions, length = updates / scales, lengths.mean()
        centre[name] = origin.double() + length * directions.mean(0)
        variance = directions.var(0, unbiased=False).clamp(min=CODE_VARIANCE)
        spread[name] = CODE_SCALE * length * variance.sqrt()
    return centre, spread
