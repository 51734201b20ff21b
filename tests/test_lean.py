"""The lean loop calls what Lightning's own loop calls, in the same order with the same arguments, to the same bits."""

import inspect
import warnings

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning.engines import lean as lean_loop
from fl_lightning.engines.lean import LeanEpochLoop, lean


def described(value):
    """What an argument says, without the identity of objects that each fit has of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    if isinstance(value, dict):
        return {key: described(item) for key, item in value.items()}
    return value if isinstance(value, int | float | str | None) else type(value).__name__


HOOKS = [name for name, _ in inspect.getmembers(pl.Callback, inspect.isfunction) if name.startswith("on_")]
HOOKS = [name for name in HOOKS if "checkpoint" not in name]


def recorder(events):
    """A callback that overrides every hook."""

    def hook(name):
        def record(self, trainer, module, *args):
            logged = described(dict(trainer.callback_metrics)) if trainer.training else {}
            events.append((name, described(args), module._current_fx_name, trainer.global_step, logged))

        return record

    return type("Recorder", (pl.Callback,), {name: hook(name) for name in HOOKS})()


class Plain(pl.LightningModule):
    def __init__(self, events):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.layer = torch.nn.Linear(3, 2)
        self.events = events

    def training_step(self, batch, batch_idx):
        self.events.append(("training_step", batch_idx, self._current_fx_name, torch.get_default_dtype()))
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Hooked(Plain):
    """Overrides the module's hooks, and logs from several of them."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return {"loss": loss, "batch": batch_idx}

    def on_before_zero_grad(self, optimizer):
        self.events.append(("module zero", type(optimizer).__name__))

    def on_before_backward(self, loss):
        self.events.append(("module before", loss.item()))

    def on_after_backward(self):
        self.log("slope", self.layer.weight.grad.norm())
        self.events.append(("module after", described(self.layer.weight.grad)))

    def on_before_optimizer_step(self, optimizer):
        self.events.append(("module step", type(optimizer).__name__, self._current_fx_name))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.events.append(("module end", described(outputs)))

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.events.append(("module clips", gradient_clip_val))
        self.clip_gradients(optimizer, 0.5, "norm")

    def backward(self, loss):
        self.events.append(("module backward", self._current_fx_name))
        loss.backward()

    def configure_optimizers(self):
        optimiser = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, 2)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Plateau(Plain):
    def training_step(self, batch):  # without the number of the batch
        loss = Plain.training_step(self, batch, -1)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimiser = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimiser, patience=0)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "monitor": "loss"}}


class Skipping(Plain):
    def training_step(self, batch, batch_idx):
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


class Own(Plain):
    """Hooks that the lean loop does not know."""

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
        self.events.append(("own step", epoch, batch_idx))
        optimizer.step(closure=optimizer_closure)

    def on_train_batch_start(self, batch, batch_idx):
        return -1 if batch_idx == 2 else None


class Stopper(pl.Callback):
    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step == 5


def fitted(module, **options):
    """Everything that can be seen of a fit."""
    events = []
    model = module(events)
    callbacks = [recorder(events), *(Stopper() for _ in range(options.pop("stops", 0)))]
    settings = {"max_epochs": 2, "accelerator": "cpu", "callbacks": callbacks, "logger": False} | options
    trainer = pl.Trainer(enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, **settings)
    lean(trainer)
    dtype = torch.float64 if options.get("precision") == "64-true" else torch.float32
    stream = torch.Generator().manual_seed(1)
    batches = [
        (torch.randn(4, 3, generator=stream, dtype=dtype), torch.randint(2, (4,), generator=stream)) for _ in range(4)
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, train_dataloaders=torch.utils.data.DataLoader(batches, batch_size=None))
    weights = described(dict(model.state_dict()))
    metrics = [described(dict(one)) for one in (trainer.callback_metrics, trainer.logged_metrics)]
    seen = (
        (trainer.fit_loop.epoch_loop._step is not None)
        if isinstance(trainer.fit_loop.epoch_loop, LeanEpochLoop)
        else None
    )
    return (events, weights, metrics, described(trainer.fit_loop.state_dict())), seen


@pytest.mark.parametrize(
    ("module", "options", "by_lean_loop"),
    [
        (Plain, {}, True),
        (Plain, {"precision": "64-true"}, True),
        (Plain, {"precision": "bf16-mixed"}, True),
        (Plain, {"gradient_clip_val": 0.1}, True),
        (Plain, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, True),
        (Plain, {"max_steps": 3}, True),
        (Plain, {"stops": 1}, True),
        (Hooked, {}, True),
        (Hooked, {"limit_train_batches": 3, "log_every_n_steps": 1}, True),
        (Plateau, {}, True),
        (Skipping, {}, True),
        (Own, {}, False),
        (Plain, {"accumulate_grad_batches": 2}, False),
        (Plain, {"profiler": "simple"}, False),
    ],
)
def test_lean_and_own_loop_of_lightning_agree(monkeypatch, module, options, by_lean_loop):
    mine, seen = fitted(module, **options)
    assert seen is by_lean_loop
    monkeypatch.setattr(lean_loop, "KNOWN", ())
    theirs, seen = fitted(module, **options)
    assert seen is None
    for one, other in zip(mine, theirs, strict=True):
        assert one == other
    assert len(mine[0]) > 20
