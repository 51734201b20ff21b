"""Partitions are part of published results: what a kind of partition draws for a seed must not change."""

from typing import Any

import pytest
import torch

from fl_lightning.data.partition import Kind, Split, content_hash, partition
from tests.data.splits import KINDS, typical

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

# Of every kind, at the defaults.
TYPICAL: dict[Kind, str] = {
    "dirichlet": "b333a665548f3d79",
    "dirichlet_balanced": "362efaac9ea17b63",
    "dirichlet_per_client": "86c79ff02a15ba76",
    "dirichlet_lognormal": "9727402da88f2b26",
    "shards": "8cf4997abbe5967a",
    "classes": "192233adba8dfe95",
    "class_blocks": "f0542f1960842bbf",
    "iid": "a1cac7a28945c5a3",
    "quantity": "b90c38ffde6eed75",
    "lognormal": "7413837883f1d8b6",
    "natural": "0029765f64814759",
    "natural_groups": "39bb2aaeb0a5bbbc",
}


@pytest.mark.parametrize("kind", PINNED)
def test_the_first_kinds_draw_what_they_always_drew(kind: Kind) -> None:
    for settings, expected in zip(SETTINGS, PINNED[kind], strict=True):
        assert content_hash(partition(LABELS, Split(partition=kind, **settings), seed=3)) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_pinned(kind: Kind) -> None:
    assert content_hash(typical(kind).parts()) == TYPICAL[kind]
