"""How a client trains: the optimiser's settings, the same for every method and engine."""

import math
from dataclasses import dataclass

from fl_lightning.errors import require


@dataclass(frozen=True)
class Training:
    """Local training by SGD; the optimiser starts fresh in every round.

    Attributes:
        lr: Learning rate of the clients (lr, eta).
        epochs: Local epochs per round (E).
        batch_size: Samples per step (B); null takes all data of the client at once. The last batch may be smaller; with
            BatchNorm, a last batch of one sample joins the one before it.
        momentum: Heavy-ball momentum inside a round (rho); 0 is plain SGD.
        weight_decay: L2 decay added to the gradient after clipping.
        clip_norm: Largest norm of the whole gradient, prior included; null does not clip.
        lr_decay: Factor on the learning rate after every round; 1 keeps it constant.
    """

    lr: float = 0.01
    epochs: int = 1
    batch_size: int | None = 32
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip_norm: float | None = None
    lr_decay: float = 1.0

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
