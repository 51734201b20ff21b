"""One training for several methods and epochs gives, to the bit, what each run gives by itself."""

import pytest

from fl_lightning import discovery, experiment
from fl_lightning.config import configure
from fl_lightning.engines.functional import Functional
from fl_lightning.experiment import Outputs
from fl_lightning.runs.identity import identity
from tune import first_round

SETTINGS = {
    "data": "digits",
    "data.subset": 0.3,
    "data.clients": 5,
    "data.alpha": 0.3,
    "data.holdout": 0.1,
    "model": "mlp",
    "model.hidden": [12],
    "training.lr": 0.1,
    "federation.rounds": 1,
    "engine": "functional",
    "engine.chunk": 1,
}
EPOCHS = (2, 3, 5)
SLIM = Outputs(pictures=False, checkpoint=False)


@pytest.fixture(autouse=True)
def one_store(out, monkeypatch):
    """For all folders of runs of a test."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{out / 'mlflow.db'}")


def timeless(result):
    """Everything that was measured, but for the clock."""
    (measured,) = result.history
    return {k: v for k, v in measured.metrics.items() if not k.startswith("seconds")}, measured.clients


def shared(configs, out):
    return {
        identity(config): experiment.finish(progress)
        for config, progress in first_round.share_first_round(configs, out, outputs=lambda _: SLIM)
    }


def fits(monkeypatch):
    """Counts the local trainings."""
    counted = []
    fit = Functional.fit

    def counting(self, method, task, context, buffers, plans):
        counted.append(plans[0].num_epochs)
        return fit(self, method, task, context, buffers, plans)

    monkeypatch.setattr(Functional, "fit", counting)
    return counted


@pytest.mark.parametrize("name", discovery.discover("methods"))
def test_every_method_gives_what_it_gives_by_itself(name, tmp_path):
    configs = [
        configure({**SETTINGS, "method": method, "training.epochs": epochs})
        for method in dict.fromkeys(("fedavg", name))
        for epochs in EPOCHS
    ]
    together = shared(configs, tmp_path / "together")
    assert len(together) == len(configs)
    for config in configs:
        alone = experiment.finish(experiment.rounds(config, tmp_path / "alone", outputs=SLIM))
        assert timeless(together[identity(config)]) == timeless(alone), identity(config)


@pytest.mark.parametrize("changes", [{"training.momentum": 0.9}, {"engine": "lightning"}, {"federation.fraction": 0.5}])
def test_it_holds_for_other_settings_too(changes, tmp_path):
    settings = {key: value for key, value in SETTINGS.items() if key != "engine.chunk" or "engine" not in changes}
    configs = [
        configure({**settings, **changes, "method": method, "training.epochs": epochs, **options})
        for method, options in (("fedavg", {}), ("fola", {}), ("fola", {"method.fisher": "per_sample"}))
        for epochs in EPOCHS
    ]
    together = shared(configs, tmp_path / "together")
    for config in configs:
        alone = experiment.finish(experiment.rounds(config, tmp_path / "alone", outputs=SLIM))
        assert timeless(together[identity(config)]) == timeless(alone)


def test_it_trains_once(tmp_path, monkeypatch):
    counted = fits(monkeypatch)
    methods = ("fedavg", "fola", "fednova", "fedcurv")
    shared([configure({**SETTINGS, "method": m, "training.epochs": e}) for m in methods for e in EPOCHS], tmp_path)
    assert counted == [max(EPOCHS)]


def test_what_has_a_penalty_trains_by_itself(tmp_path, monkeypatch):
    counted = fits(monkeypatch)
    shared(
        [configure({**SETTINGS, "method": m, "training.epochs": 2}) for m in ("fedavg", "fola", "fedprox")], tmp_path
    )
    assert counted == [2, 2]


def test_what_is_there_is_only_read(tmp_path, monkeypatch):
    configs = [configure({**SETTINGS, "method": "fola", "training.epochs": epochs}) for epochs in EPOCHS]
    first = shared(configs[:2], tmp_path)
    counted = fits(monkeypatch)
    again = shared(configs, tmp_path)
    assert counted == [5]
    assert all(again[key].run_id == result.run_id for key, result in first.items())


def test_divergence_after_some_epochs_leaves_the_earlier_ones(tmp_path):
    wild = {**SETTINGS, "model": "softmax", "training.lr": 1e37, "method": "fedavg"}
    wild = {key: value for key, value in wild.items() if key != "model.hidden"}
    configs = [configure({**wild, "training.epochs": epochs}) for epochs in (1, 40)]
    together = shared(configs, tmp_path / "together")
    for config in configs:
        alone = experiment.finish(experiment.rounds(config, tmp_path / "alone", outputs=SLIM))
        assert (together[identity(config)].status, together[identity(config)].message) == (alone.status, alone.message)
