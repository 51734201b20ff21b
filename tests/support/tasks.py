"""A small problem in float64 for every likelihood, and what its loss is, written once more."""

import math

import torch
from torch import nn

from fl_lightning.data.dataset import Dataset
from fl_lightning.models.likelihoods import PADDING, Binary, Classification, MultiLabel, Regression, Tokens
from fl_lightning.testing.cases import Case
from fl_lightning.training import Federation, Training

SAMPLES, TEST = 13, 9


def dense(outputs):
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def case(task: str) -> Case:
    """Two clients of unequal sizes; batches that do not divide them."""
    stream = torch.Generator().manual_seed(1)
    number = SAMPLES + TEST
    x = torch.randn(number, 3, generator=stream, dtype=torch.float64)
    torch.manual_seed(0)
    if task == "classification":
        y, likelihood, outputs = torch.randint(3, (number,), generator=stream), Classification(), 3
    elif task == "binary":
        y, likelihood, outputs = (x[:, 0] > 0).long(), Binary(), 1
    elif task == "multilabel":
        y, likelihood, outputs = torch.randint(2, (number, 2), generator=stream), MultiLabel(), 2
    elif task == "regression":
        noise = torch.randn(number, 2, generator=stream, dtype=torch.float64)
        y, likelihood, outputs = x[:, :2] + noise, Regression(noise=0.7), 2
    else:
        x = torch.randint(5, (number, 4), generator=stream)
        y, likelihood, outputs = (x + 1) % 3, Tokens(), 3
        y[:, 3][x[:, 0] < 3] = PADDING
        y[2, 1:] = PADDING
    embedded = nn.Sequential(nn.Embedding(5, 3), *dense(3)) if task == "tokens" else dense(outputs)
    data = Dataset(x[:SAMPLES], y[:SAMPLES], x[SAMPLES:], y[SAMPLES:], outputs, likelihood=likelihood)
    order = torch.randperm(SAMPLES, generator=stream)
    return Case(
        model=embedded.double(),
        dataset=data,
        clients=list(torch.split(order[:7], [5, 2])),
        holdout=order[7:],
        training=Training(lr=0.05, epochs=2, batch_size=3),
        federation=Federation(rounds=2),
    )


def loss_of(task: str, f, y):
    """-ln p(y | f) of one sample, by torch.distributions."""
    if task == "classification":
        return -torch.distributions.Categorical(logits=f).log_prob(y)
    if task in ("binary", "multilabel"):
        return -torch.distributions.Bernoulli(logits=f).log_prob(y.to(f.dtype)).sum()
    if task == "regression":
        return -torch.distributions.Normal(f, 0.7).log_prob(y).sum()
    counted = [t for t in range(len(y)) if y[t] != PADDING]
    logs = [torch.distributions.Categorical(logits=f[t]).log_prob(y[t]) for t in counted]
    return -sum(logs) / max(1, len(logs)) if logs else f.sum() * 0


TASKS = ("classification", "binary", "multilabel", "regression", "tokens")
TINY = math.sqrt(torch.finfo(torch.float64).eps)
