"""Targets and inputs of every task from the user's own files, to the end of a small run."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from fl_lightning import Dataset, Federation, Split, Task, Training, federate, measure, partition
from fl_lightning.data.sources.arrays import Arrays
from fl_lightning.data.sources.function import Function
from fl_lightning.data.sources.table import Table
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.loop import Problem
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola
from fl_lightning.models.likelihoods import Binary, Classification, MultiLabel, Regression, Tokens
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import problem_of
from fl_lightning.testing.cases import final, largest_difference

RNG = np.random.default_rng(0)
X = RNG.normal(size=(40, 3)).astype("float32")
TOKENS = RNG.integers(0, 6, (40, 5))
YES = X[:, 0] > 0
LABELS = (X[:, :2] > 0).astype(int)
AMOUNTS = X @ np.array([1.0, -2.0, 0.5])
NEXT = np.where(np.arange(5) < 4, np.roll(TOKENS, -1, 1), -100)

CASES = {
    "classes": (X, RNG.integers(0, 3, 40), {}, Classification(), 3),
    "answers": (X, YES, {}, Binary(), 1),
    "numbers that are answers": (X, YES.astype(int), {"task": "binary"}, Binary(), 1),
    "labels": (X, LABELS, {}, MultiLabel(), 2),
    "true and false": (X, LABELS.astype(bool), {}, MultiLabel(), 2),
    "one-hot labels": (X, np.eye(3)[np.arange(40) % 3], {"task": "multilabel"}, MultiLabel(), 3),
    "amounts": (X, AMOUNTS, {"noise": 0.5}, Regression(0.5), 1),
    "several amounts": (X, X[:, :2] * 3, {}, Regression(), 2),
    "whole amounts": (X, np.arange(40), {"task": "regression"}, Regression(), 1),
    "classes as amounts": (X, np.arange(40) % 3.0, {"task": "classification"}, Classification(), 3),
    "next tokens": (TOKENS, NEXT, {}, Tokens(), 6),
    "a class of tokens": (TOKENS, RNG.integers(0, 2, 40), {}, Classification(), 2),
}


@pytest.fixture
def file(tmp_path):
    def save(**arrays):
        np.savez(tmp_path / "my.npz", **arrays)
        return str(tmp_path / "my.npz")

    return save


@pytest.mark.parametrize("name", CASES)
def test_targets_say_what_they_are(name, file):
    x, y, settings, likelihood, number = CASES[name]
    dataset = Arrays(file(train_x=x, train_y=y), **settings).load()
    assert dataset.likelihood == likelihood
    assert dataset.num_classes == number
    assert len(dataset.train_y) + len(dataset.test_y) == 40
    assert (dataset.num_tokens == 6) == (x is TOKENS)
    both = torch.cat([dataset.train_y, dataset.test_y]).double()
    assert float(both.sum()) == pytest.approx(float(y.sum()), abs=1e-4)


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("classes", "mlp"),
        ("answers", "softmax"),
        ("labels", "mlp"),
        ("amounts", "mlp"),
        ("next tokens", "transformer"),
        ("a class of tokens", "lstm"),
    ],
)
def test_a_run_of_every_task(name, model, file):
    x, y, settings, likelihood, _ = CASES[name]
    options = {f"data.{key}": value for key, value in settings.items()}
    small = {"mlp": {"model.hidden": [4]}, "lstm": {"model.hidden": 4}, "transformer": {"model.width": 8}}
    options |= {"data.partition": "iid"} if isinstance(likelihood, Tokens) else {}
    config = configure(
        {"data": "arrays", "data.path": file(train_x=x, train_y=y), "data.clients": 3, "model": model, **options}
        | small.get(model, {})
    )
    problem = problem_of(config)
    assert problem.task.likelihood == likelihood
    rounds = federate(Fola(strength=1), problem, Training(lr=0.1), Federation(rounds=1))
    found = measure(Fola(strength=1), problem.task, problem.dataset, next(rounds)).metrics
    assert found["GA"] <= 1
    assert ("RMSE" in found) == isinstance(likelihood, Regression)


def test_label_skew_needs_labels(file):
    config = configure({"data": "arrays", "data.path": file(train_x=TOKENS, train_y=NEXT), "model": "lstm"})
    with pytest.raises(UserError, match="divides samples by their class, and those of tokens have none; use --data"):
        problem_of(config)


@pytest.mark.parametrize(
    ("y", "settings", "message"),
    [
        (np.arange(40) % 3.0, {}, "whole numbers as float64, .* say --data.task classification or regression"),
        (AMOUNTS, {"task": "classification"}, "whole numbers for classification, got"),
        (np.arange(40) % 3, {"task": "binary"}, "nothing but 0 and 1 for binary, got 2"),
        (np.arange(40) % 3, {"noise": 2.0}, "noise of a regression, got 2 for data.task classification"),
        (np.eye(3)[np.arange(40) % 3].astype(int), {}, "argmax.* --data.task multilabel"),
    ],
)
def test_targets_that_do_not_fit_are_refused(y, settings, message, file):
    with pytest.raises(UserError, match=message) as caught:
        Arrays(file(train_x=X, train_y=y), **settings).load()
    assert "\n" not in str(caught.value)


def test_tables_of_amounts_and_labels(tmp_path):
    path = str(tmp_path / "my.csv")
    table = pd.DataFrame({"a": X[:, 0], "b": X[:, 1], "price": AMOUNTS * 1e5, "old": LABELS[:, 0], "new": LABELS[:, 1]})
    table.to_csv(path, index=False)
    prices = Table(path, label="price", noise=0.3).load()
    assert prices.likelihood == Regression(0.3)
    assert float(prices.train_y.mean()) == pytest.approx(0, abs=1e-6)
    assert float(prices.train_y.std(correction=0)) == pytest.approx(1, abs=1e-6)
    assert prices.shape == (4,)
    labels = Table(path, label="old,new").load()
    assert labels.likelihood == MultiLabel()
    assert labels.train_y.shape[1:] == (2,)
    assert labels.shape == (3,)
    both = Table(path, label="price, a").load()
    assert both.train_y.shape[1:] == (2,)
    assert both.likelihood == Regression()
    assert Table(path, label="old").load().likelihood == Classification()
    assert Table(path, label="old", task="binary").load().likelihood == Binary()
    with pytest.raises(UserError, match="needs one label, got columns old, new"):
        Table(path, label="old,new", task="classification").load()


class Both(nn.Module):
    def __init__(self, classes=2):
        super().__init__()
        self.seen, self.read = nn.Linear(3, classes), nn.Embedding(6, classes)

    def forward(self, seen, read):
        return self.seen(seen) + self.read(read).mean(1)


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_several_inputs_reach_the_model_on_every_engine(kind):
    x, tokens = torch.from_numpy(X).double(), torch.from_numpy(TOKENS)
    inputs = {"seen": x, "read": tokens} if kind == "dict" else (x, tokens)
    y = torch.from_numpy(YES).long()
    dataset = Dataset(inputs, y, inputs, y, 2)
    clients = partition(dataset.train_y, Split(clients=3, alpha=1), seed=0)
    torch.manual_seed(0)
    model = Both().double()

    def run(engine, method):
        task = Task(Both().double())
        task.load(Task(model).initial)
        task = Task(task.model)
        return list(federate(method, Problem(task, dataset, clients), Training(lr=0.1), Federation(rounds=2), engine))

    for method in (FedAvg(), Fola(strength=1, fisher="per_sample"), Fola(strength=0.1, curvature_form="full")):
        loop = run(Functional(chunk=1), method)
        for engine in (Functional(chunk=3), Lightning()):
            assert largest_difference(final(loop), final(run(engine, method))) < 1e-12
    found = measure(method, Task(model), dataset, loop[-1]).metrics["GA"]
    params = loop[-1].after.state.params
    expected = torch.func.functional_call(model, params, (x, tokens)).argmax(1).eq(y).double().mean()
    assert found == pytest.approx(float(expected))


def test_several_inputs_from_files(file, tmp_path):
    dataset = Arrays(file(**{"train_x.seen": X, "train_x.read": TOKENS, "train_y": YES.astype(int)})).load()
    assert dataset.shape == {"read": (5,), "seen": (3,)}
    assert dataset.num_tokens == 6
    code = tmp_path / "mine.py"
    code.write_text(
        "import numpy as np\n"
        "def load():\n"
        "    return {'train_x': (np.ones((9, 2)), np.arange(9)[:, None]), 'train_y': np.arange(9) / 7}\n"
    )
    dataset = Function(str(code), noise=0.1).load()
    assert dataset.shape == ((2,), (1,))
    assert dataset.likelihood == Regression(0.1)
    assert Function(str(code)).fingerprint() == Function(str(code)).fingerprint()
    with pytest.raises(UserError, match="the model mlp cannot be made for inputs of numbers of shape"):
        problem_of(configure({"data": "function", "data.path": str(code), "model": "mlp", "data.clients": 2}))


def test_inputs_that_do_not_go_together_are_refused():
    x, y = torch.zeros(4, 2), torch.tensor([0, 1, 0, 1])
    for train, test, message in (
        ((x, x), (x,), "the same inputs"),
        ({"a": x}, {"a": x[:3]}, r"test_x\['a'\] and test_y must have the same number"),
        ({"a": x, "b": x}, {"a": x, "b": x.double()}, r"train_x\['b'\] and test_x\['b'\] must hold inputs of one"),
    ):
        with pytest.raises(UserError, match=message):
            Dataset(train, y, test, y, 2)
