import signal
from collections import Counter

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning.client import ClientModule
from fl_lightning.data import augment
from fl_lightning.engines.functional import AUTO_CHUNK, Functional
from fl_lightning.engines.lightning import Lightning, fabric_on
from fl_lightning.errors import UserError
from fl_lightning.loop import federate
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola
from fl_lightning.metrics.scores import score
from fl_lightning.models.task import Task, Weights
from tests.support.cases import ENGINES, equal_bits, final, largest_difference, network, ragged
from tests.support.pictures import pictures


def test_dropout_masks_are_the_same_under_lightning_and_in_the_loop():
    case = ragged()._replace(model=network(dropout=0.5))
    loop, trainer = case.run(Fola(), Functional(chunk=1)), case.run(Fola(), Lightning())
    assert largest_difference(final(loop), final(trainer)) < 1e-12
    without = ragged().run(Fola())
    assert largest_difference(final(loop), final(without)) > 1e-3


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_dropout_is_reproducible_and_leaves_the_global_stream_alone(engine):
    case = ragged()._replace(model=network(dropout=0.5))
    torch.manual_seed(5)
    first = final(case.run(FedAvg(), engine))
    after = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), after)
    assert equal_bits(final(case.run(FedAvg(), engine)), first)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_a_network_in_evaluation_mode_is_trained_in_training_mode(engine):
    training, evaluating = ragged()._replace(model=network(dropout=0.5)), network(dropout=0.5).eval()
    assert equal_bits(
        final(training.run(Fola(), engine)), final(training._replace(model=evaluating).run(Fola(), engine))
    )


def test_a_slurm_job_of_several_tasks_changes_nothing(monkeypatch):
    expected = final(ragged().run(Fola(), Lightning()))
    for name, value in {"SLURM_NTASKS": "4", "SLURM_JOB_NAME": "sweep", "SLURM_PROCID": "1"}.items():
        monkeypatch.setenv(name, value)
    fabric_on.cache_clear()
    assert equal_bits(final(ragged().run(Fola(), Lightning())), expected)
    assert equal_bits(final(ragged().run(Fola(), Lightning(callbacks=(pl.Callback(),)))), expected)


def test_one_backward_pass_per_step():
    case = ragged()
    passes = []

    class Counting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, slope):
            passes.append(1)
            return slope

    class Counted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return Counting.apply(self.inner(x))

    for engine in (Functional(chunk=1), Lightning()):
        passes.clear()
        records = case._replace(model=Counted()).run(Fola(strength=10), engine)
        steps = sum(client.local.num_steps for record in records for client in record.clients)
        assert len(passes) == steps


def test_user_callbacks_see_every_fit_and_every_epoch():
    class Counter(pl.Callback):
        def __init__(self):
            self.fits = self.epochs = 0
            self.clients = []

        def on_fit_start(self, trainer, pl_module):
            assert isinstance(pl_module, ClientModule)
            self.fits += 1
            self.clients.append(pl_module.plan.data.client)

        def on_train_epoch_end(self, trainer, pl_module):
            self.epochs += 1

    counter = Counter()
    case = ragged()
    with_counter = final(case.run(FedAvg(), Lightning(callbacks=(counter,)), rounds=2))
    assert (counter.fits, counter.epochs) == (8, 16)
    assert counter.clients == [0, 1, 3, 4] * 2
    assert equal_bits(with_counter, final(case.run(FedAvg(), Lightning(), rounds=2)))


def test_ctrl_c_reaches_the_caller():
    class Interrupter(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            ragged().run(FedAvg(), Lightning(callbacks=(Interrupter(),)))
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_observer_refuses_accumulated_gradients():
    class Accumulating(pl.Callback):
        def setup(self, trainer, pl_module, stage):
            trainer.accumulate_grad_batches = 2

    with pytest.raises(UserError, match="accumulate_grad_batches must be 1"):
        ragged().run(Fola(), Lightning(callbacks=(Accumulating(),)), rounds=1)


def test_auto_batches_tiny_models_only():
    tiny, large = Task(network()), Task(torch.nn.Linear(784, 500))
    assert Functional().chunk_for(tiny, [6, 6, 5]) == AUTO_CHUNK
    assert Functional().chunk_for(tiny, [90, 6, 5]) == 1  # all would wait for the longest
    assert Functional().chunk_for(large, [6, 6, 6]) == 1
    assert Functional(chunk=7).chunk_for(large, [90, 6]) == 7


def test_a_chunk_must_hold_somebody():
    with pytest.raises(UserError, match="at least 1, or auto"):
        Functional(chunk=0)


def test_the_workbench_is_free_between_runs():
    """A task can be used again: what a run leaves on its workbench does not leak into the next."""
    case = ragged()
    task = case.task()
    problem = case.problem()._replace(task=task)
    first = list(federate(FedAvg(), problem, case.training, case.federation, Functional(chunk=1)))
    second = list(federate(FedAvg(), problem, case.training, case.federation, Lightning()))
    assert largest_difference(final(first), final(second)) < 1e-12


def shown(monkeypatch, case, method, engine):
    """The final model and all augmented images, as bytes, in the order in which they were made."""
    images = []

    def apply(*arguments):
        augmented = real(*arguments)
        images.extend(image.numpy().tobytes() for image in augmented)
        return augmented

    real = augment.apply
    with monkeypatch.context() as patch:
        patch.setattr(augment, "apply", apply)
        return final(case.run(method, engine)), images


@pytest.mark.parametrize("name", ["standard", "paper"])
def test_all_engines_see_the_same_augmented_images(name, monkeypatch):
    case = pictures(name)
    model, images = shown(monkeypatch, case, Fola(), Functional(chunk=1))
    by_trainer, same_images = shown(monkeypatch, case, Fola(), Lightning())
    assert same_images == images
    assert largest_difference(model, by_trainer) < 1e-12
    for chunk in (2, 4):
        by_vmap, more_images = shown(monkeypatch, case, Fola(), Functional(chunk=chunk))
        assert Counter(images) <= Counter(more_images)  # some only pad
        assert largest_difference(model, by_vmap) < 1e-12
    assert largest_difference(model, final(pictures("none").run(Fola()))) > 1e-3


def test_only_training_batches_are_augmented(monkeypatch):
    """Neither test data nor the pass of the offline Fisher: as many images are made as samples are trained on."""
    case = pictures("paper")
    model, images = shown(monkeypatch, case, Fola(curvature="offline"), Functional(chunk=1))
    samples = sum(map(len, case.clients)) * case.training.epochs * case.federation.rounds
    assert len(images) == samples
    plain = pictures("none").dataset
    weights = Weights(model, {})
    assert score(case.task(), [weights], case.dataset) == score(case.task(), [weights], plain)
