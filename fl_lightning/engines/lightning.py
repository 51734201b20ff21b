"""Clients as LightningModules under a Trainer: every Lightning feature works here."""

import logging
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch

from fl_lightning import streams
from fl_lightning.data.plan import Plan
from fl_lightning.engines.engine import Engine, Fit, finished_client, mean_loss
from fl_lightning.errors import UserError, require
from fl_lightning.method import ClientHooks, Context
from fl_lightning.params import Params
from fl_lightning.task import Task, Weights

# Lightning's notices (devices found, tips, advice on loaders) say nothing about a fit of one client.
LOGGERS = ("pytorch_lightning", "lightning.pytorch", "lightning_fabric")


# What a Trainer may be told beside what the settings say.
OPTIONS = (
    *("logger", "log_every_n_steps", "default_root_dir", "profiler", "detect_anomaly", "deterministic", "benchmark"),
    *("enable_progress_bar", "enable_model_summary", "enable_checkpointing"),
)
# Where the settings say it.
OURS = {
    "max_epochs": "set Training(epochs=...)",
    "max_steps": "set Training(epochs=...)",
    "accelerator": "move the model: Task(model.to(device))",
    "devices": "move the model: Task(model.to(device))",
    "precision": "give the model another type, or Task(model, mixed=torch.bfloat16)",
    "gradient_clip_val": "set Training(clip_norm=...)",
    "accumulate_grad_batches": "set Training(batch_size=...), since methods see the gradient of every batch",
    "callbacks": "use Lightning(callbacks=...)",
    "strategy": "leave it out: clients are trained side by side with federate(workers=...)",
}
# Fits of clients are many and short.
SILENT = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


@dataclass(frozen=True)
class Lightning(Engine):
    """PyTorch Lightning: a fresh, silent Trainer per fit; any Lightning callback can be added from Python.

    Dropout draws its masks from a stream of its own per (seed, round, client), the same as the functional engine
    with chunk 1.

    Attributes:
        callbacks: Further Lightning callbacks, called for every client's fit (from Python only). `pl_module.client`
            and `pl_module.round` say whose fit it is.
        trainer: Further options of the Trainer that make sense for a fit, such as a logger (from Python only).
    """

    # Objects, which no flag can name; of type Any, because importing Lightning for its name takes seconds.
    python_only: ClassVar[frozenset[str]] = frozenset({"callbacks", "trainer"})

    callbacks: tuple[Any, ...] = ()
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.trainer:
            require(
                name in OPTIONS,
                f"Lightning(trainer=...) takes {', '.join(OPTIONS)}, got {name!r}; "
                f"{OURS.get(name, 'leave it out: a fit of one client has no use for it')}",
            )

    @property
    def needs_driver(self) -> str:
        if self.trainer:
            return "the options of its Trainer are objects of this process"
        return "its callbacks are objects of this process, and see every client" if self.callbacks else ""

    def fit(
        self, hooks: ClientHooks, task: Task, context: Context, buffers: Params, plans: Sequence[Plan]
    ) -> Iterator[Fit]:
        for position, plan in enumerate(plans):
            yield self._fit_one(hooks, task, context.of_member(position), buffers, plan)

    def _fit_one(self, hooks: ClientHooks, task: Task, context: Context, buffers: Params, plan: Plan) -> Fit:
        # Importing Lightning takes seconds; whoever only lists or checks settings need not wait for it.
        from pytorch_lightning import Trainer

        from fl_lightning.engines.client import ClientFit, EpochLoader, Observer, carrier
        from fl_lightning.engines.lean import lean

        _look_for_plugins_once()
        device = task.device
        task.load(Weights(context.start, buffers))
        fit = ClientFit(hooks, task, context, plan)
        observer, by = Observer(hooks, context, fit), fit.training_by
        with _quiet(), streams.global_noise(plan.seed, "noise", plan.round, plan.data.client):
            trainer = Trainer(
                accelerator="cpu" if device.type == "cpu" else "gpu",
                devices=1 if device.index is None else [device.index],
                max_epochs=plan.num_epochs,
                limit_val_batches=0,  # models are measured on the test set, all of them alike
                gradient_clip_val=plan.training.clip_norm if by is None else None,  # a rule clips by itself
                callbacks=[observer, *self.callbacks],
                **{**SILENT, **self._precision(task), **self.trainer},
            )
            lean(trainer)
            with _interruptible(), _in_one_line(), carrier(fit) as module:
                trainer.fit(module, train_dataloaders=EpochLoader(plan))
        task.model.to(device)  # the Trainer leaves the module on the CPU
        local = finished_client(task, plan, task.weights(), observer.trace, () if by is None else by.state)
        return Fit(local, mean_loss(fit.losses, fit.shares, plan.num_epochs))

    def _precision(self, task: Task) -> dict[str, Any]:
        """The Trainer's option for the numbers that it computes in."""
        if task.mixed is not None:
            return {"precision": "bf16-mixed" if task.mixed == torch.bfloat16 else "16-mixed"}
        return {"precision": "64-true" if task.dtype == torch.float64 else "32-true"}


@cache
def _look_for_plugins_once() -> None:
    """Every new Trainer reads the metadata of all installed packages for callbacks that they may register.

    They stay what they are while a process runs, and reading them takes longer than all else a small fit costs.
    """
    from lightning_fabric.utilities import registry

    if (look := getattr(registry, "entry_points", None)) is not None:
        vars(registry)["entry_points"] = cache(look)


@contextmanager
def _in_one_line() -> Iterator[None]:
    """What Lightning finds wrong with a module or its settings, as a user's mistake."""
    from lightning_fabric.utilities.exceptions import MisconfigurationException

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
    loggers = _loggers()
    for logger in loggers:  # not by their levels: to set one empties the caches of all loggers of the process
        logger.addFilter(_is_error)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="pytorch_lightning")
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_is_error)


@cache
def _loggers() -> tuple[logging.Logger, ...]:
    """Those of Lightning, each of which writes by itself."""
    return tuple(
        logging.getLogger(name) for name in sorted(logging.root.manager.loggerDict) if name.startswith(LOGGERS)
    )


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
