"""How a client trains, and how many take part in how many rounds: settings that every method and engine has."""

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Literal

from fl_lightning.errors import require

# Settings that only the adaptive optimisers have, and those of all optimisers but a module's own.
ADAPTIVE = ("beta1", "beta2", "eps")
OURS = ("lr", "momentum", "weight_decay", "lr_decay", "lr_rounds", "schedule", "warmup")


@dataclass(frozen=True)
class Training:
    """Local training by SGD, Adam or AdamW; the optimiser starts fresh in every round, and so does its schedule.

    Attributes:
        lr: Learning rate of the clients (lr, eta).
        epochs: Local epochs per round (E).
        batch_size: Samples per step (B); null takes all data of the client at once. The last batch may be smaller; with
            BatchNorm, a last batch of one sample joins the one before it.
        momentum: Heavy-ball momentum of SGD inside a round (rho); 0 is plain SGD.
        weight_decay: L2 decay added to the gradient after clipping; of adamw, taken off the weights beside its step.
        clip_norm: Largest norm of the whole gradient, prior included; null does not clip.
        lr_decay: Factor on the learning rate after every round; 1 keeps it constant.
        lr_rounds: Rounds over which the learning rate falls along half a cosine; later rounds keep its last value. null
            keeps it constant.
        optimiser: Optimiser of the clients: sgd, adam, adamw (decoupled weight decay), or own, that of a
            LightningModule; auto is own where the model brings one, else sgd.
        beta1: Decay rate of the gradients' moving average in adam and adamw.
        beta2: Decay rate of the squared gradients' moving average in adam and adamw.
        eps: Added to the root of the squares by adam and adamw.
        schedule: Learning rate within a round, after the warm-up: constant, or falling towards zero by the
            client's last step, along half a cosine or linearly.
        warmup: Steps in which the learning rate rises to its value at the start of a round, or a share of the client's
            steps if it is below 1; never all of them.
    """

    lr: float = 0.01
    epochs: int = 1
    batch_size: int | None = 32
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    lr_decay: float = 1.0
    lr_rounds: int | None = None
    optimiser: Literal["auto", "sgd", "adam", "adamw", "own"] = "auto"
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup: float = 0.0

    def __post_init__(self) -> None:
        require(
            math.isfinite(self.lr) and self.lr >= 0,
            f"training.lr must be a finite number >= 0, got {self.lr}; the paper searches 1 to 1e-4",
        )
        require(self.epochs >= 1, f"training.epochs must be at least 1, got {self.epochs}")
        require(
            self.batch_size is None or self.batch_size >= 1,
            f"training.batch_size must be at least 1, or null for all data at once, got {self.batch_size}",
        )
        require(0 <= self.momentum < 1, f"training.momentum must lie in [0, 1), got {self.momentum}")
        require(
            math.isfinite(self.weight_decay) and self.weight_decay >= 0,
            f"training.weight_decay must be a finite number >= 0, got {self.weight_decay}",
        )
        require(
            self.clip_norm is None or self.clip_norm > 0,
            f"training.clip_norm must be positive, or null for no clipping, got {self.clip_norm}",
        )
        require(0 < self.lr_decay <= 1, f"training.lr_decay must lie in (0, 1], got {self.lr_decay}")
        require(
            self.lr_rounds is None or self.lr_rounds >= 1,
            f"training.lr_rounds must be at least 1, or null for no cosine over rounds, got {self.lr_rounds}",
        )
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"training.{name} must lie in [0, 1), got {value}")
        require(0 < self.eps < math.inf, f"training.eps must be a finite number > 0, got {self.eps}")
        require(
            0 <= self.warmup < math.inf and (self.warmup < 1 or self.warmup == int(self.warmup)),
            f"training.warmup must be a share of the steps below 1, or a whole number of steps, got {self.warmup}",
        )
        self._require_defaults(() if self.optimiser in ("adam", "adamw") else ADAPTIVE, "adam or adamw")
        self._require_defaults(("momentum",) if self.optimiser in ("adam", "adamw") else (), "sgd")
        self._require_defaults(OURS if self.optimiser == "own" else (), "sgd, adam or adamw")

    def _require_defaults(self, names: Iterable[str], others: str) -> None:
        """Refuse settings that the optimiser does not have."""
        defaults = {field.name: field.default for field in fields(self)}
        for name in names:
            value = getattr(self, name)
            require(
                value == defaults[name],
                f"training.{name} {value} is for --training.optimiser {others}, got {self.optimiser}; leave one out",
            )

    @property
    def is_sgd(self) -> bool:
        """Whether steps go along the gradient, or its velocity, with one length for all parameters."""
        return self.optimiser in ("auto", "sgd")

    @property
    def is_steady(self) -> bool:
        """Whether every step of a round has the same learning rate."""
        return self.schedule == "constant" and self.warmup == 0

    def in_round(self, round: int) -> "Training":
        """The settings of round r: lr * lr_decay^(r-1), and along the cosine lr (1 + cos(pi (r-1) / lr_rounds)) / 2."""
        return self.at_rate(self.lr * self.lr_decay ** (round - 1) * self.cosine(round))

    def cosine(self, round: int) -> float:
        """The factor on the learning rate in round r that is due to `lr_rounds`.

        >>> [round(Training(lr_rounds=2).cosine(r), 3) for r in (1, 2, 3)]
        [1.0, 0.5, 0.5]
        """
        if self.lr_rounds is None:
            return 1.0
        return (1 + math.cos(math.pi * (min(round, self.lr_rounds) - 1) / self.lr_rounds)) / 2

    def factor(self, step: int, num_steps: int) -> float:
        """The factor on the learning rate in step t = 0, 1, ... of T, due to warm-up and schedule.

        >>> warm = Training(schedule="linear", warmup=1)
        >>> [warm.factor(step, 5) for step in range(5)]
        [0.5, 1.0, 0.75, 0.5, 0.25]
        """
        rising = min(int(self.warmup if self.warmup >= 1 else self.warmup * num_steps), num_steps - 1)
        if step < rising:
            return (step + 1) / (rising + 1)
        done = (step - rising) / (num_steps - rising)
        return {"constant": 1.0, "cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done}[self.schedule]

    def at(self, step: int, num_steps: int) -> "Training":
        """The settings of one step: with its learning rate."""
        return self if self.is_steady else self.at_rate(self.lr * self.factor(step, num_steps))

    def at_rate(self, lr: Any) -> "Training":
        """The settings with another learning rate: a number, or under vmap a tensor that holds one."""
        changed = copy.copy(self)
        object.__setattr__(changed, "lr", lr)
        return changed

    def path_length(self, num_steps: int) -> float:
        """The sum of the learning rates of all steps of a round."""
        if self.is_steady:
            return num_steps * self.lr
        return sum(self.lr * self.factor(step, num_steps) for step in range(num_steps))

    def steps_per_epoch(self, num_samples: int, smallest: int = 1) -> int:
        """How many optimiser steps an epoch over this many samples takes: as many as it has batches."""
        size = self.batch_size or num_samples
        joins = num_samples > size and 0 < num_samples % size < smallest
        return math.ceil(num_samples / size) - joins

    def batch_sizes(self, num_samples: int, smallest: int = 1) -> list[int]:
        """The sizes of an epoch's batches: all of them B but for the last, which holds what is left.

        Args:
            num_samples: How many samples there are.
            smallest: A last batch of fewer samples joins the one before it.

        >>> Training(batch_size=4).batch_sizes(9), Training(batch_size=4).batch_sizes(9, smallest=2)
        ([4, 4, 1], [4, 5])
        """
        before = self.steps_per_epoch(num_samples, smallest) - 1
        size = self.batch_size or num_samples
        return [*[size] * before, num_samples - before * size]


def require_sgd(training: Training, why: str, remedy: str = "set --training.optimiser sgd") -> None:
    """Refuse other optimisers, for a method whose formula is about SGD's steps."""
    require(training.is_sgd, f"{why}, expected training.optimiser sgd, got {training.optimiser}; {remedy}")


def require_samples_of_sgd(what: str, training: Training) -> None:
    """Refuse what does not sample a posterior: iterates do so around a minimum, by SGD with one learning rate."""
    require_sgd(training, f"{what} iterates of SGD")
    require(
        training.is_steady,
        f"{what} iterates of SGD with one learning rate, expected --training.schedule constant without "
        f"training.warmup, got {training.schedule} and {training.warmup:g}; leave both out",
    )


@dataclass(frozen=True)
class Federation:
    """The number of rounds, and the clients in each.

    Attributes:
        rounds: Communication rounds (R).
        fraction: Share of the clients that takes part in a round (participation, C); at least one client does.
        cohort: Number of clients per round, instead of the fraction.
        straggler_fraction: Share of the cohort that manages only some of its epochs, 1 to E - 1 at random.
        start: Folder of a saved run whose final model is where round 1 starts; null starts from new weights.
        weighting: Clients count by their numbers of samples (p_n = m_n / sum m), or all the same.
    """

    rounds: int = 20
    fraction: float = 1.0
    cohort: int | None = None
    straggler_fraction: float = 0.0
    start: str | None = None
    weighting: Literal["samples", "uniform"] = "samples"

    def __post_init__(self) -> None:
        require(self.rounds >= 1, f"federation.rounds must be at least 1, got {self.rounds}")
        require(0 < self.fraction <= 1, f"federation.fraction must lie in (0, 1], got {self.fraction}")
        require(
            self.cohort is None or self.cohort >= 1,
            f"federation.cohort must be at least 1, or null to use federation.fraction, got {self.cohort}",
        )
        require(
            self.cohort is None or self.fraction == 1,
            f"federation.cohort {self.cohort} and federation.fraction {self.fraction} both say how many clients take "
            "part; give only one of them",
        )
        require(
            0 <= self.straggler_fraction <= 1,
            f"federation.straggler_fraction must lie in [0, 1], got {self.straggler_fraction}",
        )
