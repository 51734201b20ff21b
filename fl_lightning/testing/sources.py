"""What every data source must do: `fl_lightning.testing.check_source` and its single checks."""

from functools import cache, partial

import torch

from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.partition import Split, partition
from fl_lightning.testing.checks import Check, expect, explained, insist
from fl_lightning.testing.purity import same

PARTS = ("train_x", "train_y", "test_x", "test_y", "owners")


def check_source(source: Source) -> None:
    """Raise `Broken` unless a source loads a dataset, always the same one, that can be divided among clients."""
    insist(source_checks(source))


def source_checks(source: Source) -> list[Check]:
    """The single checks of `check_source`, for `pytest.mark.parametrize`."""
    load = cache(source.load)
    return [
        Check("it loads a dataset", lambda: loads_a_dataset(load())),
        Check("it always loads the same", lambda: loads_the_same(source, load())),
        Check("it can be divided among clients", lambda: can_be_divided(load())),
        Check("its fingerprint is stable", partial(has_a_stable_fingerprint, source)),
        Check("settings are explained", partial(explained, type(source))),
    ]


def loads_a_dataset(dataset: Dataset) -> None:
    """The tensors themselves are checked by `Dataset`."""
    expect(isinstance(dataset, Dataset), f"load must return a Dataset, got {type(dataset).__name__}")


def loads_the_same(source: Source, dataset: Dataset) -> None:
    """Two runs with one seed see the same samples, whatever was drawn from global streams before."""
    torch.rand(3)
    again = source.load()
    for part in PARTS:
        expect(
            same(getattr(again, part), getattr(dataset, part)),
            f"{part} is not the same when it is loaded again; draw random numbers from a generator with a fixed seed",
        )


def can_be_divided(dataset: Dataset) -> None:
    """Every sample goes to exactly one client."""
    clients = partition(dataset.strata, Split(clients=3, alpha=1.0), seed=0)
    expect(
        torch.equal(torch.cat(list(clients)).sort().values, torch.arange(len(dataset.train_y))),
        "a partition over three clients loses samples or gives them away twice",
    )


def has_a_stable_fingerprint(source: Source) -> None:
    """What a run is known by does not change by asking for it."""
    expect(source.fingerprint() == source.fingerprint(), "fingerprint() must say the same for the same content")
