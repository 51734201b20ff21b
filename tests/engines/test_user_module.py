"""LightningModules that were written without us in mind: trained by their own step, judged by their forward."""

from copy import deepcopy
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from fl_lightning import discovery
from fl_lightning.contrib.fedsparse import FedSparse
from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.loop import federate
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fednova import FedNova
from fl_lightning.methods.fola import Fola
from fl_lightning.methods.fola_extended import FolaExtended
from fl_lightning.metrics.round_metrics import measure
from fl_lightning.models.task import Task, Weights
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import problem_of
from fl_lightning.system import trees
from fl_lightning.training import Training
from tests.support.cases import equal_bits, final, largest_difference, network, ragged

SIZES = (11, 4, 0, 9, 1)
METHODS = {
    "no penalty": FedAvg(),
    "fisher of batches": Fola(strength=1),
    "fisher of samples": Fola(strength=1, fisher="per_sample"),
}
ENGINES = {"loop": Functional(chunk=1), "vmap": Functional(chunk=4), "lightning": Lightning()}


class Plain(pl.LightningModule):
    """A step and a forward."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.net = network(dropout=dropout)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss


class Full(Plain):
    """As tutorials have it: metrics, a dict, AdamW, two schedulers."""

    def __init__(self, lr=0.05, interval="step"):
        super().__init__()
        self.save_hyperparameters()
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y, label_smoothing=0.1)
        self.log("train_acc", self.accuracy(logits, y), on_epoch=True)
        self.log_dict({"train_loss": loss, "batch": float(batch_idx)})
        return {"loss": loss, "logits": logits.detach()}

    def configure_optimizers(self):
        optimiser = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr, eps=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, step_size=1, gamma=0.7)
        return {
            "optimizer": optimiser,
            "lr_scheduler": {"scheduler": schedule, "interval": self.hparams.interval, "frequency": 1},
        }


class OneCycle(Plain):
    """Asks its Trainer how long it trains."""

    def configure_optimizers(self):
        optimiser = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        steps = self.trainer.estimated_stepping_batches
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=0.2, total_steps=steps + 1)
        return [optimiser], [{"scheduler": cycle, "interval": "step"}]


def own(module, **changes):
    return ragged(sizes=SIZES)._replace(model=module.double()).changed(**{"rounds": 2, "lr": 0.01} | changes)


def unprefixed(params):
    return {name.removeprefix("net."): value for name, value in params.items()}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "lightning"])
@pytest.mark.parametrize("name", sorted(discovery.discover("methods")))
def test_every_method_trains_it_as_the_network_inside(name, engine):
    """The same loss, so the same numbers; methods that remake the network say that they cannot."""
    method = discovery.find("methods", name)()
    changes = {"epochs": 3, "fraction": 0.7, "lr": 0.1}
    try:
        found = final(own(Plain(), **changes).run(method, ENGINES[engine]))
    except UserError:
        pytest.skip("the method refuses such a network")
    plain = final(ragged(sizes=SIZES)._replace(model=network()).changed(rounds=2, **changes).run(method))
    assert largest_difference(unprefixed(found), plain) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"clip_norm": 0.3, "straggler_fraction": 0.5, "epochs": 3}], ids=str)
@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
@pytest.mark.parametrize("module", [Full(), Full(interval="epoch"), OneCycle()], ids=["step", "epoch", "one cycle"])
def test_engines_agree_on_its_own_optimiser(module, method, settings):
    case = own(module, **settings)
    loop, lightning = case.run(method), case.run(method, Lightning())
    states = (trees.leaves(records[-1].after.state) for records in (loop, lightning))  # with FOLA's Fisher
    assert all(torch.allclose(a, b, rtol=0, atol=1e-12) for a, b in zip(*states, strict=True))
    for mine, theirs in zip(loop[-1].clients, lightning[-1].clients, strict=True):
        assert mine.train_loss == pytest.approx(theirs.train_loss, abs=1e-12)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_client_is_a_plain_loop_over_its_step(engine):
    """Brute force with the module, its optimiser and its schedule, as without federated learning."""
    case = own(Full(), rounds=1)
    for result in case.run(FedAvg(), engine)[0].clients:
        module = deepcopy(case.model).train()
        module.log = lambda *_, **__: None
        found = module.configure_optimizers()
        for position, batch in enumerate(result.local.plan.all_examples()):
            found["optimizer"].zero_grad()
            module.training_step(batch, position)["loss"].backward()
            found["optimizer"].step()
            found["lr_scheduler"]["scheduler"].step()
        expected = {name: p.detach() for name, p in module.named_parameters()}
        assert largest_difference(result.local.params, expected) < 1e-12


@pytest.mark.parametrize("optimiser", ["sgd", "adam", "adamw"])
def test_the_settings_optimiser_may_take_the_place_of_its_own(optimiser):
    case = own(Full(), optimiser=optimiser, lr=0.03)
    loop = final(case.run(Fola(strength=1)))
    assert largest_difference(loop, final(case.run(Fola(strength=1), Lightning()))) < 1e-12
    assert largest_difference(loop, final(own(Full()).run(Fola(strength=1)))) > 1e-4


def test_dropout_draws_the_same_masks_on_both_engines():
    case = own(Plain(dropout=0.5))
    assert largest_difference(final(case.run(FedAvg())), final(case.run(FedAvg(), Lightning()))) < 1e-12


def test_lightnings_hooks_callbacks_and_logs_work_and_know_the_client():
    seen = []

    class Watching(Plain):
        def on_train_epoch_end(self):
            seen.append((self.round, self.client, float(self.trainer.callback_metrics["train_loss"]) > 0))

        def configure_callbacks(self):
            return [Counting()]

    class Counting(pl.Callback):
        def on_fit_end(self, trainer, pl_module):
            seen.append((pl_module.round, pl_module.client, "fit"))

    case = own(Watching(), rounds=1, epochs=1)
    task = case.task()
    case.go_on(FedAvg(), task=task, engine=Lightning())
    assert seen == [(1, n, kind) for n in (0, 1, 3, 4) for kind in (True, "fit")]
    assert not {"client", "round", "training_step", "configure_optimizers"} & vars(task.model).keys()
    with pytest.raises(UserError, match="has configure_callbacks, on_train_epoch_end, which only Lightning calls"):
        case.run(FedAvg())


def test_names_of_its_own_are_left_alone():
    class Named(Plain):
        client = "mine"

    found = []

    class Seeing(pl.Callback):
        def on_fit_end(self, trainer, pl_module):
            found.append((pl_module.client, pl_module.round))

    own(Named(), rounds=1).run(FedAvg(), Lightning(callbacks=(Seeing(),)))
    assert set(found) == {("mine", 1)}


def test_what_is_measured_is_its_forward():
    case = own(Plain())
    task, plain = Task.of(deepcopy(case.model)), Task(network())
    records = case.go_on(FedAvg(), task=task)
    found = measure(FedAvg(), task, case.dataset, records[-1]).metrics
    others = case._replace(model=network()).go_on(FedAvg(), task=plain)
    expected = measure(FedAvg(), plain, case.dataset, others[-1]).metrics
    assert {key: found[key] for key in ("GA", "LA", "NLL")} == pytest.approx(
        {key: expected[key] for key in ("GA", "LA", "NLL")}, abs=1e-12
    )


@pytest.mark.parametrize("name", ["test_step", "validation_step"])
def test_what_its_own_evaluation_logs_is_measured_too(name):
    """Numbers are means over samples, metrics of torchmetrics are computed over all of them."""

    def step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits, y)
        self.log("accuracy", self.accuracy)
        self.log_dict({"loss": nn.functional.cross_entropy(logits, y), "GA": 1.0})

    case = own(type("Judging", (Full,), {name: step})())
    task = case.task()
    record = case.go_on(FedAvg(), task=task)[-1]
    found = measure(FedAvg(), task, case.dataset, record).metrics
    micro = MulticlassAccuracy(3)
    micro.update(task.logits(Weights(record.after.state.params, {}), case.dataset.test_x), case.dataset.test_y)
    assert found["accuracy"] == pytest.approx(float(micro.compute()))
    assert found["loss"] == pytest.approx(found["NLL"])
    assert (found["own_GA"], found["GA"] < 1) == (1.0, True)
    assert task.model.accuracy.update_count == 0


class Manual(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class NoForward(pl.LightningModule):
    def training_step(self, batch):
        return batch[0].sum()


class Silent(Plain):
    def training_step(self, batch):
        return None


class Annealed(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * 0.9**self.current_epoch


class Two(Plain):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), 0.1), torch.optim.SGD(self.parameters(), 0.1)]


class Plateau(Plain):
    def configure_optimizers(self):
        optimiser = torch.optim.SGD(self.parameters(), 0.1)
        return [optimiser], [{"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser), "monitor": "loss"}]


@pytest.mark.parametrize(
    ("module", "words"),
    [(Manual, "return the loss from training_step instead"), (NoForward, "NoForward has no forward")],
)
def test_a_module_that_cannot_be_a_model(module, words):
    with pytest.raises(UserError, match=words):
        Task.of(module())


@pytest.mark.parametrize(
    ("module", "method", "changes", "words"),
    [
        (Silent, FedAvg(), {}, "Silent.training_step must return a loss.*got NoneType"),
        (Annealed, FedAvg(), {}, "asks its Trainer for current_epoch while it trains.*use --engine lightning"),
        (Two, FedAvg(), {}, "must return one optimiser that takes one gradient per step, got SGD, SGD"),
        (Plateau, FedAvg(), {}, "ReduceLROnPlateau.*use --engine lightning"),
        (Full, FedAvg(), {"lr": 0.5}, "training.lr 0.5 is for --training.optimiser sgd.*has configure_optimizers"),
        (Full, FedNova(), {}, "fednova does not support --training.optimiser own"),
        (Plain, FedAvg(), {"optimiser": "own"}, "that of a LightningModule with configure_optimizers, got Plain"),
        (Plain, FedSparse(), {}, "trains a network of its own"),
        (Full, FolaExtended(curvature_form="kron", strength=1), {}, "training_step of Full has another loss"),
        (Full, FolaExtended(cavity=True), {}, "expected training.optimiser sgd, got own"),
    ],
)
def test_what_the_functional_engine_refuses(module, method, changes, words):
    with pytest.raises(UserError, match=words) as refusal:
        own(module(), lr=0.01).run(method, **changes)
    assert "\n" not in str(refusal.value)


def test_lightning_trains_what_is_no_function():
    flat = final(own(Plain(), lr=0.1).run(FedAvg(), Lightning()))
    assert largest_difference(final(own(Annealed(), lr=0.1).run(FedAvg(), Lightning())), flat) > 1e-4
    with pytest.raises(UserError, match="must return one optimiser"):
        own(Two(), lr=0.01).run(FedAvg(), Lightning())
    with pytest.raises(UserError, match=r"ReduceLROnPlateau.*loss.*no validation runs while a client is trained"):
        own(Plateau(), lr=0.01).run(FedAvg(), Lightning())


def test_a_run_leaves_the_module_as_it_was():
    case = own(Full())
    task = case.task()
    for engine in (Functional(), Lightning()):
        first = final(case.go_on(Fola(strength=1), task=task, engine=engine))
        with pytest.raises(RuntimeError, match="not attached"):
            _ = task.model.trainer
        assert "log" not in vars(task.model)
        assert equal_bits(final(case.go_on(Fola(strength=1), task=task, engine=engine)), first)


def documented():
    """The module of docs/extending.md."""
    text = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    return text.partition("# plugins/lit_digits.py\n")[2].partition("```")[0]


@pytest.mark.parametrize("method", ["fedavg", "fola"])
def test_a_file_with_a_module_is_a_model(method, tmp_path, monkeypatch):
    (tmp_path / "lit_digits_of_docs.py").write_text(documented())
    monkeypatch.setenv("FL_LIGHTNING_PLUGINS", str(tmp_path))
    settings = {"model": "lit_digits_of_docs", "model.hidden": 8, "data.clients": 3, "federation.rounds": 1}
    settings |= {"compute.precision": "float64", "method": method, "data.subset": 0.1}
    found = {}
    for engine in ("functional", "lightning"):
        config = configure({**settings, "engine": engine})
        assert config.flat()["model.lr"] == 0.01
        problem = problem_of(config)
        record = next(federate(config.method, problem, config.training, config.federation, config.engine))
        found[engine] = measure(config.method, problem.task, problem.dataset, record).metrics
    assert found["functional"]["NLL"] == pytest.approx(found["lightning"]["NLL"], rel=1e-9)
    assert 0 < found["lightning"]["val_f1"] < 1


def test_training_of_ones_own_has_no_settings_of_ours():
    for name, value in (("momentum", 0.9), ("schedule", "cosine"), ("weight_decay", 0.1)):
        with pytest.raises(UserError, match=f"training.{name} {value} is for --training.optimiser"):
            Training(optimiser="own", **{name: value})
