"""Clients as LightningModules on one Fabric, which all clients of a process share."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fl_lightning import streams
from fl_lightning.data.batches import Plan
from fl_lightning.engines.base import Engine, Fit, finished_client, mean_loss
from fl_lightning.engines.returned import observed
from fl_lightning.engines.user_optimiser import documented_form
from fl_lightning.errors import require
from fl_lightning.method import Context, Method, observation
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params

if TYPE_CHECKING:  # importing Lightning takes seconds
    from lightning_fabric import Fabric

    from fl_lightning.client import ClientModule, OnlineFisher

# The options of a Trainer that the settings leave open.
OPTIONS = (
    *("logger", "log_every_n_steps", "default_root_dir", "profiler", "detect_anomaly", "deterministic", "benchmark"),
    *("enable_progress_bar", "enable_model_summary", "enable_checkpointing"),
)
# The options that a setting decides, and which.
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


@dataclass(frozen=True)
class Lightning(Engine):
    """PyTorch Lightning: plain networks on a shared Fabric; a user's module, callbacks or options on a Trainer.

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
        self, method: Method, task: Task, context: Context, buffers: Params, plans: Sequence[Plan]
    ) -> Iterator[Fit]:
        for position, plan in enumerate(plans):
            yield self._fit_one(method, task, context.of_member(position), buffers, plan)

    def _fit_one(self, method: Method, task: Task, context: Context, buffers: Params, plan: Plan) -> Fit:
        from fl_lightning.client import ClientModule, OnlineFisher

        task.load(Weights(context.start, buffers))
        task.train()
        client = ClientModule(method, task, context, plan)
        observer, statistics = observation(method, context)
        fisher = None if observer is None else OnlineFisher(statistics, partial(observed, observer))
        with streams.global_noise(plan.seed, "noise", plan.round, plan.data.client):
            if task.step is not None or self.callbacks or self.trainer:
                from fl_lightning.engines.user_module import fit_on_trainer

                fit_on_trainer(client, fisher, self.callbacks, self.trainer)
            else:
                fit_on_fabric(fabric_on(task.device), client, fisher, self.scaler(task))
        optimiser_state = () if client.local_optimiser is None else client.local_optimiser.optimiser_state
        statistics = () if fisher is None else fisher.statistics
        local = finished_client(task, plan, task.weights(), statistics, optimiser_state)
        shares = [size / len(plan.data) for size in plan.batch_sizes] * plan.num_epochs
        return Fit(local, mean_loss(client.losses, shares[: len(client.losses)], plan.num_epochs))

    def scaler(self, task: Task) -> torch.amp.GradScaler:
        """Of float16's losses; each client has a new one, so that its numbers do not depend on earlier clients."""
        return torch.amp.GradScaler(task.device.type, enabled=task.mixed == torch.float16)


def fit_on_fabric(
    fabric: "Fabric", client: "ClientModule", fisher: "OnlineFisher | None", scaler: torch.amp.GradScaler
) -> None:
    """All steps of a client's plan."""
    optimisers, schedules = documented_form(client.configure_optimizers())
    optimiser: Any = fabric.setup_optimizers(optimisers[0])
    clip_norm = client.plan.training.clip_norm if client.local_optimiser is None else None  # a rule clips by itself
    for index, batch in enumerate(client.plan.all_examples()):
        client.on_train_batch_start(batch, index)
        client.zero_grad()
        loss = client.training_step(batch, index)
        fabric.backward(scaler.scale(loss))
        scaler.unscale_(optimiser)
        client.on_before_optimizer_step(optimiser)
        if clip_norm is not None:
            fabric.clip_gradients(client, optimiser, max_norm=clip_norm, error_if_nonfinite=False)
        scaler.step(optimiser)
        scaler.update()
        for schedule in schedules:
            schedule.scheduler.step()
        if fisher is not None:
            fisher.on_train_batch_end(fabric, client, loss, batch, index)


@cache
def fabric_on(device: torch.device) -> "Fabric":
    """The Fabric of this process for a device."""
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments.lightning import LightningEnvironment
    from lightning_fabric.strategies.single_device import SingleDeviceStrategy

    from fl_lightning.engines.placement import placement

    # Named, because Fabric would otherwise take the tasks of a SLURM job for its own processes.
    alone = LightningEnvironment()
    return Fabric(plugins=alone, **placement(device, SingleDeviceStrategy))
