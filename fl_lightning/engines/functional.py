"""A lean loop over the client hooks: no Trainer, no loader, no optimiser object."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any, Literal, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from fl_lightning import streams
from fl_lightning.curvature.per_sample import squared_gradients
from fl_lightning.data.augment import Choices
from fl_lightning.data.batches import SERVER, ClientData, Plan
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.model_checks import couples_samples
from fl_lightning.engines.base import Engine, Finisher, Fit, finished_client, mean_loss
from fl_lightning.engines.returned import observed
from fl_lightning.engines.user_optimiser import UserOptimiser
from fl_lightning.errors import require
from fl_lightning.method import Context, Method, Step, observation
from fl_lightning.method import frozen as frozen_in
from fl_lightning.models.inputs import Inputs, each
from fl_lightning.models.task import Task, Weights
from fl_lightning.optimisers import is_usual
from fl_lightning.optimisers.base import Gradients
from fl_lightning.optimisers.sgd import Sgd, is_plain, moving, with_zeros
from fl_lightning.params import Params, add_all, copy_all, row, zeros, zip_map
from fl_lightning.system import activity, devices, trees
from fl_lightning.training import Training

# On a CPU, batching clients by vmap pays only for models this small, and only if the clients take similar numbers of
# steps: all wait for the longest. Measured by `make bench` on one thread.
TINY_MODEL = 25_000
AUTO_CHUNK = 100
# What a client takes on an accelerator, in models: its own, gradients, state, statistics, and activations for a guess.
MODELS_PER_CLIENT = 8


class Chosen(int):
    """A number of clients that auto has chosen for a worker, which may halve it."""


# How many clients have fitted into the memory of a device; of each run its own, or its bits would depend on others.
_fitting: WeakKeyDictionary[Task, int] = WeakKeyDictionary()


@dataclass(frozen=True)
class Functional(Engine):
    """Lean loop in plain torch; several clients at once by vmap where that is faster.

    Without dropout every chunk gives the same numbers up to rounding, and chunk 1 the same bits for any cohort. With
    dropout, chunk 1 draws the same masks as the Lightning engine; larger chunks draw others of the same distribution.

    Attributes:
        chunk: Clients trained at once: 1 is a plain loop, more are batched by torch.func.vmap, auto picks by device,
            model size and how alike the clients' sizes are, and halves the number where a device's memory runs out.
            Networks whose samples depend on each other, as BatchNorm makes them, are always trained one by one.
    """

    chunk: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        require(
            self.chunk == "auto" or int(self.chunk) >= 1, f"engine.chunk must be at least 1, or auto, got {self.chunk}"
        )

    def fit(
        self, method: Method, task: Task, context: Context, buffers: Params, plans: Sequence[Plan]
    ) -> Iterator[Fit]:
        chunk = self.in_groups(method, task, plans)[1]
        if self._halves:
            chunk = min(chunk, _fitting.get(task, chunk))
        first = 0
        while first < len(plans):
            members = range(first, min(first + chunk, len(plans)))
            try:
                fits = list(_trained(method, task, context, buffers, plans, members))
            except torch.OutOfMemoryError:
                if not self._halves or len(members) == 1:
                    raise
                chunk = _fitting[task] = len(members) // 2
                activity.note(f"{len(members)} clients at once do not fit into the device's memory; {chunk} are tried")
                continue
            yield from fits
            first = members.stop

    def prepare(self, method: Method, task: Task, dataset: Dataset, finish: Finisher[Any]) -> None:
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

    def in_groups(self, method: Method, task: Task, plans: Sequence[Plan]) -> tuple[Engine, int]:
        chunk = 1 if method.traits.one_by_one else self._chunk(task, plans)
        return replace(self, chunk=Chosen(chunk) if self._halves else chunk), chunk

    @property
    def _halves(self) -> bool:
        """Whether fewer clients may be trained at once than it says."""
        return self.chunk == "auto" or isinstance(self.chunk, Chosen)

    def _chunk(self, task: Task, plans: Sequence[Plan]) -> int:
        """The number of these clients to train at once."""
        chunk = 1 if task.step is not None else self.chunk_for(task, [plan.num_steps for plan in plans])
        # The samples that pad smaller batches must not change the outputs of the others.
        return 1 if chunk > 1 and couples_samples(task, plans[0].data) else chunk

    def chunk_for(self, task: Task, steps: Sequence[int]) -> int:
        """The number of clients to train at once, given the steps that each of them takes."""
        if self.chunk != "auto":
            return int(self.chunk)
        if task.device.type != "cpu":  # by what is free just now, a run would not repeat its bits
            room, one = devices.capacity(task.device), MODELS_PER_CLIENT * task.num_params * task.dtype.itemsize
            return AUTO_CHUNK if room is None else max(1, min(AUTO_CHUNK, room // max(1, one)))
        alike = sum(steps) > 0.8 * len(steps) * max(steps)
        return AUTO_CHUNK if task.num_params <= TINY_MODEL and alike else 1


def _trained(
    method: Method, task: Task, context: Context, buffers: Params, plans: Sequence[Plan], members: range
) -> Iterator[Fit]:
    """Some clients of a cohort, all at once."""
    if len(members) == 1:
        first = members.start
        yield train_one(method, task, context.of_member(first), buffers, plans[first])
    else:
        of_members = context.of_members(lambda leaf: leaf[members.start : members.stop])
        yield from train_many(method, task, of_members, buffers, [plans[i] for i in members])


def train_one(method: Method, task: Task, context: Context, buffers: Params, plan: Plan) -> Fit:
    """One client, in place on the task's workbench."""
    training, data, model = plan.training, plan.data, task.model
    task.load(Weights(context.start, buffers))
    task.train()
    leaves: Params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    params = zip_map(torch.detach, leaves)  # the same storage
    frozen = frozen_in(method, context)
    free = moving(params, frozen)
    targets, values = list(moving(leaves, frozen).values()), list(free.values())
    penalty, optimiser = method.penalty(context), method.local_optimiser(training, context)
    own = _user_optimiser(task, plan, frozen) if training.optimiser == "own" else None
    plain = isinstance(optimiser, Sgd) and is_plain(training) and not (frozen and penalty is not None)
    penalty_step = penalty.descent(training.lr) if penalty is not None and plain else None
    # What is trained; the workbench holds the rule's point.
    theta = params if plain or own else zip_map(torch.clone, params)
    state = () if own else optimiser.init(moving(theta, frozen))
    observer, statistics = observation(method, context)
    needs_squares, size = method.traits.needs_squares, len(data)
    per_epoch = plan.steps_per_epoch
    losses: list[Tensor] = []
    shares: list[float] = []
    with streams.global_noise(plan.seed, "noise", plan.round, data.client), _without_trainer(task, plan):
        for index, (x, y) in enumerate(plan.all_examples()):
            fraction = len(y) / size
            if not plain and not own:
                noise = plan.noise(index, params) if optimiser.draws else {}
                if not training.is_steady:
                    optimiser = method.local_optimiser(training.at(index, plan.num_steps), context)
                copy_all(values, list(optimiser.point(moving(theta, frozen), state, noise).values()))
            squares = squared_gradients(task, Weights(params, buffers), x, y) if needs_squares else None
            epoch, position = divmod(index, per_epoch)
            loss = task.batch_loss(x, y, position)
            grads = torch.autograd.grad(loss, targets, materialize_grads=True)
            losses.append(loss.detach())
            shares.append(fraction)
            if plain:  # the penalty first: both gradients are taken at the same theta
                if penalty_step is not None:
                    penalty_step(params)
                add_all(values, grads, -training.lr)
            elif own:
                gradients = Gradients(
                    dict(zip(free, grads, strict=True)), None if penalty is None else penalty.grad(theta)
                )
                own.step(targets, list(gradients.total().values()), epoch, position, position == per_epoch - 1)
            else:
                gradients = Gradients(
                    dict(zip(free, grads, strict=True)), None if penalty is None else penalty.grad(theta)
                )
                updated, state = optimiser.step(moving(theta, frozen), state, gradients, noise, index)
                theta = {**theta, **updated}
            if observer is not None:
                grad = with_zeros(dict(zip(free, grads, strict=True)), params)
                step = Step(index, theta, grad, squares, fraction, epoch, position == per_epoch - 1, losses[-1])
                statistics = observed(observer, statistics, step)
    if not plain and not own:
        copy_all(values, list(moving(theta, frozen).values()))
    local = finished_client(task, plan, task.weights(), statistics, () if is_usual(optimiser) else state)
    return Fit(local, mean_loss(losses, shares, plan.num_epochs))


def _without_trainer(task: Task, plan: Plan) -> AbstractContextManager[None]:
    """A LightningModule at work without Lightning; it may ask for how long it trains."""
    if task.step is None:
        return nullcontext()
    return task.step.without_trainer(estimated_stepping_batches=plan.num_steps, max_epochs=plan.num_epochs)


def _user_optimiser(task: Task, plan: Plan, frozen: frozenset[str]) -> UserOptimiser:
    assert task.step is not None
    with _without_trainer(task, plan):
        return UserOptimiser(task.step, frozen, plan.training.clip_norm)


class Client(NamedTuple):
    """What a client has between two steps; of several clients, each tensor has a row for every one."""

    params: Params
    buffers: Params
    optimiser_state: Any
    statistics: Any


class Batch(NamedTuple):
    """What a client is given for a step; of several clients, each tensor has a row for every one.

    Attributes:
        x: Inputs, filled up to as many samples as the others have.
        y: Targets.
        mask: 1 for a sample, 0 for what fills up.
        fraction: |batch| / |client data|.
        steps_per_epoch: Of the client.
        lr: Learning rate of this step.
        noise: For rules that draw.
    """

    x: Inputs
    y: Tensor
    mask: Tensor
    fraction: Tensor
    steps_per_epoch: Tensor
    lr: Tensor
    noise: Params


def train_many(method: Method, task: Task, context: Context, buffers: Params, plans: Sequence[Plan]) -> Iterator[Fit]:
    """Several clients at once by vmap; clients with fewer steps stand still when they have finished."""
    task.train()
    one = OneOfMany(method, task, context, plans[0].training, min(plan.num_steps for plan in plans))
    clients = one.start(buffers, len(plans))
    losses = torch.zeros(len(plans), dtype=torch.float64, device=task.device)
    step = vmap(one.step, in_dims=(0, trees.map_leaves(lambda _: 0, one.own), 0, None), randomness="different")
    with streams.global_noise(plans[0].seed, "noise", plans[0].round, plans[0].data.client):
        for index, batch in enumerate(padded_batches(plans, task, one.first.start if one.optimiser.draws else {})):
            clients, loss = step(clients, one.own, batch, index)
            losses += loss.detach().double() * batch.fraction
    for position, (plan, loss) in enumerate(zip(plans, losses.tolist(), strict=True)):
        client = row(clients, position)
        optimiser_state = () if is_usual(one.optimiser) else client.optimiser_state
        local = finished_client(task, plan, Weights(client.params, client.buffers), client.statistics, optimiser_state)
        yield Fit(local, loss / plan.num_epochs)


class OneOfMany:
    """Start and step of a client as functions of its own tensors, which vmap applies to several clients.

    Args:
        method: The method.
        task: Model and likelihood.
        context: Of all these clients.
        training: Of the same.
        shortest: The fewest steps that one of them takes.

    Attributes:
        own: What the clients have each for itself of the context, stacked; `alike` if that is nothing.
        first: The context as the first client sees it, from which what is the same for all of them is made.
    """

    def __init__(self, method: Method, task: Task, context: Context, training: Training, shortest: int) -> None:
        self.method, self.task, self.context, self.training, self.shortest = method, task, context, training, shortest
        self.own = (context.own, context.start if context.own_start else ())
        self.alike = not trees.leaves(self.own)
        self.first = context.of_member(0)
        self.frozen, self.optimiser = frozen_in(method, self.first), method.local_optimiser(training, self.first)
        self.shared_penalty = method.penalty(self.first) if self.alike else None
        self.observer, self.needs_squares = observation(method, self.first)[0], method.traits.needs_squares

    def context_of(self, own: Any) -> Context:
        """What a client sees."""
        memory, start = own
        return self.context._replace(own=memory, start=start or self.context.start, own_start=False)

    def start(self, buffers: Params, number: int) -> Client:
        """So many clients before their first step."""

        def repeated(tree: Any) -> Any:
            return trees.map_tensors(lambda leaf: leaf.expand(number, *leaf.shape), tree)

        def of_client(own: Any) -> tuple[Any, Any]:
            context = self.context_of(own)
            optimiser = self.method.local_optimiser(self.training, context)
            return optimiser.init(moving(context.start, self.frozen)), observation(self.method, context)[1]

        params = self.context.start if self.context.own_start else repeated(self.context.start)
        optimiser_state, statistics = repeated(of_client(self.own)) if self.alike else vmap(of_client)(self.own)
        return Client(
            zip_map(torch.clone, params), zip_map(torch.clone, repeated(buffers)), optimiser_state, statistics
        )

    def step(self, client: Client, own: Any, batch: Batch, index: int) -> tuple[Client, Tensor]:
        """The client after a step, and its loss before it."""
        method, context, params = self.method, self.context_of(own), client.params
        training = self.training if self.training.is_steady else self.training.at_rate(batch.lr)
        optimiser = method.local_optimiser(training, context)
        penalty = self.shared_penalty if self.alike else method.penalty(context)
        point = {**params, **optimiser.point(moving(params, self.frozen), client.optimiser_state, batch.noise)}

        def loss_of(params: Params) -> tuple[Tensor, Params]:
            copies = zip_map(torch.clone, client.buffers)  # BatchNorm writes into its buffers
            return self.task.masked_loss(Weights(params, copies), batch.x, batch.y, batch.mask), copies

        grad, (loss, buffers) = grad_and_value(loss_of, has_aux=True)(point)
        gradients = Gradients(moving(grad, self.frozen), None if penalty is None else penalty.grad(params))
        updated, optimiser_state = optimiser.step(
            moving(params, self.frozen), client.optimiser_state, gradients, batch.noise, index
        )
        after = Client({**params, **updated}, buffers, optimiser_state, client.statistics)
        if self.observer is not None:
            at_point = (self.task, Weights(point, client.buffers), batch.x, batch.y, batch.mask)
            seen = Step(
                number=index,
                params=after.params,
                grad=with_zeros(gradients.likelihood, params),
                squares=squared_gradients(*at_point) if self.needs_squares else None,
                fraction=batch.fraction,
                epoch=index // batch.steps_per_epoch,
                epoch_ends=(index + 1) % batch.steps_per_epoch == 0,
                loss=loss,
            )
            after = after._replace(statistics=observed(self.observer, client.statistics, seen))
        if index < self.shortest:
            return after, loss
        active = batch.mask.any()
        return trees.map_leaves(lambda new, old: torch.where(active, new, old), after, client), loss


def padded_batches(plans: Sequence[Plan], task: Task, noise_like: Params) -> Iterator[Batch]:
    """The steps of several clients side by side.

    Args:
        plans: Of the clients; where one has fewer samples in a batch than another, or none, something fills it up.
        task: Says where numbers are, and in which type.
        noise_like: The parameters for which the rule draws noise; none if it does not.
    """
    data, device = plans[0].data, task.device
    schedule = _padded_schedule(plans)  # on the device, as all clients' steps
    sizes_of_steps = zip_longest(*(plan.batch_sizes * plan.num_epochs for plan in plans), fillvalue=0)
    widths = map(max, sizes_of_steps)  # columns that only pad are at the end
    choices = _padded_choices(plans, schedule) if plans[0].augments else None
    sizes = torch.tensor([len(plan.data) for plan in plans], dtype=task.dtype, device=device)
    lengths = torch.tensor([plan.steps_per_epoch for plan in plans], device=device)
    rates = [[_rate(plan, index) for plan in plans] for index in range(len(schedule))]

    def by_client(rows: Tensor) -> Tensor:
        return rows.view(len(plans), -1, *rows.shape[1:])

    for index, (width, lr) in enumerate(zip(widths, torch.tensor(rates, dtype=task.dtype, device=device), strict=True)):
        places = schedule[index, :, :width]
        mask = (places >= 0).to(task.dtype)
        chosen = choices and Choices(*(leaf[index, :, :width].flatten(0, 1) for leaf in choices))
        x, y = data.fetch(places.clamp(min=0).reshape(-1), chosen)
        noise = _stacked_noise(plans, index, noise_like) if noise_like else {}
        yield Batch(each(by_client, x), by_client(y), mask, mask.sum(1) / sizes, lengths, lr, noise)


def _rate(plan: Plan, index: int) -> float:
    """The learning rate of a step; of a client that has finished, none."""
    return plan.training.at(index, plan.num_steps).lr if index < plan.num_steps else 0.0


def _stacked_noise(plans: Sequence[Plan], index: int, like: Params) -> Params:
    """The noise of a step for every client; those that have finished get zeros."""
    drawn = [plan.noise(index, like) if index < plan.num_steps else zeros(like) for plan in plans]
    return {name: torch.stack([noise[name] for noise in drawn]) for name in like}


def _padded_schedule(plans: Sequence[Plan]) -> Tensor:
    """(steps, clients, batch) places in the training set, -1 where a client has no sample."""
    width = max(max(plan.batch_sizes) for plan in plans)
    of_clients = [pad_sequence(list(plan.all_batches()), batch_first=True, padding_value=-1) for plan in plans]
    as_wide = [pad(batches, (0, width - batches.shape[1]), value=-1) for batches in of_clients]
    return pad_sequence(as_wide, padding_value=-1)


def _padded_choices(plans: Sequence[Plan], schedule: Tensor) -> Choices:
    """The augmentation of every sample of the schedule, (steps, clients, batch, ...); anything on padding."""
    own = [[plan.choices(epoch) for epoch in range(plan.num_epochs)] for plan in plans]
    padded = Choices(*(leaf.new_zeros(*schedule.shape, *leaf.shape[1:]) for leaf in own[0][0]))
    is_there = (schedule >= 0).cpu()
    for position, epochs in enumerate(own):
        is_sample = is_there[:, position]  # in reading order these are the client's epochs, one after the other
        for places, *rows in zip(padded, *epochs, strict=True):
            places[:, position][is_sample] = torch.cat(rows)
    return padded
