"""Clients on a Lightning Trainer: a user's LightningModule, callbacks or options of the Trainer."""

import logging
import signal
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.utilities.exceptions import MisconfigurationException
from pytorch_lightning.strategies import SingleDeviceStrategy
from typing_extensions import override

from fl_lightning.client import Batch, ClientModule, OnlineFisher
from fl_lightning.data.batches import Plan
from fl_lightning.engines.placement import placement
from fl_lightning.engines.user_optimiser import configured
from fl_lightning.errors import UserError
from fl_lightning.models.lightning_module import UserStep
from fl_lightning.models.task import Task

# Fits of clients are many and short.
SILENT = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
# Lightning's notices (devices found, tips, advice on loaders) say nothing about a fit of one client.
LOGGERS = ("pytorch_lightning", "lightning.pytorch", "lightning_fabric")


def fit_on_trainer(
    client: ClientModule, fisher: OnlineFisher | None, callbacks: Sequence[pl.Callback], options: Mapping[str, Any]
) -> None:
    """All steps of a client's plan under a fresh Trainer, with a user's callbacks and options."""
    task, plan, device = client.task, client.plan, client.task.device
    with _quiet(), _interruptible(), _in_one_line(), _module_of(client) as module:
        trainer = pl.Trainer(
            max_epochs=plan.num_epochs,
            limit_val_batches=0,  # models are measured on the test set, all of them alike
            gradient_clip_val=plan.training.clip_norm if client.local_optimiser is None else None,
            callbacks=[ClientSteps(client, fisher), *callbacks],
            plugins=[LightningEnvironment()],
            **placement(device, SingleDeviceStrategy),
            **{**SILENT, "precision": _precision(task), **options},
        )
        trainer.fit(module, train_dataloaders=EpochLoader(plan))
    task.model.to(device)  # the Trainer leaves the module on the CPU


class ClientSteps(pl.Callback):
    """The client's part in every step: prior gradient and online Fisher, whichever module the Trainer fits."""

    def __init__(self, client: ClientModule, fisher: OnlineFisher | None) -> None:
        self.client, self.fisher = client, fisher

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:  # a callback may change it
            raise UserError(
                "the Fisher is made of the gradient of every batch, so accumulate_grad_batches must be 1, "
                f"got {trainer.accumulate_grad_batches}; use a larger training.batch_size instead"
            )

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Batch, batch_idx: int) -> None:
        if pl_module is not self.client:
            self.client.on_train_batch_start(batch, batch_idx)

    @override
    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        if pl_module is not self.client:
            self.client.on_before_optimizer_step(optimizer)

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        if self.fisher is not None:
            self.fisher.on_train_batch_end(trainer, self.client, outputs, batch, batch_idx)


class EpochLoader:
    """The plan's batches as a loader: whole batches, one plan epoch per Lightning epoch."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.epoch = 0
        self.sampler = self  # Lightning calls `loader.sampler.set_epoch` before every epoch

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.plan.steps_per_epoch

    def __iter__(self) -> Iterator[Batch]:
        return self.plan.examples(self.epoch)


@contextmanager
def _module_of(client: ClientModule) -> Iterator[pl.LightningModule]:
    """The module that the Trainer fits: the client, or the user's module with the prior loss added during the fit.

    Inside another module the `self.log` of a user's module would fail.
    """
    step, plan = client.task.step, client.plan
    if step is None:
        yield client
        return
    module: Any = step.module
    theirs = partial(configured, step, client.frozen)
    ours = {
        "training_step": _with_prior_loss(step, client),
        "configure_optimizers": theirs if plan.training.optimiser == "own" else client.configure_optimizers,
        "client": client.client,
        "round": client.round,
    }
    replaced = {name: vars(module)[name] for name in ours if name in vars(module)}
    # A module may use the names `client` and `round` for something else.
    added = {name: part for name, part in ours.items() if callable(part) or not hasattr(module, name)}
    vars(module).update(added)
    try:
        yield module
    finally:
        for name in added:
            del vars(module)[name]
        vars(module).update(replaced)
        module.trainer = None


def _with_prior_loss(step: UserStep, client: ClientModule) -> Callable[..., Any]:
    theirs, task = step.module.training_step, client.task
    assert callable(theirs)

    @wraps(theirs)
    def training_step(batch: Batch, *rest: Any) -> Any:
        output = theirs(batch, *rest)
        loss = step.loss_in(output)
        client.losses.append(loss.detach().to(task.dtype))
        if client.prior_loss is not None:
            with torch.autocast(task.device.type, enabled=False) if task.mixed else nullcontext():
                prior, client.prior_gradient = client.prior_loss(client.values)
                loss = loss + prior
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    return training_step


def _precision(task: Task) -> Any:
    """The Trainer's word for the numbers that it computes in."""
    if task.mixed is not None:
        return "bf16-mixed" if task.mixed == torch.bfloat16 else "16-mixed"
    return "64-true" if task.dtype == torch.float64 else "32-true"


@contextmanager
def _in_one_line() -> Iterator[None]:
    """What Lightning finds wrong with a module or its settings, as a user's mistake."""
    try:
        yield
    except MisconfigurationException as error:
        said = " ".join(str(error).split())
        raise UserError(
            f"Lightning refuses this model: {said} (no validation runs while a client is trained)"
        ) from None


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C as Python has it: the Trainer would leave the program by `sys.exit` and keep the signal ignored."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        yield
    except SystemExit as stop:
        if isinstance(stop.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from stop
        raise
    finally:
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Lightning without its notices."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.startswith(LOGGERS)]
    for logger in loggers:  # each of which writes by itself
        logger.addFilter(_is_error)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="pytorch_lightning")
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
