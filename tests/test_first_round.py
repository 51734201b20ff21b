"""One training for several methods and epochs gives, to the bit, what each run gives by itself."""

import contextlib
import random

import pytest
import torch
from torch.utils import _pytree as pytree

from fl_lightning import discovery, experiment
from fl_lightning.config import configure
from fl_lightning.engines.functional import Functional
from fl_lightning.errors import UserError
from fl_lightning.experiment import Outputs
from fl_lightning.loop import federate
from fl_lightning.runs.identity import identity
from tests.methods.variants import variants as with_choices
from tune.comparison import variant_settings
from tune.first_round import share_first_round, train_together

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
        for config, progress in share_first_round(configs, out, outputs=lambda _: SLIM)
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


def test_runs_that_share_are_measured_as_by_themselves(tmp_path):
    configs = [
        configure({**SETTINGS, "training.batch_size": None, "method": method, "training.epochs": epochs})
        for method in ("fedavg", "fola", "fedsgd", "centralised")
        for epochs in EPOCHS[:2]
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


# Numbers that change what a client shows or is told.
OPTIONS = ["fednova+tau_eff=min", "fednova+mu=0.1", "fedpa+window=2+discard=1", "fedpa+burn_in=0", "fedcurv+strength=0"]


def variants():
    """Every discovered method as it is, with each of its choices in turn, and some with other numbers."""
    return [*discovery.names("methods"), *with_choices(), *OPTIONS]


def record_alone(config, problem):
    (record,) = federate(
        config.method,
        problem.task,
        problem.dataset,
        problem.clients,
        config.training,
        config.federation,
        config.engine,
        config.seed,
        problem.holdout,
    )
    return record


def content(record):
    """Everything that a round has given, as bytes and numbers."""
    clients = [(c.local._replace(task=None, data=None, plan=None), c.train_loss, c.prior_loss) for c in record.clients]
    counts = (record.bytes_down, record.bytes_up, record.gradient_evaluations, record.cohort.epochs)
    leaves, shape = pytree.tree_flatten((clients, record.reports, record.after, counts))
    return shape, [leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


# Null batches are what FedSGD adapts its settings to: only there does it share, after one epoch whatever is asked for.
@pytest.mark.parametrize(
    ("engine", "dropout", "batch_size"),
    [("functional", 0.0, 16), ("functional", 0.4, 16), ("functional", 0.4, None), ("lightning", 0.4, None)],
)
def test_any_company_gives_what_each_gives_by_itself(engine, dropout, batch_size):
    """All methods and variants at random epochs, in random order: the round is, to the bit, that of the run alone."""
    chance = random.Random(f"{dropout} {batch_size} {engine}")
    names = variants() if engine == "functional" else chance.sample(variants(), 8)
    names += chance.sample(names, 5)  # at other epochs
    chance.shuffle(names)
    settings = {
        **{key: value for key, value in SETTINGS.items() if not key.startswith("engine")},
        "data.subset": 0.1,
        "data.clients": 3,
        "model.dropout": dropout,
        "training.batch_size": batch_size,
        "engine": engine,
        **({"engine.chunk": 1} if engine == "functional" else {}),
    }
    configs = []
    for name in names:
        changes = {"training.epochs": chance.choice(EPOCHS), **variant_settings(name)}
        with contextlib.suppress(UserError):
            configs.append(configure({**settings, **changes}))
    problem = experiment.build(configs[0])
    sharing = 0
    for config, records in train_together(configs, problem):
        if records is not None:
            sharing += 1
            (record,) = records
            assert content(record) == content(record_alone(config, problem)), config.flat()
    assert sharing > len(configs) / 4


def problem_and(*variants, **changes):
    """Runs of these variants in this order, and their problem."""
    settings = {**SETTINGS, "data.subset": 0.1, "training.epochs": 3, **changes}
    configs = [configure({**settings, **variant_settings(variant)}) for variant in variants]
    return configs, experiment.build(configs[0])


def test_whoever_comes_first_the_others_share():
    configs, problem = problem_and("fedsgd", "fedavg", "fola", "fedsgd", "fedprox")
    shared = {config.names["method"]: records is not None for config, records in train_together(configs, problem)}
    assert shared == {"fedsgd": True, "fedavg": True, "fola": True, "fedprox": False}


def test_a_warm_up_that_diverges_takes_nobody_with_it():
    wild = "data_sharing+share=0+warmup_epochs=2+warmup_lr=1e38"
    configs, problem = problem_and("fedavg", wild, "fola")
    shared = [config.names["method"] for config, records in train_together(configs, problem) if records is not None]
    assert shared == ["fedavg", "fola"]
