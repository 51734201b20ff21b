"""Data sharing: FedAvg whose clients hold a common, class-balanced handful of samples beside their own.

    S_n     = a random share alpha of the server's set G, drawn once        |G| is set by data.holdout
    theta_n = SGD on D_n and S_n from theta_S                               theta_S <- sum_n p_n theta_n

Zhao, Li, Lai, Suda, Civin, Chandra: Federated Learning with Non-IID Data, arXiv:1806.00582, 2018.

The paper came without code. Where it is silent:
- p_n counts the client's own samples alone; the paper's clients are of equal size (`weight_includes_shared`);
- a client without own data takes no part, although it could train on S_n;
- the paper measures G by beta = |G| / |D|, where D are the samples of all clients; with data.holdout = h it is
  beta = h / (1 - h);
- the warm-up has a learning rate and a batch size of its own, since training on G in one place is another problem.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fl_lightning import streams
from fl_lightning.data.batches import Plan
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.heterogeneity import label_distance
from fl_lightning.engines.functional import train_one
from fl_lightning.errors import Diverged, require
from fl_lightning.method import Cohort, Context, Local, Method, Server, ServerData, Traits
from fl_lightning.models.inputs import named
from fl_lightning.params import Params, all_finite, average
from fl_lightning.training import Training


class State(NamedTuple):
    """The server's model theta_S."""

    params: Params


class Report(NamedTuple):
    """The client's model theta_n; and, for the diagnostics only, its samples per class before and after sharing."""

    params: Params
    own_labels: tuple[int, ...]
    all_labels: tuple[int, ...]


@dataclass(frozen=True)
class DataSharing(Method, ServerData):
    """FedAvg with a few samples of the server's data (data.holdout) given to every client.

    Attributes:
        share: Random share of the server's data that each client receives once (alpha); 0 is FedAvg. The paper
            reports 0.5 and 1.
        weight_includes_shared: Weigh clients by their own and the received samples together, instead of by their own.
        stragglers: Leave clients that did not finish their epochs out of the average, as FedAvg does, or keep them.
        warmup_epochs: Epochs of training on the server's data before the first round; 0 skips them.
        warmup_lr: Learning rate of the warm-up.
        warmup_batch_size: Samples per step of the warm-up.
    """

    display_name: ClassVar[str] = "data sharing"

    share: float = 0.5
    weight_includes_shared: bool = False
    stragglers: Literal["drop", "keep"] = "drop"
    warmup_epochs: int = 0
    warmup_lr: float = 0.01
    warmup_batch_size: int = 32

    def __post_init__(self) -> None:
        require(0 <= self.share <= 1, f"method.share must lie in [0, 1], got {self.share}; 0 shares nothing")
        require(
            self.warmup_epochs >= 0, f"method.warmup_epochs must be >= 0, got {self.warmup_epochs}; 0 skips the warm-up"
        )
        require(
            0 <= self.warmup_lr < float("inf"), f"method.warmup_lr must be a finite number >= 0, got {self.warmup_lr}"
        )
        require(
            self.warmup_batch_size >= 1, f"method.warmup_batch_size must be at least 1, got {self.warmup_batch_size}"
        )

    def check(self, training: Training, server: Server) -> None:
        require(
            self.warmup_epochs == 0 or len(server.holdout) > 0,
            f"method.warmup_epochs {self.warmup_epochs} needs data that belong to no client, but there are none; "
            "set data.holdout to a share such as 0.1, or method.warmup_epochs to 0",
        )
        batch = min(self.warmup_batch_size, len(server.holdout))
        require(
            self.warmup_epochs == 0 or batch >= server.smallest_batch,
            f"the warm-up of a model with BatchNorm needs batches of at least {server.smallest_batch} samples, got "
            f"{batch}; raise method.warmup_batch_size or data.holdout, or set method.warmup_epochs to 0",
        )

    def local_data(self, own: Sequence[Tensor], holdout: Tensor, seed: int) -> Sequence[Tensor]:
        number = self._shared_samples(len(holdout))
        if number == 0:
            return own
        return [
            torch.cat([indices, holdout[_draw(len(holdout), number, seed, client)]]) if len(indices) else indices
            for client, indices in enumerate(own)
        ]

    def init(self, params: Params, num_clients: int) -> State:
        return State(params)

    def prepare(self, state: State, server: Server) -> State:
        if self.warmup_epochs == 0:
            return state
        training = Training(self.warmup_lr, self.warmup_epochs, self.warmup_batch_size)
        # Round 0: before all others.
        plan = Plan(server.holdout, server.seed, 0, training, self.warmup_epochs, server.smallest_batch)
        fit = train_one(self, server.task, Context(state.params), server.task.initial.buffers, plan)
        if not all_finite(fit.local.params):
            raise Diverged(0, None)
        return State(fit.local.params)

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        return Context(state.params, self._shared_samples(len(cohort.server.holdout)))

    def report(self, local: Local, context: Context) -> Report:
        labels = local.data.dataset.strata.to(local.data.indices.device)[local.data.indices]
        own = labels[: len(labels) - context.shared]
        own_labels, all_labels = (part.bincount(minlength=local.data.dataset.num_strata) for part in (own, labels))
        return Report(local.params, tuple(own_labels.tolist()), tuple(all_labels.tolist()))

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        return State(average(state.params, [report.params for report in reports], self._weights(cohort)))

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        own, everything = (
            torch.tensor(counts) for counts in zip(*((r.own_labels, r.all_labels) for r in reports), strict=True)
        )
        # The paper's earth mover's distance; its population are the own samples of the round's clients.
        numbers: dict[str, float | list[float]] = {
            "emd_own": label_distance(own, own.sum(0)).tolist(),
            "emd": label_distance(everything, own.sum(0)).tolist(),
        }
        if cohort.round == 1:  # what happened once, before it
            server = cohort.server
            receivers = sum(1 for size in server.sizes if size > 0)
            samples = receivers * self._shared_samples(len(server.holdout))
            numbers["shared_bytes"] = float(samples * _bytes_per_sample(server.holdout.dataset))
            numbers["warmup_gradient_evaluations"] = float(self.warmup_epochs * len(server.holdout))
        return numbers

    @property
    def traits(self) -> Traits:
        return Traits(drops_stragglers=self.stragglers == "drop")

    def _shared_samples(self, size: int) -> int:
        """How many of the server's samples a client receives: alpha |G|, rounded."""
        return math.floor(self.share * size + 0.5)

    def _weights(self, cohort: Cohort) -> Sequence[float]:
        """p_n, of own or of own and received samples; uniform weighting stays uniform."""
        sizes = [cohort.server.sizes[n] for n in cohort.members]
        by_samples = cohort.weights == tuple(size / sum(sizes) for size in sizes)
        if not (self.weight_includes_shared and by_samples):
            return cohort.weights
        sizes = [size + self._shared_samples(len(cohort.server.holdout)) for size in sizes]
        return [size / sum(sizes) for size in sizes]


def _draw(size: int, number: int, seed: int, client: int) -> Tensor:
    """A client's places in the server's data: its own draw, without replacement."""
    return torch.randperm(size, generator=streams.generator(seed, "shared data", client))[:number]


def _bytes_per_sample(dataset: Dataset) -> int:
    """Bytes as they are, every other number as float32, and so the targets."""
    inputs = [x[0] for x in named(dataset.train_x, "").values()]
    sizes = [x.numel() * (1 if x.dtype == torch.uint8 else 4) for x in inputs]
    return sum(sizes) + 4 * dataset.train_y[0].numel()
