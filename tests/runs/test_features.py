"""Features of a frozen network, computed once."""

import pytest
import torch

from fl_lightning import experiment, load_model
from fl_lightning.runs import features
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.features import with_features
from fl_lightning.runs.problem import problem_of

SETTINGS = {
    **{"method": "fola", "engine": "functional", "data.clients": 3, "federation.rounds": 2, "model.hidden": [8, 6]},
    **{"training.lr": 0.1, "data.subset": 0.2, "data.test_subset": 0.2, "model.dropout": 0.2, "model.train": "head"},
    **{"compute.precision": "float64", "data.validation": 0.1, "data.client_test": 0.2},
}


def of(**changes):
    config = configure({**SETTINGS, **{key.replace("__", "."): value for key, value in changes.items()}})
    return config, problem_of(config)


def test_the_head_alone_keeps_its_name_and_gives_the_same_outputs():
    config, problem = of()
    quick = with_features(config, problem)
    assert list(quick.task.initial.params) == ["layers.7.weight", "layers.7.bias"]
    places = problem.clients[0]
    outputs = []
    for one in (problem, quick):
        dataset = one.dataset
        with one.task.evaluating():
            outputs.append(one.task.outputs(dataset.inputs(dataset.train_x[places], torch.float64)))
    assert torch.allclose(*outputs, rtol=1e-12, atol=1e-12)


def test_features_are_shared_where_nothing_of_them_differs(monkeypatch):
    config, problem = of()
    first = with_features(config, problem).dataset.train_x
    assert with_features(*of(method="fedavg")).dataset.train_x is first
    assert with_features(*of(data__subset=0.3)).dataset.train_x is not first
    assert with_features(*of(seed=1)).dataset.train_x is not first  # another network
    monkeypatch.setattr(features, "SHARE", 0.0)
    assert with_features(config, problem) is problem


PLUGIN = '''
from torch import nn, ones

class Own(nn.Module):
    """A user's network, whose settings are no weights."""

    def __init__(self, shape, num_classes, slope: float = 0.0, scaled: bool = False):
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.LeakyReLU(slope))
        self.head = nn.Linear(6, num_classes)
        if scaled:
            self.register_buffer("scale", ones(6))

    def forward(self, x):
        return self.head(self.body(x))
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "own.py").write_text(PLUGIN)
    monkeypatch.setenv("FL_LIGHTNING_PLUGINS", str(tmp_path / "plugins"))
    base = {key: value for key, value in SETTINGS.items() if not key.startswith("model.")}

    def of_own(**changes):
        config = configure(
            {**base, "model": "own", "model.train": "head"} | {f"model.{k}": v for k, v in changes.items()}
        )
        return config, problem_of(config)

    return of_own


def test_the_same_weights_with_another_activation_give_other_features(own):
    first, second = (with_features(*own(slope=slope)).dataset.train_x for slope in (0.0, 0.5))
    assert not torch.equal(first, second)


def test_a_network_with_buffers_of_its_own_is_saved_and_loaded_whole(own, out):
    config, problem = own(scaled=True)
    assert with_features(config, problem) is problem
    assert "scale" in load_model(experiment.run(config, out)).state_dict()


@pytest.mark.parametrize("changes", [{"model__train": "last:2"}, {"compute__keep_features": False}])
def test_other_problems_stay_as_they_are(changes):
    config, problem = of(**changes)
    assert with_features(config, problem) is problem


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["functional", "lightning"])
def test_numbers_are_equal_with_and_without(out, engine):
    runs = [experiment.run(of(engine=engine, compute__keep_features=kept)[0], out) for kept in (True, False)]
    for one, other in zip(*(run.history for run in runs), strict=True):
        for name in ("GA", "LA", "train_loss", "bytes_up", "bytes_down"):
            assert one[name] == pytest.approx(other[name], rel=1e-9), name
    one, other = (load_model(run).state_dict() for run in runs)
    assert list(one) == list(other)
    assert all(torch.allclose(one[name], other[name], rtol=1e-9, atol=1e-12) for name in one)
