"""Lightning's loop over the batches of an epoch, without what nobody has asked for.

In every step the Trainer calls some thirty hooks, nearly all of which nobody overrides, asks a profiler that does not
profile to time each, and collects metrics that nobody has logged. This loop calls the same hooks in the same order with
the same arguments, but only those that somebody has overridden. Whatever it does not know it leaves to Lightning's own
loop: validation, accumulated gradients, manual optimisation, profilers, scaled losses, strategies of several devices.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.__version__ import version
from pytorch_lightning.loops.fetchers import _DataFetcher
from pytorch_lightning.loops.optimization.automatic import Closure, ClosureResult
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop
from pytorch_lightning.plugins.precision import DoublePrecision, MixedPrecision, Precision
from pytorch_lightning.profilers import PassThroughProfiler
from pytorch_lightning.strategies import SingleDeviceStrategy
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from typing_extensions import override

# Hooks of callbacks and of the module, which have the same arguments in both and are called in this order of the two.
HOOKS = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
# Hooks of the module whose answers or arguments this loop does not look at.
UNKNOWN = (
    "on_train_batch_start",
    "optimizer_step",
    "on_before_batch_transfer",
    "transfer_batch_to_device",
    "on_after_batch_transfer",
)
# Versions of Lightning whose loop does what is said here; with others it is used as it is.
KNOWN = ("2.6.",)


def lean(trainer: pl.Trainer) -> None:
    """Give a Trainer the lean loop, if its Lightning is one whose loop is known here."""
    if version.startswith(KNOWN):
        trainer.fit_loop.epoch_loop = LeanEpochLoop(trainer, trainer.min_steps, trainer.max_steps)


class LeanEpochLoop(_TrainingEpochLoop):
    """One epoch, with the hooks that somebody has overridden.

    The batches must be ready for the model: of its type, on its device.
    """

    _step: "Step | None" = None

    @override
    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        self._step = Step(self.trainer) if is_plain(self.trainer) else None
        if self._step is not None:  # Lightning would tell the profiler of every batch
            data_fetcher._start_profiler = data_fetcher._stop_profiler = _nothing

    @override
    def advance(self, data_fetcher: _DataFetcher) -> None:
        if self._step is None or self.restarting:
            super().advance(data_fetcher)
            return
        trainer, step, progress = self.trainer, self._step, self.batch_progress
        batch, _, _ = next(data_fetcher)
        index = self.batch_idx + 1
        progress.is_last_batch = data_fetcher.done
        progress.increment_ready()
        trainer._logger_connector.on_batch_start(batch)
        step.call("on_train_batch_start", batch, index)
        progress.increment_started()
        outputs = step.run(batch, index, trainer.current_epoch, self.automatic_optimization.optim_progress.optimizer)
        progress.increment_processed()
        if trainer.lr_scheduler_configs:
            self.update_lr_schedulers("step", update_plateau_schedulers=False)
            if self._num_ready_batches_reached():
                self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        step.call("on_train_batch_end", outputs, batch, index)
        if self._results:  # somebody has logged
            trainer._logger_connector.on_batch_end()
        else:
            self._results.batch = None
        progress.increment_completed()
        if self._results:
            trainer._logger_connector.update_train_step_metrics()

    @override
    def on_advance_end(self, data_fetcher: _DataFetcher) -> None:
        trainer = self.trainer
        if self._step is None or trainer.lr_scheduler_configs or trainer.should_stop or trainer.received_sigterm:
            super().on_advance_end(data_fetcher)
        else:
            self._batches_that_stepped += 1


class Step:
    """The hooks of one step that there are."""

    def __init__(self, trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        self.trainer, self.module = trainer, module
        self.hooks: Mapping[str, tuple[Callable[..., Any], ...]] = {name: _called(trainer, name) for name in HOOKS}
        precision = trainer.precision_plugin
        self.context = None if type(precision) is Precision else precision.train_step_context
        self.clips = trainer.gradient_clip_val is not None or _overrides(module, "configure_gradient_clipping")
        self.numbers_batches = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

    def call(self, name: str, *args: Any) -> None:
        """Call a hook of all who have it."""
        if functions := self.hooks[name]:
            before, self.module._current_fx_name = self.module._current_fx_name, name
            for function in functions:
                function(*args)
            self.module._current_fx_name = before

    def run(self, batch: Any, index: int, epoch: int, progress: Any) -> dict[str, Any]:
        """The optimiser's step, for which it asks for the gradient."""
        trainer, module = self.trainer, self.module
        optimiser = trainer.optimizers[0]
        results: list[ClosureResult] = []

        def closure() -> Tensor | None:
            result = self._loss(batch, index)
            results[:] = [result]
            progress.zero_grad.increment_ready()
            self.call("on_before_zero_grad", optimiser)
            progress.zero_grad.increment_started()
            module.optimizer_zero_grad(epoch, index, optimiser)
            progress.zero_grad.increment_completed()
            if result.closure_loss is None:
                Closure.warning_cache.warn("`training_step` returned `None`; no gradient is taken of this batch")
            else:
                before, module._current_fx_name = module._current_fx_name, "backward"
                self.call("on_before_backward", result.closure_loss)
                module.backward(result.closure_loss)
                self.call("on_after_backward")
                module._current_fx_name = before
            self.call("on_before_optimizer_step", optimiser)
            if self.clips:
                module.configure_gradient_clipping(
                    optimiser, trainer.gradient_clip_val, trainer.gradient_clip_algorithm
                )
            return result.loss

        progress.step.increment_ready()
        before, module._current_fx_name = module._current_fx_name, "optimizer_step"
        optimiser.step(closure=closure)  # type: ignore[arg-type]  # a tensor, as Lightning has it
        module._current_fx_name = before
        progress.step.increment_completed()
        (result,) = results
        return {} if result.loss is None else result.asdict()

    def _loss(self, batch: Any, index: int) -> ClosureResult:
        module, args = self.module, (batch, index) if self.numbers_batches else (batch,)
        before, module._current_fx_name = module._current_fx_name, "training_step"
        with torch.enable_grad():
            if self.context is None:
                output = module.training_step(*args)
            else:
                with self.context():
                    output = module.training_step(*args)
        module._current_fx_name = before
        if isinstance(output, Tensor):  # Lightning would divide it by 1, the batches whose gradients are accumulated
            return ClosureResult(output)
        return ClosureResult.from_training_step_output(output)


def is_plain(trainer: Any) -> bool:
    """Whether nothing is to be done in an epoch of this fit that the lean loop does not know."""
    module, precision = trainer.lightning_module, trainer.precision_plugin
    return (
        trainer.state.fn == TrainerFn.FITTING
        and type(trainer.profiler) is PassThroughProfiler
        and type(trainer.strategy) is SingleDeviceStrategy
        and type(precision) in (Precision, DoublePrecision, MixedPrecision)
        and getattr(precision, "scaler", None) is None
        and trainer.accumulate_grad_batches == 1
        and not trainer.enable_validation
        and trainer.datamodule is None
        and not trainer.fast_dev_run
        and module.automatic_optimization
        and len(trainer.optimizers) == 1
        and not any(_overrides(module, name) for name in UNKNOWN)
    )


def _called(trainer: Any, name: str) -> tuple[Callable[..., Any], ...]:
    """Everybody's hook of this name, callbacks first."""
    module = trainer.lightning_module
    callbacks = [partial(getattr(one, name), trainer, module) for one in trainer.callbacks if _overrides(one, name)]
    return (*callbacks, *([getattr(module, name)] if _overrides(module, name) else []))


def _overrides(owner: pl.Callback | pl.LightningModule, name: str) -> bool:
    """Whether a hook is another one than Lightning's own."""
    base = pl.Callback if isinstance(owner, pl.Callback) else pl.LightningModule
    return name in vars(owner) or getattr(type(owner), name) is not getattr(base, name)


def _nothing() -> None:
    pass
