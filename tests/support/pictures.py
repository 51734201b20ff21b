"""A small problem of colour images, for what changes images on their way to the model."""

from dataclasses import replace

import torch
from torch import nn

from tests.support.cases import Case, ragged


def pictures(name: str, seed: int = 0) -> Case:
    """The unequal clients of `ragged` with colour images as bytes, under this augmentation; softmax regression."""
    case, shape = ragged(seed=seed), (3, 12, 12)
    stream = torch.Generator().manual_seed(seed)
    train_x, test_x = (
        torch.randint(256, (len(x), *shape), generator=stream, dtype=torch.uint8)
        for x in (case.dataset.train_x, case.dataset.test_x)
    )
    dataset = replace(case.dataset, train_x=train_x, test_x=test_x, mean=(0.5,), std=(0.5,), augment=name)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 12 * 12, 3)).double()
    return case.changed(model=model, dataset=dataset, lr=0.01)
