"""A lean loop over the client hooks: no Trainer, no loader, no optimiser object."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils import _pytree as pytree

from fl_lightning import streams
from fl_lightning.batching import couples_samples
from fl_lightning.curvature.per_sample import squared_gradients
from fl_lightning.data.augment import Choices
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.plan import SERVER, ClientData, Plan
from fl_lightning.engines.engine import Engine, Finisher, Fit, finished_client, mean_loss
from fl_lightning.engines.own_optimiser import OwnOptimiser, require_nothing_frozen
from fl_lightning.errors import require
from fl_lightning.inputs import Inputs, each
from fl_lightning.method import ClientHooks, Context, Step
from fl_lightning.params import Params, row, zeros, zip_map
from fl_lightning.rules.rule import Slopes
from fl_lightning.rules.sgd import Sgd, is_plain, moving, with_zeros
from fl_lightning.rules.usual import is_usual
from fl_lightning.task import Task, Weights

# On a CPU, batching clients by vmap pays only for models this small, and only if the clients take similar numbers of
# steps: all wait for the longest. Measured by `make bench` on one thread.
TINY_MODEL = 25_000
AUTO_CHUNK = 100


@dataclass(frozen=True)
class Functional(Engine):
    """Lean loop in plain torch; several clients at once by vmap where that is faster.

    Without dropout every chunk gives the same numbers up to rounding, and chunk 1 the same bits for any cohort. With
    dropout, chunk 1 draws the same masks as the Lightning engine; larger chunks draw others of the same distribution.

    Attributes:
        chunk: Clients trained at once: 1 is a plain loop, more are batched by torch.func.vmap, auto picks by device,
            model size and how alike the clients' sizes are. Networks whose samples depend on each other, as BatchNorm
            makes them, are always trained one by one.
    """

    chunk: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        require(
            self.chunk == "auto" or int(self.chunk) >= 1, f"engine.chunk must be at least 1, or auto, got {self.chunk}"
        )

    def fit(
        self, hooks: ClientHooks, task: Task, context: Context, buffers: Params, plans: Sequence[Plan]
    ) -> Iterator[Fit]:
        chunk = self.in_groups(hooks, task, plans)[1]
        for first in range(0, len(plans), chunk):
            members = range(first, min(first + chunk, len(plans)))
            if len(members) == 1:
                yield train_one(hooks, task, context.of_member(first), buffers, plans[first])
            else:
                chunk_context = context.of_members(lambda leaf: leaf[members.start : members.stop])  # noqa: B023
                yield from train_many(hooks, task, chunk_context, buffers, [plans[i] for i in members])

    def prepare(self, hooks: ClientHooks, task: Task, dataset: Dataset, finish: Finisher[Any]) -> None:
        require(
            task.mixed != torch.float16,
            "compute.precision 16-mixed scales losses, which Lightning does; use --engine lightning, or bf16-mixed",
        )
        if task.step is None:
            return
        places = torch.arange(min(2, len(dataset.train_y)), device=task.device)
        few = ClientData(SERVER, dataset.to(task.device), places, task.dtype)
        task.load(task.initial)
        with streams.undisturbed(), task.autocast():
            task.step.require_function(*few.fetch(few.indices))
        task.load(task.initial)

    def in_groups(self, hooks: ClientHooks, task: Task, plans: Sequence[Plan]) -> tuple[Engine, int]:
        chunk = 1 if hooks.one_by_one else self._chunk(task, plans)
        return replace(self, chunk=chunk), chunk

    def trains_apart(self, task: Task, plans: Sequence[Plan]) -> bool:
        return self._chunk(task, plans) == 1 or len(plans) == 1

    def _chunk(self, task: Task, plans: Sequence[Plan]) -> int:
        """The number of these clients to train at once."""
        chunk = 1 if task.step is not None else self.chunk_for(task, [plan.num_steps for plan in plans])
        # The samples that pad smaller batches must not change the outputs of the others.
        return 1 if chunk > 1 and couples_samples(task, plans[0].data) else chunk

    def chunk_for(self, task: Task, steps: Sequence[int]) -> int:
        """The number of clients to train at once, given the steps that each of them takes."""
        if self.chunk != "auto":
            return int(self.chunk)
        if task.device.type != "cpu":
            return AUTO_CHUNK
        alike = sum(steps) > 0.8 * len(steps) * max(steps)
        return AUTO_CHUNK if task.num_params <= TINY_MODEL and alike else 1


def train_one(hooks: ClientHooks, task: Task, context: Context, buffers: Params, plan: Plan) -> Fit:
    """One client, in place on the task's workbench."""
    training, data, model = plan.training, plan.data, task.model
    task.load(Weights(context.start, buffers))
    model.train()
    leaves: Params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    params = zip_map(torch.detach, leaves)  # the same storage
    frozen = hooks.frozen(context)
    free = moving(params, frozen)
    targets, values = list(moving(leaves, frozen).values()), list(free.values())
    penalty, rule = hooks.penalty(context), hooks.rule(training, context)
    own = _own_optimiser(task, plan, frozen) if training.optimiser == "own" else None
    plain = isinstance(rule, Sgd) and is_plain(training) and not (frozen and penalty is not None)
    pull = penalty.descent(training.lr) if penalty is not None and plain else None
    # What is trained; the workbench holds the rule's point.
    theta = params if plain or own else zip_map(torch.clone, params)
    state = () if own else rule.init(moving(theta, frozen))
    trace = hooks.trace(context)
    observes, needs_squares, size = hooks.observes, hooks.needs_squares, len(data)
    per_epoch = plan.steps_per_epoch
    losses: list[Tensor] = []
    shares: list[float] = []
    with streams.global_noise(plan.seed, "noise", plan.round, data.client), _without_trainer(task, plan):
        for index, (x, y) in enumerate(plan.all_examples()):
            fraction = len(y) / size
            if not plain and not own:
                noise = plan.noise(index, params) if rule.draws else {}
                if not training.is_steady:
                    rule = hooks.rule(training.at(index, plan.num_steps), context)
                torch._foreach_copy_(values, list(rule.point(moving(theta, frozen), state, noise).values()))
            squares = squared_gradients(task, Weights(params, buffers), x, y) if needs_squares else None
            epoch, position = divmod(index, per_epoch)
            loss = task.batch_loss(x, y, position)
            grads = torch.autograd.grad(loss, targets, materialize_grads=True)
            losses.append(loss.detach())
            shares.append(fraction)
            if plain:  # the penalty first: both gradients are taken at the same theta
                if pull is not None:
                    pull(params)
                torch._foreach_add_(values, grads, alpha=-training.lr)
            elif own:
                slopes = Slopes(dict(zip(free, grads, strict=True)), None if penalty is None else penalty.grad(theta))
                own.step(targets, list(slopes.total().values()), epoch, position, position == per_epoch - 1)
            else:
                slopes = Slopes(dict(zip(free, grads, strict=True)), None if penalty is None else penalty.grad(theta))
                updated, state = rule.step(moving(theta, frozen), state, slopes, noise, index)
                theta = {**theta, **updated}
            if observes:
                grad = with_zeros(dict(zip(free, grads, strict=True)), params)
                step = Step(index, theta, grad, squares, fraction, epoch, position == per_epoch - 1, losses[-1])
                trace = hooks.observe(trace, step)
    if not plain and not own:
        torch._foreach_copy_(values, list(moving(theta, frozen).values()))
    local = finished_client(task, plan, task.weights(), trace, () if is_usual(rule) else state)
    return Fit(local, mean_loss(losses, shares, plan.num_epochs))


def _without_trainer(task: Task, plan: Plan) -> AbstractContextManager[None]:
    """A LightningModule at work without Lightning; it may ask for how long it trains."""
    if task.step is None:
        return nullcontext()
    return task.step.without_trainer(estimated_stepping_batches=plan.num_steps, max_epochs=plan.num_epochs)


def _own_optimiser(task: Task, plan: Plan, frozen: frozenset[str]) -> OwnOptimiser:
    assert task.step is not None
    require_nothing_frozen(task.step, frozen)
    with _without_trainer(task, plan):
        return OwnOptimiser(task.step, plan.training.clip_norm)


def train_many(
    hooks: ClientHooks, task: Task, context: Context, buffers: Params, plans: Sequence[Plan]
) -> Iterator[Fit]:
    """Several clients at once by vmap; clients with fewer steps stand still when they have finished."""
    training, number, device = plans[0].training, len(plans), task.device
    task.model.train()
    schedule, shortest = _padded_schedule(plans), min(plan.num_steps for plan in plans)
    choices = _padded_choices(plans, schedule) if plans[0].augments else None
    sizes = torch.tensor([len(plan.data) for plan in plans], dtype=task.dtype, device=device)
    lengths = torch.tensor([plan.steps_per_epoch for plan in plans], device=device)

    def expand(tree: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda leaf: leaf.expand(number, *leaf.shape).clone(), tree)

    def by_client(rows: Tensor) -> Tensor:
        return rows.view(number, -1, *rows.shape[1:])

    own = (context.own, context.start if context.own_start else ())

    def seen_by(own: Any) -> Context:
        memory, start = own
        return context._replace(own=memory, start=start or context.start, own_start=False)

    def start_trace(own: Any) -> Any:
        return hooks.trace(seen_by(own))

    def start_rule(own: Any) -> Any:
        mine = seen_by(own)
        return hooks.rule(training, mine).init(moving(mine.start, frozen))

    first = context.of_member(0)
    frozen, rule = hooks.frozen(first), hooks.rule(training, first)

    def advance(
        state: Any,
        own: Any,
        noise: Params,
        x: Inputs,
        y: Tensor,
        mask: Tensor,
        size: Tensor,
        length: Tensor,
        rate: Tensor,
        index: int,
    ) -> Any:
        params, stats, memory, trace = state
        mine = seen_by(own)
        now = training if training.is_steady else training.at_rate(rate)
        rule, penalty = hooks.rule(now, mine), hooks.penalty(mine)
        point = {**params, **rule.point(moving(params, frozen), memory, noise)}

        def loss_of(params: Params) -> tuple[Tensor, Params]:
            copies = zip_map(torch.clone, stats)  # BatchNorm writes into its buffers
            return task.masked_loss(Weights(params, copies), x, y, mask), copies

        grad, (loss, new_stats) = grad_and_value(loss_of, has_aux=True)(point)
        slopes = Slopes(moving(grad, frozen), None if penalty is None else penalty.grad(params))
        updated, new_memory = rule.step(moving(params, frozen), memory, slopes, noise, index)
        new_params = {**params, **updated}
        if frozen:
            grad = with_zeros(moving(grad, frozen), params)
        new_trace = trace
        if hooks.observes:
            squares = squared_gradients(task, Weights(point, stats), x, y, mask) if hooks.needs_squares else None
            epoch, position = index // length, index % length
            seen = Step(index, new_params, grad, squares, mask.sum() / size, epoch, position == length - 1, loss)
            new_trace = hooks.observe(trace, seen)
        moved = (new_params, new_stats, new_memory, new_trace)
        if index >= shortest:  # somebody has finished
            active = mask.any()
            moved = pytree.tree_map(lambda new, old: torch.where(active, new, old), moved, state)
        return moved, loss

    start = zip_map(torch.clone, context.start) if context.own_start else expand(context.start)
    state = (start, expand(buffers), _stacked(start_rule, own, number), _stacked(start_trace, own, number))
    losses = torch.zeros(number, dtype=torch.float64, device=device)
    own_dims = pytree.tree_map(lambda _: 0, own)
    step = vmap(advance, in_dims=(0, own_dims, 0, 0, 0, 0, 0, 0, 0, None), randomness="different")
    data = plans[0].data
    with streams.global_noise(plans[0].seed, "noise", plans[0].round, data.client):
        for index, places in enumerate(schedule):
            width = int((places >= 0).any(0).sum())  # columns that only pad are at the end
            places = places[:, :width].to(device)
            mask = (places >= 0).to(task.dtype)
            chosen = choices and Choices(*(leaf[index, :, :width].flatten(0, 1) for leaf in choices))
            x, y = data.fetch(places.clamp(min=0).reshape(-1), chosen)
            x, y = each(by_client, x), by_client(y)
            noise = _stacked_noise(plans, index, first.start) if rule.draws else {}
            rates = torch.tensor([_rate(plan, index) for plan in plans], dtype=task.dtype, device=device)
            state, loss = step(state, own, noise, x, y, mask, sizes, lengths, rates, index)
            losses += loss.detach().double() * (mask.sum(1) / sizes)
    for position, plan in enumerate(plans):
        params, stats, memory, trace = row(state, position)
        remembered = () if is_usual(rule) else memory
        local = finished_client(task, plan, Weights(params, stats), trace, remembered)
        yield Fit(local, float(losses[position]) / plan.num_epochs)


def _rate(plan: Plan, index: int) -> float:
    """The learning rate of a step; of a client that has finished, none."""
    return plan.training.at(index, plan.num_steps).lr if index < plan.num_steps else 0.0


def _stacked(start: Callable[[Any], Any], own: Any, number: int) -> Any:
    """What every client starts with, given its memory, stacked."""
    if pytree.tree_leaves(own):
        return vmap(start)(own)
    return pytree.tree_map_only(Tensor, lambda leaf: leaf.expand(number, *leaf.shape), start(own))


def _stacked_noise(plans: Sequence[Plan], index: int, like: Params) -> Params:
    """The noise of a step for every client; those that have finished get zeros."""
    drawn = [plan.noise(index, like) if index < plan.num_steps else zeros(like) for plan in plans]
    return {name: torch.stack([noise[name] for noise in drawn]) for name in like}


def _padded_schedule(plans: Sequence[Plan]) -> Tensor:
    """(steps, clients, batch) places in the training set, -1 where a client has no sample."""
    steps = max(plan.num_steps for plan in plans)
    width = max(max(plan.batch_sizes) for plan in plans)
    schedule = torch.full((steps, len(plans), width), -1)
    for position, plan in enumerate(plans):
        for step, batch in enumerate(plan.all_batches()):
            schedule[step, position, : len(batch)] = batch
    return schedule


def _padded_choices(plans: Sequence[Plan], schedule: Tensor) -> Choices:
    """The augmentation of every sample of the schedule, (steps, clients, batch, ...); any where there is no sample."""
    own = [[plan.choices(epoch) for epoch in range(plan.num_epochs)] for plan in plans]
    padded = Choices(*(leaf.new_zeros(*schedule.shape, *leaf.shape[1:]) for leaf in own[0][0]))
    for position, epochs in enumerate(own):
        is_sample = schedule[:, position] >= 0  # in reading order these are the client's epochs, one after the other
        for places, *rows in zip(padded, *epochs, strict=True):
            places[:, position][is_sample] = torch.cat(rows)
    return padded
