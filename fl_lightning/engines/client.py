"""The client as Lightning sees it.

A module with the method's prior loss, an optimiser that follows the method's rule, a callback that shows every step to
the method, and a loader that follows the plan. A plain network is put into a `Client`; a user's own LightningModule
goes to the Trainer itself, with our part added for the time of a fit.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.curvature.per_sample import squared_gradients
from fl_lightning.data.plan import Plan
from fl_lightning.engines.own_optimiser import require_nothing_frozen, require_one
from fl_lightning.errors import UserError
from fl_lightning.method import ClientHooks, Context, Step
from fl_lightning.own import OwnStep
from fl_lightning.params import Params, all_finite, zip_map
from fl_lightning.penalty import Apart, attached
from fl_lightning.rules.rule import Rule, Slopes
from fl_lightning.rules.sgd import moving, with_zeros
from fl_lightning.rules.usual import is_usual
from fl_lightning.task import Task, Weights
from fl_lightning.training import Training


class ClientFit:
    """One client in one round, whichever module carries it: penalty, rule, and the losses met along the way."""

    def __init__(self, hooks: ClientHooks, task: Task, context: Context, plan: Plan) -> None:
        self.task, self.plan = task, plan
        self.penalty = hooks.penalty(context)
        self.pull: Params = {}  # the penalty's gradient at the present step
        self.gradient: Params | None = None  # that of the likelihood alone, if it is known
        self._apart = Apart()
        self.frozen = hooks.frozen(context)
        self.params: Params = {name: p for name, p in task.model.named_parameters() if p.requires_grad}

        def rule_of(step: int) -> Rule:
            return hooks.rule(plan.training.at(step, plan.num_steps), context)

        self.training_by = None
        if not is_usual(hooks.rule(plan.training, context)):
            self.training_by = RuleTraining(rule_of, self.params, self.frozen, plan)
        self.values = zip_map(torch.detach, self.params)  # the same storage
        self._prior = self.penalty.along_path() if self.penalty is not None and self.training_by is None else None
        self.losses: list[Tensor] = []
        self.shares: list[float] = []

    def with_prior(self, loss: Tensor, size: int) -> Tensor:
        """The local loss: that of a batch of this size, which is written down, and the method's prior loss."""
        self.gradient = None  # of the step before: the next one finds its memory
        self.losses.append(loss.detach().to(self.task.dtype))
        self.shares.append(size / len(self.plan.data))
        if self.penalty is None:
            return loss
        with torch.autocast(self.task.device.type, enabled=False) if self.task.mixed else nullcontext():
            if self._prior is not None:
                value, self.pull = self._prior(self.values)
                prior = attached(value, self.pull, self.params, self._apart)
            else:  # the rule takes the two gradients apart, the penalty's not at its point
                assert self.training_by is not None
                prior, self.pull = self.penalty.value_and_grad(self.training_by.theta)
            return loss + prior

    def backward(self, theirs: Callable[..., None], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The likelihood's gradient is kept for whoever observes; the penalty's, which is known already, is added.

        A parameter that the loss does not depend on has gradient zero: torch.optim would spare it the decay. So has a
        frozen one, which the optimiser does not know.
        """
        with self._apart.during():
            theirs(loss, *args, **kwargs)
        for name, parameter in self.params.items():
            if parameter.grad is None or name in self.frozen:
                parameter.grad = torch.zeros_like(parameter)
        self.gradient = {name: p.grad for name, p in self.params.items() if p.grad is not None}
        if self._apart.factor is not None:
            self._add_pull(float(self._apart.factor), self.gradient)

    def _add_pull(self, scale: float, gradient: Params) -> None:
        """The penalty's gradient is added to that of the likelihood, in the memory of the former."""
        free = moving(gradient, self.frozen)
        pulls = [self.pull[name] for name in free]
        if scale != 1:  # the loss was scaled for half precision, and gradients will be unscaled where they are
            self.gradient = None
            pulls = list(torch._foreach_mul(pulls, scale))
        torch._foreach_add_(pulls, list(free.values()))
        for name, total in zip(free, pulls, strict=True):
            self.params[name].grad = total

    def optimiser(self) -> Any:
        """As Lightning's `configure_optimizers` returns it."""
        training, plan = self.plan.training, self.plan
        if self.training_by is not None:
            return RuleOptimiser(self)
        optimiser = torch_optimiser(training, moving(self.params, self.frozen).values())
        if training.is_steady:
            return optimiser
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: training.factor(step, plan.num_steps))
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Client(pl.LightningModule):
    """A plain network in one fit: the task's loss plus the method's prior loss, by the settings' or the method's rule.

    Attributes:
        client: The client's id.
        round: The number of the round.
    """

    def __init__(self, fit: ClientFit) -> None:
        super().__init__()
        self.model, self.fit, self.plan = fit.task.model, fit, fit.plan
        self.client, self.round = fit.plan.data.client, fit.plan.round

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_current_fx_name":  # which Lightning writes around every hook
            object.__setattr__(self, name, value)  # without looking whether it is a parameter, buffer or module
        else:
            super().__setattr__(name, value)

    @override
    def training_step(self, batch: tuple[Any, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return self.fit.with_prior(self.fit.task.batch_loss(x, y), len(y))

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.fit.backward(super().backward, loss, *args, **kwargs)

    @override
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.fit.params.values():  # as torch does it, which takes longer to ask its own profiler
            parameter.grad = None

    @override
    def configure_optimizers(self) -> Any:
        return self.fit.optimiser()


@contextmanager
def carrier(fit: ClientFit) -> Iterator[pl.LightningModule]:
    """The LightningModule that carries a client through a fit: a `Client`, or the user's own with our part added."""
    step = fit.task.step
    if step is None:
        yield Client(fit)
        return
    module: Any = step.module
    ours = {
        "training_step": _with_prior(step, fit),
        "backward": functools.partial(fit.backward, module.backward),
        "configure_optimizers": _own_optimisers(step, fit) if fit.plan.training.optimiser == "own" else fit.optimiser,
        "client": fit.plan.data.client,
        "round": fit.plan.round,
    }
    kept = {name: vars(module)[name] for name in ours if name in vars(module)}
    # A module may have other plans with the names `client` and `round`.
    added = {name: part for name, part in ours.items() if callable(part) or not hasattr(module, name)}
    vars(module).update(added)
    try:
        yield module
    finally:
        for name in added:
            del vars(module)[name]
        vars(module).update(kept)
        module.trainer = None


def _with_prior(step: OwnStep, fit: ClientFit) -> Callable[..., Any]:
    theirs = step.module.training_step
    assert callable(theirs)

    @functools.wraps(theirs)
    def training_step(batch: tuple[Any, Tensor], *rest: Any) -> Any:
        output = theirs(batch, *rest)
        loss = fit.with_prior(step.loss_in(output), len(batch[1]))
        return {**output, "loss": loss} if isinstance(output, Mapping) else loss

    return training_step


def _own_optimisers(step: OwnStep, fit: ClientFit) -> Callable[[], Any]:
    require_nothing_frozen(step, fit.frozen)
    theirs: Any = step.module.configure_optimizers

    def configure_optimizers() -> Any:
        from pytorch_lightning.core.optimizer import _configure_optimizers

        found = theirs()
        require_one(step.name, _configure_optimizers(found)[0])
        return found

    return configure_optimizers


def torch_optimiser(training: Training, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimiser that the settings name, as torch has it."""
    lr, decay = training.lr, training.weight_decay
    if training.is_sgd:
        return torch.optim.SGD(params, lr=lr, momentum=training.momentum, weight_decay=decay)
    cls = torch.optim.Adam if training.optimiser == "adam" else torch.optim.AdamW
    return cls(params, lr=lr, betas=(training.beta1, training.beta2), eps=training.eps, weight_decay=decay)


class RuleTraining:
    """A method's own rule at work on a model, whose parameters are the rule's point while a batch is looked at."""

    def __init__(self, rule_of: Callable[[int], Rule], params: Params, frozen: frozenset[str], plan: Plan) -> None:
        self.rule_of, self.params, self.frozen, self.plan = rule_of, params, frozen, plan
        self.rule = rule_of(0)
        self.theta = zip_map(lambda p: p.detach().clone(), params)
        self.state = self.rule.init(moving(self.theta, frozen))
        self.noise: Params = {}
        self.number = 0

    def go_to_point(self) -> None:
        """Before a batch."""
        if not self.plan.training.is_steady:
            self.rule = self.rule_of(self.number)
        self.noise = self.plan.noise(self.number, self.theta) if self.rule.draws else {}
        self._show(self.rule.point(moving(self.theta, self.frozen), self.state, self.noise))

    def step(self, slopes: Slopes) -> None:
        """After the backward pass."""
        free = moving(self.theta, self.frozen)
        updated, self.state = self.rule.step(free, self.state, slopes, self.noise, self.number)
        self.theta = {**self.theta, **updated}
        self.number += 1
        self._show(updated)

    def _show(self, values: Params) -> None:
        with torch.no_grad():
            for name, value in values.items():
                self.params[name].copy_(value)


class RuleOptimiser(torch.optim.Optimizer):
    """A rule as Lightning drives it."""

    def __init__(self, fit: ClientFit) -> None:
        super().__init__(fit.params.values(), {"lr": fit.plan.training.lr})
        self.fit = fit

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert self.fit.training_by is not None
        loss = None
        if closure is not None:  # where losses are scaled, Lightning has called it before
            with torch.enable_grad():
                loss = closure()
        free = moving(self.fit.params, self.fit.frozen)
        grad = {name: p.grad for name, p in free.items() if p.grad is not None}
        with torch.no_grad():
            self.fit.training_by.step(Slopes(grad, None if self.fit.penalty is None else self.fit.pull))
        return loss


class Observer(pl.Callback):
    """Shows every optimiser step of a client to its method: the online Fisher is accumulated here."""

    def __init__(self, hooks: ClientHooks, context: Context, fit: ClientFit) -> None:
        self.hooks, self.fit = hooks, fit
        self.trace = hooks.trace(context)
        self.num_steps = 0
        self.grad: Params | None = {}
        self.squares: Params | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:  # a callback may change it
            raise UserError(
                "the Fisher is made of the gradient of every batch, so accumulate_grad_batches must be 1, "
                f"got {trainer.accumulate_grad_batches}; use a larger training.batch_size instead"
            )

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: tuple[Any, Tensor], batch_idx: int
    ) -> None:
        fit = self.fit
        if fit.training_by is not None:
            fit.training_by.go_to_point()
        if self.hooks.needs_squares:
            weights = Weights(zip_map(torch.detach, fit.params), dict(fit.task.model.named_buffers()))
            self.squares = squared_gradients(fit.task, weights, *batch)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """The gradient of the likelihood alone, unscaled, before clipping."""
        if not self.hooks.observes:
            return
        fit = self.fit
        if fit.gradient is None:
            total = {name: p.grad for name, p in fit.params.items() if p.grad is not None}
            found = with_zeros(zip_map(torch.sub, moving(total, fit.frozen), fit.pull), total)
        elif not fit.pull and (trainer.gradient_clip_val is not None or fit.task.step is not None):
            found = zip_map(torch.clone, fit.gradient)  # clipping, or an optimiser, may write into the gradients
        else:
            found = fit.gradient
        # Lightning takes no step where a scaled loss has overflowed.
        self.grad = found if fit.task.mixed != torch.float16 or all_finite(found) else None

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: tuple[Any, Tensor],
        batch_idx: int,
    ) -> None:
        if self.hooks.observes and self.grad is not None:
            plan = self.fit.plan
            fraction = len(batch[1]) / len(plan.data)
            epoch, position = divmod(self.num_steps, plan.steps_per_epoch)
            last = position == plan.steps_per_epoch - 1
            loss = self.fit.losses[-1]
            step = Step(self.num_steps, self.fit.values, self.grad, self.squares, fraction, epoch, last, loss)
            self.trace = self.hooks.observe(self.trace, step)
            self.grad = None
        self.num_steps += 1


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

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.plan.examples(self.epoch)
