"""One client in one round, as Lightning sees it.

    theta <- theta - lr (g_t + grad P(theta))     ClientModule: g_t is the likelihood's gradient, P the prior loss
    F     <- F + (b_t / m) g_t^2                  OnlineFisher, after every optimiser step

Batch t has b_t of the client's m samples. The method defines P and its statistics of the path.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from typing_extensions import override

from fl_lightning.curvature.fisher import accumulate
from fl_lightning.curvature.per_sample import squared_gradients
from fl_lightning.data.batches import Plan
from fl_lightning.method import Context, Method, Step, frozen
from fl_lightning.models.task import Task, Weights
from fl_lightning.optimisers import is_usual
from fl_lightning.optimisers.base import Gradients, LocalOptimiser
from fl_lightning.optimisers.sgd import moving
from fl_lightning.params import Params, all_finite, zip_map
from fl_lightning.penalty import Penalty
from fl_lightning.training import Training

Batch = tuple[Any, Tensor]


class ClientModule(pl.LightningModule):
    """One client in one round: the task's loss plus the method's prior loss.

    Attributes:
        client: The client's id.
        round: The number of the round.
        values: The trained parameters, as plain tensors that share their storage.
        likelihood_gradient: Of the last batch, before clipping.
        prior_gradient: Of the prior loss at the last step; empty without one, or where a method's own optimiser has it.
        losses: Of all steps so far, without the prior loss.
    """

    def __init__(self, method: Method, task: Task, context: Context, plan: Plan) -> None:
        super().__init__()
        self.model, self.task, self.plan, self.method = task.model, task, plan, method
        self.client, self.round = plan.data.client, plan.round
        # Clipping writes into gradients, and so may the optimiser of a user's module.
        self.gradients_are_overwritten = plan.training.clip_norm is not None or task.step is not None
        self.weights: Params = {name: p for name, p in task.model.named_parameters() if p.requires_grad}
        self.values = zip_map(torch.detach, self.weights)
        self.frozen, self.needs_squares = frozen(method, context), method.traits.needs_squares
        self.local_optimiser = self._local_optimiser(context)
        self.prior_loss = self._prior_loss(context)
        self.likelihood_gradient: Params = {}
        self.prior_gradient: Params = {}
        self.squares: Params | None = None
        self.losses: list[Tensor] = []

    @override
    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """A method's own optimiser may take the gradient at another point; squares are taken there, too."""
        if self.local_optimiser is not None:
            self.local_optimiser.go_to_point()
        if self.needs_squares:
            weights = Weights(self.values, dict(self.model.named_buffers()))
            self.squares = squared_gradients(self.task, weights, *batch)

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.task.batch_loss(x, y)  # the negative log-likelihood
        self.losses.append(loss.detach())
        if self.prior_loss is None:
            return loss
        prior, self.prior_gradient = self.prior_loss(self.values)
        return loss + prior

    @override
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        """Autograd gave the likelihood's gradient; add the prior's, which is known in closed form.

        The gradients are no longer scaled here, and not yet clipped.
        """
        for name, weight in self.weights.items():
            if weight.grad is None or name in self.frozen:  # torch.optim would spare it the weight decay
                weight.grad = torch.zeros_like(weight)
            self.likelihood_gradient[name] = weight.grad
            if self.prior_gradient and name not in self.frozen:
                weight.grad = self.prior_gradient[name].add_(weight.grad)
            elif self.gradients_are_overwritten:
                weight.grad = weight.grad.clone()

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for weight in self.weights.values():  # torch would look for them in all modules
            weight.grad = None

    @override
    def configure_optimizers(self) -> Any:
        training, num_steps = self.plan.training, self.plan.num_steps
        if self.local_optimiser is not None:
            return self.local_optimiser
        optimiser = torch_optimiser(training, moving(self.weights, self.frozen).values())
        if training.is_steady:
            return optimiser
        schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: training.factor(step, num_steps))
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def last_step(self, size: int) -> Step:
        """The step that was just taken, on a batch of this size, as the method sees it."""
        number, per_epoch = len(self.losses) - 1, self.plan.steps_per_epoch
        return Step(
            number=number,
            params=self.values,
            grad=self.likelihood_gradient,
            squares=self.squares,
            fraction=size / len(self.plan.data),
            epoch=number // per_epoch,
            epoch_ends=(number + 1) % per_epoch == 0,
            loss=self.losses[-1],
        )

    def _local_optimiser(self, context: Context) -> "TorchOptimiser | None":
        """The method's own optimiser; None where the settings name one of torch's."""
        method, plan = self.method, self.plan

        def optimiser_at(step: int) -> LocalOptimiser:
            return method.local_optimiser(plan.training.at(step, plan.num_steps), context)

        usual = is_usual(method.local_optimiser(plan.training, context))
        return None if usual else TorchOptimiser(optimiser_at, self.weights, self.frozen, plan)

    def _prior_loss(self, context: Context) -> Callable[[Params], tuple[Tensor, Params]] | None:
        """Value and gradient of the method's penalty at the parameters of a step; None without a penalty."""
        penalty, optimiser = self.method.penalty(context), self.local_optimiser
        if penalty is None:
            return None
        return penalty.along_path() if optimiser is None else partial(optimiser.prior_loss, penalty)


class OnlineFisher(pl.Callback):
    """Accumulates the online Fisher of a client after every optimiser step: F <- F + (b_t / m) g_t^2.

    Methods with other statistics of the path bring their own `observe`.
    """

    def __init__(self, statistics: Any, observe: Callable[[Any, Step], Any] = accumulate) -> None:
        self.statistics, self.observe = statistics, observe

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Batch, batch_idx: int) -> None:
        client: ClientModule = pl_module
        if client.task.mixed == torch.float16 and not all_finite(client.likelihood_gradient):
            return  # a scaled loss has overflowed, and the optimiser took no step
        self.statistics = self.observe(self.statistics, client.last_step(len(batch[1])))


def torch_optimiser(training: Training, params: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimiser that the settings name, as torch has it."""
    lr, decay = training.lr, training.weight_decay
    if training.is_sgd:
        return torch.optim.SGD(params, lr=lr, momentum=training.momentum, weight_decay=decay)
    cls = torch.optim.Adam if training.optimiser == "adam" else torch.optim.AdamW
    return cls(params, lr=lr, betas=(training.beta1, training.beta2), eps=training.eps, weight_decay=decay)


class TorchOptimiser(torch.optim.Optimizer):
    """A method's own rule as an optimiser of torch.

    Attributes:
        theta: The model. During forward and backward pass the parameters are at the rule's point instead.
        optimiser_state: What the rule remembers.
        prior_gradient: Of the prior loss at theta.
    """

    def __init__(
        self, optimiser_at: Callable[[int], LocalOptimiser], weights: Params, frozen: frozenset[str], plan: Plan
    ) -> None:
        super().__init__(weights.values(), {"lr": plan.training.lr})
        self.optimiser_at, self.weights, self.frozen, self.plan = optimiser_at, weights, frozen, plan
        self.theta = zip_map(lambda weight: weight.detach().clone(), weights)
        self.number, self.optimiser = 0, optimiser_at(0)
        self.optimiser_state = self.optimiser.init(moving(self.theta, frozen))
        self.noise: Params = {}
        self.prior_gradient: Params | None = None

    @torch.no_grad()
    def go_to_point(self) -> None:
        """Put the parameters where the likelihood's gradient is to be taken."""
        if not self.plan.training.is_steady:
            self.optimiser = self.optimiser_at(self.number)
        self.noise = self.plan.noise(self.number, self.theta) if self.optimiser.draws else {}
        self._show(self.optimiser.point(moving(self.theta, self.frozen), self.optimiser_state, self.noise))

    def prior_loss(self, penalty: Penalty, point: Params) -> tuple[Tensor, Params]:
        """P at theta instead of the point; its gradient stays here, apart from the likelihood's."""
        value, self.prior_gradient = penalty.value_and_grad(self.theta)
        return value, {}

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:  # a Trainer's forward and backward pass
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            free, weights = moving(self.theta, self.frozen), moving(self.weights, self.frozen)
            gradients = Gradients(
                {name: w.grad for name, w in weights.items() if w.grad is not None}, self.prior_gradient
            )
            updated, self.optimiser_state = self.optimiser.step(
                free, self.optimiser_state, gradients, self.noise, self.number
            )
            self.theta, self.number = {**self.theta, **updated}, self.number + 1
            self._show(updated)
        return loss

    def _show(self, values: Params) -> None:
        for name, value in values.items():
            self.weights[name].copy_(value)
