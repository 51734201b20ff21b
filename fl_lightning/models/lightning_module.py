"""A LightningModule as a model: its own training step, optimisers and metrics.

A module that was written for Lightning alone is trained by its `training_step`, to whose loss the method's penalty is
added, and by the optimiser of its `configure_optimizers`. Its `forward` is what the evaluator calls. The Lightning
engine hands the module to a Trainer, with all that it does by itself; the functional engine calls `training_step` as a
function of parameters and batch, and says in one line where it is none.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl_lightning.errors import UserError, require
from fl_lightning.params import Params
from fl_lightning.system.text import metric_name

# What a module does with a batch.
STEPS = ("training_step", "test_step", "validation_step")
# What Lightning calls during a fit, and the functional engine does not.
HOOKS = (
    *("setup", "teardown", "prepare_data", "configure_model", "configure_callbacks", "configure_gradient_clipping"),
    *("backward", "optimizer_step", "optimizer_zero_grad", "lr_scheduler_step", "toggle_optimizer"),
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "transfer_batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer"),
)


def user_step(module: nn.Module) -> "UserStep | None":
    """The training of a LightningModule; None of a plain network, or of one without a `training_step`."""
    cls: Any = type(module)
    base = _lightning_base(cls)
    if base is None or cls.training_step is base.training_step:
        return None
    return UserStep(module, base)


class UserStep:
    """The training step of a LightningModule, and its optimiser.

    Args:
        module: The user's module.
        base: Lightning's class that it derives from.
    """

    def __init__(self, module: nn.Module, base: type[nn.Module]) -> None:
        self.module, self.base, self.name = module, base, type(module).__name__
        require(
            base.__module__.startswith("pytorch_lightning"),
            f"{self.name} derives from {base.__module__}.LightningModule, expected that of pytorch_lightning, whose "
            "Trainer runs here; import pytorch_lightning as pl",
        )
        require(
            bool(module.automatic_optimization),
            f"{self.name} optimises by hand (automatic_optimization False), which leaves no place for a method's "
            "penalty and shows no gradients; return the loss from training_step instead",
        )
        require(
            type(module).forward is not base.forward,
            f"{self.name} has no forward, which the evaluator calls; add one that maps a batch of inputs to outputs "
            "such as logits",
        )
        # Its number in the epoch follows a batch, if a step wants it.
        self._arguments = {name: len(inspect.signature(getattr(module, name)).parameters) for name in STEPS}

    @property
    def has_optimisers(self) -> bool:
        """Whether it says how it is optimised."""
        cls: Any = type(self.module)
        return cls.configure_optimizers is not self.base.configure_optimizers  # type: ignore[attr-defined]

    def configure_optimizers(self) -> Any:
        """What the module's hook of this name returns, as its class has it: during a fit, Lightning sees another."""
        cls: Any = type(self.module)
        return cls.configure_optimizers(self.module)

    def loss(self, x: Any, y: Tensor, position: int = 0) -> Tensor:
        """The loss of a batch at the module's present weights; `position` is the number of the batch in its epoch."""
        return self.loss_in(self._called("training_step", x, y, position))

    def _called(self, name: str, x: Any, y: Tensor, position: int) -> Any:
        # As the class has it: during a fit, Lightning sees another training step, which adds the penalty.
        return getattr(type(self.module), name)(self.module, *((x, y), position)[: self._arguments[name]])

    def loss_in(self, output: Any) -> Tensor:
        """The loss in what `training_step` returns."""
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise UserError(
                f"{self.name}.training_step must return a loss, a tensor with one number or a dict with one as 'loss', "
                f"got {found}; return it for every batch"
            )
        return loss

    def loss_at(self, weights: Params, x: Any, y: Tensor) -> Tensor:
        """The loss of a batch as a function of all parameters and buffers."""
        with self.without_trainer():
            named = {f"module.{name}": value for name, value in weights.items()}
            loss: Tensor = functional_call(_Steps(self), named, ("training_step", x, y, 0))
        return self.loss_in(loss)

    def gradient(self, params: Params, buffers: Params, x: Any, y: Tensor) -> Params:
        """The gradient of the loss, by plain autograd: metrics inside a step keep no tensors of a transform."""
        leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
        with torch.enable_grad():
            loss = self.loss_at({**leaves, **buffers}, x, y)
            grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, grads, strict=True))

    def metrics(self, weights: Params, batches: Iterable[tuple[Any, Tensor]]) -> dict[str, float]:
        """What `test_step`, or else `validation_step`, logs: means over samples, and metrics over all of them.

        The hooks at the start and at the end of its epoch are called, too.
        """
        counting: list[Any] = [
            one for one in self.module.modules() if hasattr(one, "compute") and hasattr(one, "reset")
        ]
        for metric in counting:  # what training has left in it
            metric.reset()
        logs = _Logs(self.name)
        self._evaluate(weights, batches, logs)
        found = logs.means()
        for metric in counting:
            metric.reset()
        return found

    def logged(self, x: Any, y: Tensor) -> frozenset[str]:
        """The names of what its evaluation logs, tried out on a few samples; the module itself does not notice.

        Raises:
            UserError: If it cannot be evaluated without a Trainer.
        """
        tried, logs = type(self)(deepcopy(self.module).eval(), self.base), _Logs(self.name)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                tried._evaluate({}, [(x, y)], logs)
            except UserError:
                raise
            except Exception:
                if not logs.ended:  # what is computed at the end may need more samples than these
                    raise
        return frozenset(logs.given)

    def _evaluate(self, weights: Params, batches: Iterable[tuple[Any, Tensor]], logs: "_Logs") -> None:
        """Call its evaluation as Lightning does, and remember what it logs."""
        cls: Any = type(self.module)
        own = [name for name in STEPS[1:] if getattr(cls, name) is not getattr(self.base, name)]
        if not own:
            return
        kind = own[0].removesuffix("_step")
        named, steps = {f"module.{name}": value for name, value in weights.items()}, _Steps(self)
        with self.without_trainer(logs.log, f"{self.name}.{own[0]}", **_facts(kind)):
            functional_call(steps, named, (f"on_{kind}_epoch_start",))
            for position, (x, y) in enumerate(batches):
                logs.size = len(y)
                functional_call(steps, named, (own[0], x, y, position))
            logs.size, logs.ended = 1, True
            functional_call(steps, named, (f"on_{kind}_epoch_end",))

    @contextmanager
    def without_trainer(
        self, log: Callable[..., None] = lambda *_, **__: None, evaluated: str = "", **facts: Any
    ) -> Iterator[None]:
        """The module at work without Lightning, knowing nothing of a Trainer but these facts.

        Args:
            log: Receives what it logs.
            evaluated: Which of its steps is at work, if it is being evaluated rather than trained.
            facts: What it may ask its Trainer for.
        """
        modules: list[Any] = [one for one in self.module.modules() if isinstance(one, self.base)]
        before = [(one, _trainer_of(one), vars(one).get("log")) for one in modules]
        for one in modules:
            one.trainer = _NoTrainer(self.name, evaluated, facts)
            vars(one)["log"] = log
        try:
            yield
        finally:
            for one, trainer, their_log in before:
                one.trainer = trainer
                if their_log is None:
                    del vars(one)["log"]
                else:
                    vars(one)["log"] = their_log

    def require_function(self, x: Any, y: Tensor) -> None:
        """Raise `UserError` unless the step is a function of parameters and batch, tried out on a batch."""
        cls: Any = type(self.module)
        own = [hook for hook in HOOKS if getattr(cls, hook, None) is not getattr(self.base, hook, None)]
        require(
            not own,
            f"{self.name} has {', '.join(own)}, which only Lightning calls; use --engine lightning",
        )
        with self.without_trainer(), torch.no_grad():
            self.loss(x, y)


class _Logs:
    """What a module logs while it is evaluated.

    Attributes:
        size: How many samples a number stands for.
        ended: Whether the end of the epoch was reached.
        given: What the module calls it, by the names under which it is stored.
    """

    def __init__(self, module: str) -> None:
        self.size, self.ended, self.given = 1, False, dict[str, str]()
        self._module = module
        self._sums: dict[str, list[tuple[float, int]]] = {}
        self._objects: dict[str, Any] = {}

    def log(self, name: str, value: Any, *_: Any, **__: Any) -> None:
        """Takes the place of the module's own `log`."""
        stored = metric_name(name)
        require(
            self.given.setdefault(stored, name) == name,
            f"{self._module} logs {self.given[stored]!r} and {name!r}, which are both stored as {stored!r}; rename one",
        )
        if hasattr(value, "compute"):
            self._objects[stored] = value
        else:
            self._sums.setdefault(stored, []).append((float(value), self.size))

    def means(self) -> dict[str, float]:
        """Of numbers over samples; of metrics what they compute."""
        found = {
            name: sum(v * size for v, size in rows) / sum(size for _, size in rows) for name, rows in self._sums.items()
        }
        return found | {name: float(metric.compute()) for name, metric in self._objects.items()}


class _Steps(nn.Module):
    """A module whose forward is one of the user's steps, as torch.func takes it."""

    def __init__(self, step: UserStep) -> None:
        super().__init__()
        self.module = step.module
        self._called = step._called
        self.train(step.module.training)

    def forward(self, name: str, *batch: Any) -> Any:
        return self._called(name, *batch) if batch else getattr(self.module, name)()


class _NoTrainer:
    """Stands where Lightning puts the Trainer."""

    def __init__(self, name: str, evaluated: str, facts: Mapping[str, Any]) -> None:
        self._name, self._evaluated = name, evaluated
        vars(self).update(facts)

    def __getattr__(self, asked: str) -> Any:
        if asked.startswith("__"):  # how Python looks for abilities, such as to be copied
            raise AttributeError(asked)
        if self._evaluated:
            raise UserError(
                f"{self._evaluated} asks its Trainer for {asked}, but the aggregated model is evaluated after a round, "
                "when no Trainer is at work; log there only what follows from weights and batch"
            )
        raise UserError(
            f"{self._name} asks its Trainer for {asked} while it trains, so that its step depends on more than "
            "parameters and batch; use --engine lightning"
        )


def _trainer_of(module: Any) -> Any:
    """The Trainer at work on a module; None without one, where Lightning raises."""
    try:
        return module.trainer
    except RuntimeError:
        return None


def _facts(kind: str) -> dict[str, Any]:
    """What a module may ask its Trainer for during evaluation, as an untrained Trainer answers."""
    return {
        **{"current_epoch": 0, "global_step": 0, "sanity_checking": False, "training": False, "fast_dev_run": False},
        **{"validating": kind == "validation", "testing": kind == "test", "predicting": False, "barebones": False},
        **{"logger": None, "loggers": [], "callbacks": [], "callback_metrics": {}, "logged_metrics": {}},
        **{"is_global_zero": True, "global_rank": 0, "local_rank": 0, "world_size": 1, "num_devices": 1},
    }


def _lightning_base(cls: type) -> Any:
    """Lightning's class among those that a class derives from, whichever package it is from."""
    places = ("pytorch_lightning.", "lightning.pytorch.")
    return next(
        (one for one in cls.__mro__ if one.__name__ == "LightningModule" and one.__module__.startswith(places)), None
    )
