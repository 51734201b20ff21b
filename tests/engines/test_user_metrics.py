"""What a LightningModule logs under names of its own: in runs that go on, in MLflow, and without a Trainer."""

import math

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from fl_lightning import Uncertainty, configure, experiment
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.metrics.round_metrics import measure, user_metrics_of
from fl_lightning.models.task import Task
from fl_lightning.runs.load import measure_posterior
from fl_lightning.system.text import metric_name
from fl_lightning.testing.cases import network, ragged

PLUGIN = '''
"""Logs as tutorials do."""

import pytorch_lightning as pl
import torch
from torch import nn


class Logging(pl.LightningModule):
    """A softmax."""

    def __init__(self, shape, num_classes):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, num_classes))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log_dict({"val/loss": loss, "val/NLL": loss, "val/loss (mean)": loss, "map/NLL": loss, "seconds": 1.0})
'''
SETTINGS = {
    **{"method": "fedavg", "data": "digits", "data.subset": 0.1, "data.clients": 2, "data.test_subset": 0.2},
    **{"model": "logging_under_names", "training.lr": 0.1, "federation.rounds": 2, "engine": "functional"},
}
ENDING = {"uncertainty.final_round": True, "uncertainty.form": "diagonal", "uncertainty.ood": []}
OWN = {"val/loss", "val/NLL", "val/loss_mean", "own_map/NLL", "own_seconds"}


@pytest.fixture(autouse=True)
def plugin(tmp_path, monkeypatch):
    (tmp_path / "logging_under_names.py").write_text(PLUGIN)
    monkeypatch.setenv("FL_LIGHTNING_PLUGINS", str(tmp_path))


def names(result):
    return [set(one.metrics) for one in result.history]


@pytest.mark.slow
def test_names_with_a_slash_stay_when_a_run_goes_on_and_are_none_of_the_posterior(out):
    from mlflow import MlflowClient

    from fl_lightning.runs.tracking.store import store_uri

    short = experiment.run(configure(SETTINGS | ENDING), out)
    assert all(found >= OWN for found in names(short))
    assert short.final["val/loss"] == pytest.approx(short.final["NLL"])
    longer = experiment.run(configure(SETTINGS | ENDING | {"federation.rounds": 3}), out)
    assert names(longer) == [names(short)[0], names(short)[0], names(short)[1]]
    again = measure_posterior(longer, Uncertainty(form="diagonal", ood=(), predictive=("map",)))
    assert again.final["val/NLL"] == longer.final["val/NLL"]
    assert math.isnan(again.final["probit/NLL"])
    stored = MlflowClient(tracking_uri=store_uri(out)).get_run(again.run_id).data.metrics
    assert {name: stored[name] for name in OWN} == {name: again.final[name] for name in OWN}


@pytest.mark.slow
def test_a_last_round_that_is_none_any_more_loses_what_was_measured_there(out):
    changes = {"evaluation.every": 2, "federation.rounds": 3}
    short = experiment.run(configure(SETTINGS | changes), out)
    longer = experiment.run(configure(SETTINGS | changes | {"federation.rounds": 4}), out)
    assert names(short)[2] >= OWN | {"GA"}
    assert [found & (OWN | {"GA"}) for found in names(longer)] == [set(), OWN | {"GA"}] * 2
    assert names(longer)[2] == names(longer)[0]


class Asking(pl.LightningModule):
    """Asks for this and that where it is judged."""

    def __init__(self, asked=lambda module: None):
        super().__init__()
        self.net, self.asked, self.seen = network(), asked, []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.asked(self)
        self.seen.append(self(batch[0]).argmax(1) == batch[1])

    def on_validation_epoch_end(self):
        self.log("hits", torch.cat(self.seen).double().mean())
        self.seen.clear()


def judged(module, engine=None):
    case = ragged()._replace(model=module.double()).changed(rounds=1)
    task = Task.of(case.model)
    tried = user_metrics_of(task, case.dataset)
    assert not module.seen
    record = case.go_on(FedAvg(), task=task, engine=engine or Lightning())[-1]
    return tried, measure(FedAvg(), task, case.dataset, record).metrics


@pytest.mark.parametrize(
    "asked",
    [
        lambda module: module.current_epoch + module.global_step + module.global_rank,
        lambda module: module.logger and module.logger.experiment,
        lambda module: module.trainer.sanity_checking or module.trainer.is_global_zero,
    ],
)
def test_facts_of_a_trainer_where_there_is_none_and_the_end_of_an_epoch(asked):
    module = Asking(asked)
    tried, found = judged(module)
    assert tried == {"hits"}
    assert found["hits"] == pytest.approx(found["GA"])
    assert not module.seen


def test_what_nobody_knows_there_is_told_before_training():
    words = (
        "Asking.validation_step asks its Trainer for datamodule, but the aggregated model is evaluated after a round"
    )
    with pytest.raises(UserError, match=words) as refusal:
        judged(Asking(lambda module: module.trainer.datamodule))
    assert "--engine" not in str(refusal.value)


def test_two_names_that_become_one_are_refused():
    def log(module):
        module.log("acc@5", 1.0)
        module.log("acc#5", 2.0)

    with pytest.raises(UserError, match="logs 'acc@5' and 'acc#5', which are both stored as 'acc_5'; rename one"):
        judged(Asking(log))


@pytest.mark.parametrize("given", ["a", "val/loss (mean)", "//", "../x", "a/./b", "x:y", "ä ö/ü", "%", "x" * 999])
def test_mlflow_takes_every_name(given):
    from mlflow.utils.validation import _validate_metric, _validate_metric_name

    name = metric_name(given)
    _validate_metric_name(name)
    _validate_metric(name, 1.0, 0, 0)
    assert metric_name(name) == name
