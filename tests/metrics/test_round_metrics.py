"""What is measured when: rounds that are not due, clients that are not wanted, and the clients' own test sets."""

import math
import shutil
from dataclasses import replace

import pandas as pd
import pytest
import torch

from fl_lightning import experiment
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.shares import Shares
from fl_lightning.errors import UserError
from fl_lightning.loop import federate
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola
from fl_lightning.metrics import scores
from fl_lightning.metrics.round_metrics import ClientEvaluator, as_if_not_due, measure, summary
from fl_lightning.metrics.settings import Evaluation
from fl_lightning.models.networks.cnn import Cnn
from fl_lightning.models.task import Task
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.identity import identity
from fl_lightning.runs.problem import problem_of
from tests.support.cases import network, ragged

SETTINGS = {
    **{"method": "fedavg", "data": "digits", "data.subset": 0.1, "data.clients": 3, "model": "softmax"},
    **{"training.lr": 0.1, "federation.rounds": 5, "engine": "functional", "engine.chunk": 1},
}
CHEAP = {"train_loss", "prior_loss", "bytes_down", "bytes_up", "gradient_evaluations"}


def config(**changes):
    return configure({**SETTINGS, **{key.replace("__", "."): value for key, value in changes.items()}})


def timeless(history):
    return [{k: v for k, v in found.metrics.items() if not k.startswith("seconds")} for found in history]


def with_tests(case):
    """The case with a test set of its own for every client that has two samples."""
    numbers = [len(part) // 2 for part in case.clients]
    train = [part[number:] for part, number in zip(case.clients, numbers, strict=True)]
    tests = Shares.of([part[:number] for part, number in zip(case.clients, numbers, strict=True)])
    return case._replace(clients=train, dataset=replace(case.dataset, client_tests=tests))


def right(params, x, y):
    """The share of right answers, one sample after the other."""
    model = network()
    model.load_state_dict(params)
    return sum(int(model.eval()(one[None]).argmax() == label) for one, label in zip(x, y, strict=True)) / len(y)


def test_clients_are_measured_on_their_own_tests_before_and_after():
    case, method = with_tests(ragged()), FedAvg()
    record = case.run(method, fraction=0.7)[-1]
    found = measure(method, case.task(), case.dataset, record)
    before, after = [], []
    for client in record.clients:
        places = case.dataset.client_tests[client.local.client]
        x, y = case.dataset.train_x[places], case.dataset.train_y[places]
        before.append(right(record.before.state.params, x, y) if len(y) else math.nan)
        after.append(right(client.local.params, x, y) if len(y) else math.nan)
    assert found.clients["accuracy_before"] == pytest.approx(before, nan_ok=True)
    assert found.clients["accuracy_after"] == pytest.approx(after, nan_ok=True)
    assert found.clients["test_samples"] == [len(case.dataset.client_tests[n]) for n in record.cohort.members]
    for name, values in (("before", before), ("after", after)):
        known = pd.Series(values).dropna()
        assert found.metrics[f"PA_{name}"] == pytest.approx(known.mean())
        assert found.metrics[f"PA_{name}_worst"] == pytest.approx(known.min())  # a tenth of few is one
        assert found.metrics[f"PA_{name}_std"] == pytest.approx(known.std(ddof=0))


def test_ga_validation_is_that_of_samples_on_which_nobody_trains():
    case, method = ragged(), FedAvg()
    record = case.run(method)[-1]
    dataset = replace(case.dataset, validation=case.holdout)
    x, y = dataset.train_x[case.holdout], dataset.train_y[case.holdout]
    found = measure(method, case.task(), dataset, record)
    assert found["GA_validation"] == right(record.after.state.params, x, y)
    assert found["GA_validation"] != found["GA"]


def test_the_worst_tenth_is_rounded_up():
    values = [i / 100 for i in range(21)]
    assert summary(values)["_worst"] == pytest.approx((0 + 0.01 + 0.02) / 3)
    assert summary([]) == {}
    assert summary([0.4]) == {"": pytest.approx(0.4), "_worst": pytest.approx(0.4), "_std": 0.0}


def test_nothing_is_said_of_clients_without_tests():
    case = ragged()
    found = measure(FedAvg(), case.task(), case.dataset, case.run(FedAvg())[0])
    assert not [name for name in (*found.metrics, *found.clients) if name.startswith(("PA", "accuracy_", "test_"))]


@pytest.mark.parametrize("evaluation", [Evaluation(), Evaluation(2), Evaluation(local=False), Evaluation(3, True, 0.3)])
def test_a_judge_measures_what_the_consumer_would(evaluation):
    case, method = with_tests(ragged()).changed(rounds=4), Fola()

    def told(evaluate_clients):
        task = case.task()
        records = federate(
            method,
            case.problem()._replace(task=task, evaluate_clients=evaluate_clients and evaluate_clients(task)),
            case.training,
            case.federation,
        )
        return [measure(method, task, case.dataset, record, None, evaluation, 4) for record in records]

    alone, evaluated = told(None), told(lambda task: ClientEvaluator(task, None, evaluation, 4))
    assert timeless(alone) == timeless(evaluated)
    assert str([found.clients for found in alone]) == str([found.clients for found in evaluated])


def test_a_round_that_is_not_due_costs_no_pass_over_data(monkeypatch):
    case, method = with_tests(ragged()), FedAvg()
    record = case.run(method, rounds=1)[0]
    whole = measure(method, case.task(), case.dataset, record)
    monkeypatch.setattr("fl_lightning.models.task.Task.logits", None)
    found = measure(method, case.task(), case.dataset, record, None, Evaluation(every=2), 9)
    assert timeless([found]) == timeless([as_if_not_due(whole)])
    assert found.metrics.keys() >= CHEAP
    assert not found.metrics.keys() & {"GA", "LA", "LA_min", "NLL", "Brier", "ECE", "PA_before"}
    assert set(found.clients) == {"client", "samples", "steps", "train_loss", "prior_loss"}


def test_la_on_a_share_is_that_of_the_stratified_part_of_the_test_set():
    case, method = ragged(), FedAvg()
    record = case.run(method)[0]
    whole = measure(method, case.task(), case.dataset, record)
    part = measure(method, case.task(), case.dataset, record, None, Evaluation(local_share=0.25))
    assert part["GA"] == whole["GA"]
    from fl_lightning.data.partition import subset_indices

    places = subset_indices(case.dataset.test_y, 0.25)
    x, y = case.dataset.test_x[places], case.dataset.test_y[places]
    assert part.clients["accuracy"] == [right(client.local.params, x, y) for client in record.clients]


@pytest.mark.slow
def test_a_run_measures_every_so_many_rounds_and_the_last(out):
    full = experiment.run(config(), out)
    some = experiment.run(config(evaluation__every=2), out)
    assert ["GA" in found.metrics for found in some.history] == [False, True, False, True, True]
    for i in (1, 3, 4):
        assert timeless(some.history)[i] == timeless(full.history)[i]
    table = pd.read_parquet(some.folder / "rounds.parquet")
    assert table["GA"].isna().tolist() == [True, False, True, False, False]
    assert table["train_loss"].notna().all()
    assert some.final["GA"] == full.final["GA"]


@pytest.mark.slow
def test_more_rounds_go_on_as_if_they_had_been_wanted_from_the_start(out, tmp_path):
    first = experiment.run(config(evaluation__every=2, federation__rounds=3), out)
    longer = experiment.run(config(evaluation__every=2), out)
    assert [round for round, found in enumerate(longer.history, start=1) if "GA" in found.metrics] == [2, 4, 5]
    assert "accuracy" not in longer.history[2].clients
    shorter = experiment.run(config(evaluation__every=2, federation__rounds=4), out)  # round 4 is known
    assert timeless(shorter.history) == timeless(longer.history[:4])
    shutil.rmtree(first.folder)
    third = experiment.run(config(evaluation__every=2, federation__rounds=3), out)
    assert "GA" in third.final  # round 3 of the longer run was not measured, so it is computed


@pytest.mark.slow
def test_without_la(out):
    result = experiment.run(config(evaluation__local=False, federation__rounds=2), out)
    assert "LA" not in result.final
    assert result.summary()["LA"] is None
    assert "accuracy" not in pd.read_parquet(result.folder / "clients.parquet")
    assert (result.folder / "curves.png").exists()


def test_the_defaults_change_no_identity():
    assert identity(config(evaluation__every=1, evaluation__local=True)) == identity(config())
    assert len({identity(config(**{key: value})) for key, value in VARIED.items()}) == len(VARIED)


VARIED = {"evaluation__every": 2, "evaluation__local": False, "evaluation__local_share": 0.5, "data__client_test": 0.1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"evaluation__every": 0}, r"evaluation.every must be at least 1, got 0"),
        ({"evaluation__local_share": 0}, r"evaluation.local_share must be > 0 and <= 1, got 0"),
        ({"evaluation__local_share": 0.5, "evaluation__local": False}, r"leave one of them out"),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(UserError, match=message):
        config(**settings)


@pytest.mark.slow
def test_bits_do_not_depend_on_what_is_measured(out):
    """Evaluation only looks."""
    models = []
    for settings in ({}, {"evaluation__every": 3, "evaluation__local": False}):
        result = experiment.run(config(**settings), out)
        models.append(problem_of(config()).task)
        from fl_lightning import load_model

        models[-1] = load_model(result).state_dict()
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_convolutions_see_a_part_of_a_block_at_a_time_to_the_same_bits(monkeypatch):
    torch.manual_seed(0)
    x, y = torch.randint(0, 256, (1100, 3, 16, 16), dtype=torch.uint8), torch.randint(0, 10, (1100,))
    dataset, task = Dataset(x[:2], y[:2], x, y, num_classes=10), Task(Cnn((3, 16, 16), 10))
    seen = []
    task.model.register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    parts = scores.score(task, [task.initial], dataset, calibrated=1)
    assert seen == [250] * 4 + [100]
    monkeypatch.setattr(scores, "CONVOLVED", 10_000)
    assert scores.score(task, [task.initial], dataset, calibrated=1) == parts
    assert seen[5:] == [1000, 100]
