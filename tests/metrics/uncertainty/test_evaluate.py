"""The numbers of a posterior's predictions are those of the whole test set, however it is cut into blocks."""

import pytest
import torch
from torch import nn

from fl_lightning.data.batches import ClientData
from fl_lightning.metrics.uncertainty import evaluate
from fl_lightning.metrics.uncertainty.posterior import build
from fl_lightning.metrics.uncertainty.sample_curvature import final_round
from fl_lightning.models.task import Task
from tests.support.cases import ragged


def test_findings_are_blind_to_the_size_of_blocks(monkeypatch):
    case = ragged()
    task, places = Task(nn.Linear(5, 3).double()), torch.arange(len(case.dataset.train_y))
    clients = [ClientData(0, case.dataset, places, torch.float64)]
    pooled = final_round(task, task.initial, clients, "diagonal", "exact")
    posterior = build(task, task.initial, "diagonal", pooled, case.dataset.train_x[:1]).with_prior(1.0)
    strange = {"noise": torch.randn(30, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)}

    def found():
        return evaluate.measure(posterior, case.dataset, ("map", "probit"), strange)

    whole = found()
    monkeypatch.setattr(evaluate, "BLOCK", 7)
    assert found().metrics == pytest.approx(whole.metrics, rel=1e-12)
    for name, values in found().arrays.items():
        assert values == pytest.approx(whole.arrays[name], rel=1e-12), name
