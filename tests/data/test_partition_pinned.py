"""Partitions are part of published results: what a kind of partition draws for a seed must not change."""

from typing import Any

import pytest
import torch

from fl_lightning.data.partition import Kind, Split, partition
from fl_lightning.data.shares import content_hash

LABELS = torch.cat([(torch.arange(1000) * 7919 % 1000 * 10 // 1000) % 10, torch.arange(7)])

SETTINGS: tuple[dict[str, Any], ...] = (
    {"clients": 10, "alpha": 0.1},
    {"clients": 20, "alpha": 0.01, "shards_per_client": 3, "subset": 0.8, "holdout": 0.1},
    {"clients": 7, "alpha": 100.0, "shards_per_client": 1, "holdout": 0.25},
)
# Of the first five kinds of partition, recorded before there were others.
PINNED: dict[Kind, tuple[str, str, str]] = {
    "dirichlet": ("6b7fc1000c8da964", "a9218dd9c647ee28", "9b5dd5fa91351f19"),
    "dirichlet_per_client": ("e81ffdf64239f9c0", "1fc144c9c2e48dd2", "7e5575abad9aef72"),
    "iid": ("af1a033a98152132", "c98aefc8c811b51e", "996aff832039dd22"),
    "shards": ("d293a2b3b1e5a409", "08143428312a3603", "7f0fa54fa8a2236b"),
    "quantity": ("e47e2e4f106de032", "38289f1e02710db6", "a0eff53081203ea9"),
}


@pytest.mark.parametrize("kind", PINNED)
def test_the_first_kinds_draw_what_they_always_drew(kind: Kind) -> None:
    for settings, expected in zip(SETTINGS, PINNED[kind], strict=True):
        assert content_hash(partition(LABELS, Split(partition=kind, **settings), seed=3)) == expected
