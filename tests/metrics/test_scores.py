import pytest
import torch
from torch import nn
from torch.func import functional_call

from fl_lightning.engines.functional import Functional
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola
from fl_lightning.metrics import round_metrics as accuracy_probe
from fl_lightning.metrics.round_metrics import ClientEvaluator, measure
from fl_lightning.metrics.scores import score
from fl_lightning.metrics.settings import Evaluation
from fl_lightning.models.task import Weights
from tests.support.cases import network, ragged


def accuracy(model, params, dataset):
    model.load_state_dict(params)
    model.eval()
    correct = sum(int(model(x[None]).argmax() == y) for x, y in zip(dataset.test_x, dataset.test_y, strict=True))
    return correct / len(dataset.test_y)


def test_ga_and_la_equal_a_loop_over_samples():
    case, method = ragged(), Fola()
    record = case.run(method)[-1]
    found = measure(method, case.task(), case.dataset, record)
    model = network()
    assert found.metrics["GA"] == accuracy(model, record.after.state.params, case.dataset)
    singles = [accuracy(model, client.local.params, case.dataset) for client in record.clients]
    weights = [len(case.clients[n]) for n in record.cohort.members]
    expected = sum(w * a for w, a in zip(weights, singles, strict=True)) / sum(weights)
    assert found.metrics["LA"] == pytest.approx(expected)
    assert found.clients["accuracy"] == singles
    spread = [found.metrics[name] for name in ("LA_min", "LA_q25", "LA_median", "LA_q75", "LA_max")]
    assert spread == pytest.approx(torch.tensor(singles).double().quantile(torch.linspace(0, 1, 5).double()).tolist())
    model.load_state_dict(record.after.state.params)
    nll = torch.nn.functional.cross_entropy(model(case.dataset.test_x), case.dataset.test_y)
    assert found.metrics["NLL"] == pytest.approx(nll.item())


def test_evaluation_is_blind_to_the_size_of_blocks(monkeypatch):
    case = ragged()
    task = case.task()
    whole = score(task, [task.initial], case.dataset, calibrated=1)
    monkeypatch.setattr(accuracy_probe, "BLOCK", 7)
    assert score(task, [task.initial], case.dataset, calibrated=1)[0][:4] == pytest.approx(whole[0][:4])


def test_every_model_is_measured_with_its_own_buffers():
    """The statistics of BatchNorm: the server's as they are after the round, a client's as it has left them."""
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()
    case, method = ragged(sizes=(20, 7, 33))._replace(model=model), FedAvg()
    record = case.run(method)[-1]

    def nll(params, buffers):
        logits = functional_call(model.eval(), (params, buffers), (case.dataset.test_x,))
        return float(nn.functional.cross_entropy(logits, case.dataset.test_y))

    found = measure(method, case.task(), case.dataset, record)
    assert found["NLL"] == pytest.approx(nll(record.after.state.params, record.after.buffers), rel=1e-12)
    own = [nll(client.local.params, client.local.buffers) for client in record.clients]
    assert [one.score.nll for one in ClientEvaluator(case.task())(record.clients)] == pytest.approx(own, rel=1e-12)
    weights, task = Weights(record.after.state.params, record.after.buffers), case.task()
    scores = accuracy_probe._scores(task, weights, case.dataset, record, Evaluation())
    assert [one.nll for one in scores[1:]] == pytest.approx(own, rel=1e-12)


def test_dropout_is_off_in_evaluation_and_back_on_afterwards():
    case = ragged()._replace(model=network(dropout=0.5))
    task = case.task()
    task.model.train()
    scores = {score(task, [task.initial], case.dataset)[0] for _ in range(5)}
    assert len(scores) == 1
    assert task.model.training


def test_losses_are_reported_apart():
    case, method = ragged(), Fola(strength=20)
    first, *_, last = (measure(method, case.task(), case.dataset, r) for r in case.run(method))
    assert first.metrics["prior_loss"] == 0  # there is no prior in round 1
    assert last.metrics["prior_loss"] > 0
    assert 0 < last.metrics["train_loss"] < 2


def test_the_train_loss_is_the_mean_over_all_samples_seen():
    """At learning rate 0 it is the client's mean loss at the start, however the batches fall."""
    case = ragged()
    record = case.run(Fola(), Functional(chunk=1), lr=0.0, rounds=1)[0]
    for result in record.clients:
        x, y = next(result.local.data.blocks(1000))
        expected = case.task().loss(Weights(record.before.state.params, {}), x, y)
        assert result.train_loss == pytest.approx(float(expected))


def test_counts_and_times():
    case, method = ragged(), Fola()
    record = case.run(method, rounds=1)[0]
    found = measure(method, case.task(), case.dataset, record).metrics
    assert found["gradient_evaluations"] == 2 * 61
    parts = ("seconds_local", "seconds_server", "seconds_evaluation")
    assert found["seconds"] == pytest.approx(sum(found[name] for name in parts))
    assert {"precision_median", "weight_shift", "prior_stability"} <= found.keys()


def test_brier_and_ece_of_the_servers_model_stand_beside_its_nll():
    case, method = ragged(), Fola()
    record = case.run(method)[-1]
    found = measure(method, case.task(), case.dataset, record).metrics
    model = network()
    model.load_state_dict(record.after.state.params)
    p = model.eval()(case.dataset.test_x).detach().softmax(1)
    truth = torch.nn.functional.one_hot(case.dataset.test_y, p.shape[1])
    assert found["Brier"] == pytest.approx(float((p - truth).square().sum(1).mean()))
    confidence, guess = p.max(1)
    bins = (confidence * 15).ceil().clamp(1, 15)
    gaps = [((guess == case.dataset.test_y).double() - confidence)[bins == b].sum().abs() for b in range(1, 16)]
    assert found["ECE"] == pytest.approx(float(sum(gaps)) / len(p))
