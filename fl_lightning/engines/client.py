"""The client as Lightning sees it.

A module with the method's prior loss, an optimiser that follows the method's rule, a callback that shows every step to
the method, and a loader that follows the plan.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.curvature.per_sample import squared_gradients
from fl_lightning.data.plan import Plan
from fl_lightning.errors import UserError
from fl_lightning.method import ClientHooks, Context, Step
from fl_lightning.params import Params, zip_map
from fl_lightning.penalty import Apart, attached
from fl_lightning.rules.rule import Rule, Slopes
from fl_lightning.rules.sgd import Sgd, moving, with_zeros
from fl_lightning.task import Task, Weights

# Attributes that are written in every step; the first one by Lightning, around every hook.
OFTEN = frozenset({"_current_fx_name", "pull", "gradient"})


class Client(pl.LightningModule):
    """One client in one round: the task's loss plus the method's prior loss, by SGD or by the method's own rule."""

    def __init__(self, hooks: ClientHooks, task: Task, context: Context, plan: Plan) -> None:
        super().__init__()
        self.model = task.model
        self.task, self.plan = task, plan
        self.penalty = hooks.penalty(context)
        self.pull: Params = {}  # the penalty's gradient at the present step
        self.gradient: Params | None = None  # that of the likelihood alone, if it is known
        self._apart = Apart()
        self.frozen = hooks.frozen(context)
        self._params: Params = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self._values = zip_map(torch.detach, self._params)  # the same storage
        rule = hooks.rule(plan.training, context)
        self.training_by = None if isinstance(rule, Sgd) else RuleTraining(rule, self._params, self.frozen, plan)
        self._prior = self.penalty.along_path() if self.penalty is not None and self.training_by is None else None
        self.losses: list[Tensor] = []
        self.shares: list[float] = []

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in OFTEN:
            object.__setattr__(self, name, value)  # without looking whether it is a parameter, buffer or module
        else:
            super().__setattr__(name, value)

    def params(self) -> Params:
        """The live parameters by name."""
        return self._params

    @override
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.task.likelihood(self.task.outputs(x), y)
        self.losses.append(loss.detach())
        self.shares.append(len(y) / len(self.plan.data))
        if self.penalty is None:
            return loss
        if self._prior is not None:
            value, self.pull = self._prior(self._values)
            prior = attached(value, self.pull, self._params, self._apart)
        else:  # the rule takes the two gradients apart, the penalty's not at its point
            assert self.training_by is not None
            prior, self.pull = self.penalty.value_and_grad(self.training_by.theta)
        return loss + prior

    @override
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The likelihood's gradient is kept for whoever observes; the penalty's, which is known already, is added.

        A parameter that the loss does not depend on has gradient zero: torch.optim would spare it the decay. So has a
        frozen one, which the optimiser does not know.
        """
        with self._apart.during():
            super().backward(loss, *args, **kwargs)
        for name, parameter in self._params.items():
            if parameter.grad is None or name in self.frozen:
                parameter.grad = torch.zeros_like(parameter)
        self.gradient = {name: p.grad for name, p in self._params.items() if p.grad is not None}
        if self._apart.factor is not None:
            self._add_pull(float(self._apart.factor), self.gradient)

    def _add_pull(self, scale: float, gradient: Params) -> None:
        """The penalty's gradient is added to that of the likelihood, in the memory of the former."""
        free = moving(gradient, self.frozen)
        pulls = [self.pull[name] for name in free]
        if scale != 1:  # the loss was scaled for half precision, and gradients will be unscaled where they are
            self.gradient = None
            pulls = torch._foreach_mul(pulls, scale)
        torch._foreach_add_(pulls, list(free.values()))
        for name, total in zip(free, pulls, strict=True):
            self._params[name].grad = total

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        training = self.plan.training
        if self.training_by is not None:
            return RuleOptimiser(self)
        return torch.optim.SGD(
            moving(self.params(), self.frozen).values(),
            lr=training.lr,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        )


class RuleTraining:
    """A method's own rule at work on a model, whose parameters are the rule's point while a batch is looked at."""

    def __init__(self, rule: Rule, params: Params, frozen: frozenset[str], plan: Plan) -> None:
        self.rule, self.params, self.frozen, self.plan = rule, params, frozen, plan
        self.theta = zip_map(lambda p: p.detach().clone(), params)
        self.state = rule.init(moving(self.theta, frozen))
        self.noise: Params = {}
        self.number = 0

    def go_to_point(self) -> None:
        """Before a batch."""
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

    def __init__(self, client: Client) -> None:
        super().__init__(client.params().values(), {"lr": client.plan.training.lr})
        self.client = client

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        assert self.client.training_by is not None
        with torch.enable_grad():
            loss = closure()
        free = moving(self.client.params(), self.client.frozen)
        grad = {name: p.grad for name, p in free.items() if p.grad is not None}
        with torch.no_grad():
            self.client.training_by.step(Slopes(grad, None if self.client.penalty is None else self.client.pull))
        return loss


class Observer(pl.Callback):
    """Shows every optimiser step of a `Client` to its method: the online Fisher is accumulated here."""

    def __init__(self, hooks: ClientHooks, context: Context) -> None:
        self.hooks = hooks
        self.trace = hooks.trace(context)
        self.num_steps = 0
        self.params: Params = {}
        self.grad: Params = {}
        self.squares: Params | None = None

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.accumulate_grad_batches != 1:
            raise UserError(
                "the Fisher is made of the gradient of every batch, so accumulate_grad_batches must be 1, "
                f"got {trainer.accumulate_grad_batches}; use a larger training.batch_size instead"
            )
        if str(trainer.precision) not in ("32-true", "64-true"):
            raise UserError(
                f"the Fisher needs full-precision gradients, got precision {trainer.precision}; use 32-true or 64-true"
            )
        assert isinstance(pl_module, Client)
        self.params = zip_map(torch.detach, pl_module.params())  # the same storage

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: tuple[Tensor, Tensor], batch_idx: int
    ) -> None:
        assert isinstance(pl_module, Client)
        if pl_module.training_by is not None:
            pl_module.training_by.go_to_point()
        if self.hooks.needs_squares:
            weights = Weights(zip_map(torch.detach, pl_module.params()), dict(pl_module.model.named_buffers()))
            self.squares = squared_gradients(pl_module.task, weights, *batch)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """The gradient of the likelihood alone, before clipping."""
        if not self.hooks.observes:
            return
        assert isinstance(pl_module, Client)
        if pl_module.gradient is None:
            total = {name: p.grad for name, p in pl_module.params().items() if p.grad is not None}
            self.grad = with_zeros(zip_map(torch.sub, moving(total, pl_module.frozen), pl_module.pull), total)
        elif trainer.gradient_clip_val is not None and not pl_module.pull:
            self.grad = zip_map(torch.clone, pl_module.gradient)  # clipping scales the gradients in place
        else:
            self.grad = pl_module.gradient

    @override
    def on_train_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: tuple[Tensor, Tensor],
        batch_idx: int,
    ) -> None:
        if self.hooks.observes:
            assert isinstance(pl_module, Client)
            fraction = len(batch[1]) / len(pl_module.plan.data)
            epoch, position = divmod(self.num_steps, pl_module.plan.steps_per_epoch)
            last = position == pl_module.plan.steps_per_epoch - 1
            loss = pl_module.losses[-1]
            step = Step(self.num_steps, self.params, self.grad, self.squares, fraction, epoch, last, loss)
            self.trace = self.hooks.observe(self.trace, step)
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
