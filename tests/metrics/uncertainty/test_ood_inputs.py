"""The final round where inputs are tokens, or several; and names of out-of-distribution inputs."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning import configure, experiment
from fl_lightning.data.batches import ClientData
from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import UserError
from fl_lightning.metrics.uncertainty.evaluate import measure
from fl_lightning.metrics.uncertainty.ood_inputs import fitted, inputs_of
from fl_lightning.metrics.uncertainty.posterior import build
from fl_lightning.metrics.uncertainty.sample_curvature import final_round
from fl_lightning.models.task import Task

KINDS = ("map", "probit", "glm_mc", "nn")


class Reading(nn.Module):
    """Tokens, and perhaps a number beside them."""

    def __init__(self, beside):
        super().__init__()
        self.embedding = nn.Embedding(6, 3)
        self.last = nn.Linear(12 + beside, 3)

    def forward(self, text, age=None):
        read = self.embedding(text).flatten(1)
        return self.last(read if age is None else torch.cat([read, age], 1))


class Shown(NamedTuple):
    task: Task
    dataset: Dataset


def shown(kind):
    torch.manual_seed(0)
    text, age = torch.randint(5, (20, 4)), torch.rand(20, 2, dtype=torch.float64)
    x = {"tokens": text, "tuple": (text, age), "dict": {"age": age, "text": text}}[kind]
    halves = [x[i] if kind == "tokens" else cut(x, i) for i in (slice(0, 12), slice(12, 20))]
    y = torch.arange(20) % 3
    dataset = Dataset(halves[0], y[:12], halves[1], y[12:], 3, vocabulary=6)
    return Shown(Task(Reading(0 if kind == "tokens" else 2).double()), dataset)


def cut(x, places):
    return {k: v[places] for k, v in x.items()} if isinstance(x, dict) else tuple(v[places] for v in x)


def posterior_at(task, dataset):
    data = ClientData(0, dataset, torch.arange(12), torch.float64)
    pooled = final_round(task, task.initial, [data], "last_layer", "exact")
    return build(task, task.initial, "last_layer", pooled, data.fetch(data.indices[:1])[0]).with_prior(1.0)


@pytest.mark.parametrize("kind", ["tokens", "tuple", "dict"])
def test_every_prediction_and_noise(kind):
    task, dataset = shown(kind)
    posterior = posterior_at(task, dataset)
    noise = inputs_of("noise", dataset, None, None, 0)
    text = {"tokens": lambda: noise, "tuple": lambda: noise[0], "dict": lambda: noise["text"]}[kind]()
    assert text.dtype == torch.long
    assert set(text.flatten().tolist()) == set(range(6))  # also the one that no sample has
    found = measure(posterior, dataset, KINDS, {"noise": noise}).metrics
    assert {f"{one}/{name}" for one in KINDS for name in ("NLL", "AUROC/noise")} <= found.keys()
    with torch.no_grad():
        inputs = dataset.test_x
        logits = task.model(**inputs) if kind == "dict" else task.model(*(inputs if kind == "tuple" else (inputs,)))
    assert found["map/NLL"] == pytest.approx(float(nn.functional.cross_entropy(logits, dataset.test_y)))
    torch.testing.assert_close(posterior.predict(dataset.test_x, "map").probabilities, logits.softmax(1))


def test_tokens_that_are_none_and_inputs_that_are_several_are_refused():
    _, dataset = shown("tokens")
    with pytest.raises(UserError, match="must hold tokens from 0 to 5, got 0 to 6"):
        fitted("mine", torch.tensor([[0, 1, 2, 6]]), dataset)
    with pytest.raises(UserError, match=r"tokens \(int64\) for tokens"):
        fitted("mine", torch.zeros(2, 4, dtype=torch.uint8), dataset)
    with pytest.raises(UserError, match="rotated is one input, but the data have several"):
        inputs_of("rotated", shown("dict").dataset, None, None, 0)


SETTINGS = {
    **{"method": "fedavg", "data": "digits", "data.subset": 0.1, "data.clients": 2, "model": "softmax"},
    **{"engine": "functional", "federation.rounds": 1, "uncertainty.final_round": True, "uncertainty.form": "diagonal"},
}


def test_names_of_files_are_cleaned_and_none_stands_for_two(tmp_path):
    paths = [tmp_path / name for name in ("odd (1).npy", "odd 1.npy", "odd_1.npy", "noise.npy")]
    for path in paths:
        np.save(path, np.zeros((3, 1, 8, 8), np.float32))
    odd, other, same, noise = map(str, paths)
    settings = SETTINGS | {"uncertainty.ood": [odd, other], "uncertainty.predictive": ["map"]}
    found = experiment.run(configure(settings), tmp_path / "runs").final
    assert {"map/AUROC/odd_1", "map/AUROC/odd 1"} <= found.keys()
    assert not any(name.startswith("probit/") for name in found)
    for ood in ([odd, same], ["noise", noise], ["noise", "noise"]):
        with pytest.raises(
            UserError, match=r"uncertainty.ood names .* and .*, whose numbers would both be called"
        ) as e:
            experiment.check(configure(SETTINGS | {"uncertainty.ood": ood}))
        assert "\n" not in str(e.value)


def test_what_is_measured_in_any_case_may_be_asked_for():
    held = {"data.validation": 0.1, "uncertainty.predictive": ["map", "temperature"]}
    experiment.check(configure(SETTINGS | held))
    with pytest.raises(UserError, match="temperature needs held-out data"):
        experiment.check(configure(SETTINGS | {"uncertainty.predictive": ["temperature"]}))
