"""Whether the data have what a partition divides by: a class for every sample, or what stands for it."""

from fl_lightning.data.dataset import Dataset
from fl_lightning.data.partition import NATURAL, Kind, Split
from fl_lightning.errors import require

# Partitions that do not look at the targets.
BLIND: tuple[Kind, ...] = ("iid", "quantity", "lognormal", *NATURAL)


def check(dataset: Dataset, split: Split) -> None:
    """Raise `UserError` if these data cannot be divided like that."""
    likelihood = dataset.likelihood
    require(
        split.partition in BLIND or likelihood.strata(dataset.train_y[:1]) is not None,
        f"data.partition {split.partition} divides samples by their class, and those of {likelihood.task} have none; "
        f"use --data.partition {', '.join(BLIND[:-1])} or {BLIND[-1]}",
    )
    require(
        not split.drop_classes or likelihood.has_classes,
        f"data.drop_classes needs a task of classification, got {likelihood.task}; leave it out",
    )
