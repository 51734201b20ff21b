"""The vocabulary of a federated method: what the server sends, what a client shows and reports, and the hooks.

A method is written once, as pure functions; engines turn its client hooks into training. Hooks never write to
`self` or to their inputs, use no global randomness and know nothing of devices, logging or files. One input is private
to the method and may be updated in place: the statistics of the path.

`Method` has the nine members of every method. What few methods need are mixins: `class Fola(Method, ObservesPath)`.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn

from fl_lightning.data.batches import ClientData, Plan
from fl_lightning.errors import UserError
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.models.task import Task
from fl_lightning.optimisers import usual
from fl_lightning.optimisers.base import LocalOptimiser
from fl_lightning.params import Params, count, zip_map
from fl_lightning.penalty import Penalty
from fl_lightning.system import trees
from fl_lightning.system.plugins import wrong
from fl_lightning.training import Training


class State(Protocol):
    """What the server keeps between rounds: a NamedTuple of tensors with at least the global model."""

    @property
    def params(self) -> Params: ...


class Server(NamedTuple):
    """What the server has beside its state.

    Attributes:
        task: Model and likelihood.
        sizes: Numbers of training samples of all clients.
        holdout: Data that belong to no client (`data.holdout`), possibly none.
        seed: Key of the server's own random draws; use it through `fl_lightning.streams` with a purpose of your own.
        smallest_batch: The fewest samples that the model can be trained on at once: 1, mostly 2 with BatchNorm.
    """

    task: Task
    sizes: tuple[int, ...]
    holdout: ClientData
    seed: int
    smallest_batch: int = 1


class Cohort(NamedTuple):
    """The clients of a round, and what the server knows about it.

    Attributes:
        round: r = 1, 2, ...
        members: The ids of the participating clients, increasing.
        weights: p_n, the aggregation weights; they sum to 1 over the cohort.
        shares: pi_n (or 1/N with uniform weighting), the members' weights in the whole population.
        epochs: Local epochs of each member; fewer than asked for if it is a straggler.
        num_clients: N, the size of the population.
        training: The clients' optimiser settings in this round, with the learning rate of this round.
        server: What the server has beside its state.
    """

    round: int
    members: tuple[int, ...]
    weights: tuple[float, ...]
    shares: tuple[float, ...]
    epochs: tuple[int, ...]
    num_clients: int
    training: Training
    server: Server


class Context(NamedTuple):
    """What a round starts from.

    Attributes:
        start: The model at which every client starts; sent.
        shared: Anything else that is sent, the same for all clients.
        own: The client's memory of earlier rounds, not sent. Stacked over the cohort when it leaves `broadcast`,
            one row when it reaches a client hook.
        own_start: Whether each member starts at a model of its own: `start` is then stacked over the cohort, too.
    """

    start: Params
    shared: Any = ()
    own: Any = ()
    own_start: bool = False

    def of_member(self, position: int) -> "Context":
        """The context as one member of the cohort sees it."""
        seen = self.of_members(lambda leaf: leaf[position])
        return seen._replace(own_start=False) if seen.own_start else seen

    def of_members(self, part: Callable[[Tensor], Tensor]) -> "Context":
        """The context with a part of everything that is stacked over the cohort, such as some of its rows."""
        if not self.own_start and isinstance(self.own, tuple) and not self.own:  # all see the same
            return self
        start = zip_map(part, self.start) if self.own_start else self.start
        return self._replace(start=start, own=trees.map_tensors(part, self.own))


class Step(NamedTuple):
    """What one step of local training shows to the method.

    The tensors are valid during the call of `observe`; engines overwrite them afterwards, so keep sums or copies.

    Attributes:
        number: Of the step in this round, from 0.
        params: The model after the update.
        grad: Gradient of the batch's mean likelihood loss before the update, at the rule's point: without penalty,
            before clipping.
        squares: Mean over the batch of the squared per-sample gradients, if the method asks for it.
        fraction: |batch| / |client data|.
        epoch: Number of the epoch in this round, from 0.
        epoch_ends: Whether this is the last step of its epoch.
        loss: Mean likelihood loss of the batch before the update.
    """

    number: int
    params: Params
    grad: Params
    squares: Params | None
    fraction: float | Tensor
    epoch: int | Tensor
    epoch_ends: bool | Tensor
    loss: Tensor


class Local(NamedTuple):
    """A client that has finished its round.

    Attributes:
        client: Its id.
        params: Its model y_n.
        buffers: The model's buffers, if it has any.
        path_statistics: What `observe` has folded up.
        num_steps: T_n, optimiser steps taken.
        num_epochs: Epochs taken.
        training: The optimiser settings it used.
        task: Model and likelihood, for methods that look at the data once more.
        data: Its data, for the same.
        plan: Which samples it saw in which step.
        optimiser_state: What the local rule remembers after the last step, if the rule is the method's own.
    """

    client: int
    params: Params
    buffers: Params
    path_statistics: Any
    num_steps: int
    num_epochs: int
    training: Training
    task: Task
    data: ClientData
    plan: Plan
    optimiser_state: Any = ()


class MethodPosterior(NamedTuple):
    """The posterior that a method keeps of its model, as it stands after a round.

    Attributes:
        posterior: N(mu_S, Lambda_S^-1).
        scale: What makes of Lambda_S the mean curvature per sample, where it is one.
        prior: Where Lambda_S is the precision of the posterior itself, the precision of the prior that is in it; else
            None.
    """

    posterior: Gaussian
    scale: float = 1.0
    prior: float | None = None


class Traits(NamedTuple):
    """What the loop and the engines must know of a method with its settings, beside its hooks.

    Attributes:
        drops_stragglers: Whether clients that did not finish their epochs are left out of the round.
        extra_passes: Gradient passes over the client's data beside the training steps, for the count of gradients.
        one_by_one: Whether clients cannot be trained several at once, such as when statistics grow with every step.
        needs_squares: Whether `observe` reads `Step.squares`, the squared per-sample gradients.
        overshoot_advice: What to do where `prior_stability`, a number of `diagnose`, is above 1; empty without advice.
    """

    drops_stragglers: bool = False
    extra_passes: int = 0
    one_by_one: bool = False
    needs_squares: bool = False
    overshoot_advice: str = ""


@dataclass(frozen=True)
class Method(ABC):
    """One federated method. Its fields are its hyperparameters; its hooks stand in the order of a round.

    The client hooks (`penalty`, `local_optimiser`, `report`) are written for one client.

    `display_name` is how tables and figures write the method, by default as its file is called. It stands in the body
    of the class, so that it is read from the source without importing torch.

    `version` is part of a run's identity: raise it when the method's numbers change, or a default of its fields does.
    Where the numbers of a single choice change, `revised` has its version, by `field=value`: other runs stay known.
    """

    display_name: ClassVar[str] = ""
    version: ClassVar[int] = 1
    revised: ClassVar[Mapping[str, int]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        _refuse_lost_hooks(cls)

    @property
    def traits(self) -> Traits:
        """What the loop and the engines must know; it may depend on the settings."""
        return Traits()

    def check(self, training: Training, server: Server) -> None:  # noqa: B027 - nothing to refuse
        """Raise `UserError` for settings that do not go together, before anything is trained."""

    @abstractmethod
    def init(self, params: Params, num_clients: int) -> Any:
        """The server's state before round 1. Later ones have its structure, shapes and types: those of params."""

    def broadcast(self, state: Any, cohort: Cohort) -> Context:
        """What the server sends."""
        return Context(start=state.params)

    def penalty(self, context: Context) -> Penalty | None:
        """What is added to the client's loss in this round; `None` adds nothing."""
        return None

    def local_optimiser(self, training: Training, context: Context) -> LocalOptimiser:
        """How the client uses gradients in this round: the user's optimiser, unless a method brings one of its own.

        Where the learning rate changes within a round, it is asked for every step, with the settings of the step.
        """
        return usual(training)

    @abstractmethod
    def report(self, local: Local, context: Context) -> Any:
        """What the client sends back: a NamedTuple of tensors."""

    @abstractmethod
    def aggregate(self, state: Any, cohort: Cohort, reports: Sequence[Any]) -> Any:
        """The server's state after the round. Reports are in the order of the cohort's members."""

    def diagnose(
        self, before: Any, cohort: Cohort, reports: Sequence[Any], after: Any
    ) -> dict[str, float | list[float]]:
        """Numbers worth logging: one for the round, or a list with one for each member of the cohort.

        Their names are the method's own, and not those of what the run measures, such as GA.
        """
        return {}


class ObservesPath(ABC):
    """For methods with statistics of the local path, such as the online Fisher."""

    def path_statistics(self, context: Context) -> Any:
        """The statistics of an empty path, in memory of their own; None where these settings need no path at all."""
        return ()

    @abstractmethod
    def observe(self, statistics: Any, step: Step) -> Any:
        """Fold one step into the statistics.

        The statistics of an earlier step are not read again, so they may be written into and returned, where clients
        are trained one by one (`step.fraction` is then a float).
        """


class HasPosterior:
    """For methods with Gaussian posteriors of clients or of the server."""

    def posteriors(self, cohort: Cohort, reports: Sequence[Any]) -> Sequence[Gaussian]:
        """The clients' posteriors as they enter the aggregation, damping included, if the method has any."""
        return ()

    def posterior(self, state: Any, round: int, training: Training, sizes: Sequence[int]) -> MethodPosterior | None:
        """The server's own posterior, if the method keeps one, for predictions from it.

        Args:
            state: Of the server after a round.
            round: Which.
            training: How clients trained.
            sizes: Numbers of training samples of all clients.
        """
        return None


class HasEnsemble(ABC):
    """For methods whose prediction is the mean over an ensemble of their own, which is not that of the clients."""

    @abstractmethod
    def ensemble(self, state: Any, cohort: Cohort, reports: Sequence[Any]) -> Sequence[Params]:
        """The models of the ensemble.

        Args:
            state: Of the server before the round.
            cohort: The clients that took part.
            reports: What they sent.
        """


class OwnNetwork:
    """For methods that train another network than the settings name: gated, wider, or growing layer by layer."""

    def network(self, module: nn.Module) -> nn.Module:
        """The network that is really trained, made from a copy of the model that the settings name.

        Stochastic in training mode if it likes, through torch's global generator, which engines seed for every client
        and round; deterministic in evaluation mode. Its parameters are what all other hooks see.
        """
        return module

    def frozen(self, context: Context) -> frozenset[str]:
        """Names of parameters that stay as they are to the bit in this round; the same for every client, never all."""
        return frozenset()


class CountsTraffic(ABC):
    """For methods whose messages do not take a number of 32 bits for every element of a tensor."""

    @abstractmethod
    def traffic(self, message: Any) -> float:
        """How many float32 numbers it takes to send a message; a bit is 1/32.

        Args:
            message: To a client, its context without `own`, or from it, its report; and the model's buffers: a pair.
        """


class ServerData:
    """For methods whose server works with data: it prepares, gives samples to clients, or trains on all of them."""

    def local_data(self, own: Sequence[Tensor], holdout: Tensor, seed: int) -> Sequence[Tensor]:
        """Which samples each client trains on, given its own ones and those that belong to no client."""
        return own

    def prepare(self, state: Any, server: Server) -> Any:
        """Work of the server before the first round, such as a warm-up; not repeated on resume."""
        return state

    def gather(self, cohort: Cohort, data: Sequence[ClientData]) -> tuple[Cohort, Sequence[ClientData]]:
        """Which clients train on what in this round: each on its own data, unless a method brings the data together."""
        return cohort, data


class FixesTraining(ABC):
    """For methods that prescribe some of the optimiser's settings."""

    @abstractmethod
    def adapt(self, training: Training) -> Training:
        """The optimiser settings that the method really uses."""


class StateFromNetwork(ABC):
    """For methods whose state depends on the network at work, such as on the sizes of its layers' inputs."""

    @abstractmethod
    def begin(self, params: Params, num_clients: int, task: Task, x: Tensor) -> Any:
        """The server's state before round 1, in place of `init`; x is an input."""


MIXINS = (
    *(ObservesPath, HasPosterior, HasEnsemble, OwnNetwork, CountsTraffic),
    *(ServerData, FixesTraining, StateFromNetwork),
)
# Hooks of an earlier interface, and what each is now.
RENAMED = {
    "rule": "local_optimiser",
    "trace": "path_statistics, and derive the class from ObservesPath",
    "observes": "path_statistics, which returns None where the path is not observed",
    "advice": "Traits.overshoot_advice, in the property traits",
    **{name: f"Traits.{name}, in the property traits" for name in Traits._fields if name != "overshoot_advice"},
}


def _refuse_lost_hooks(cls: type) -> None:
    """Refuse hooks that would never be called: under an old name, or without the mixin that they belong to."""

    def has(name: str) -> bool:
        hook = getattr(cls, name, None)
        return inspect.isfunction(hook) or isinstance(hook, property)

    for old, new in RENAMED.items():
        if has(old):
            raise UserError(f"{cls.__name__}.{old} is a hook of an earlier interface; its name is now {new}")
    for mixin in MIXINS:
        lost = [name for name in vars(mixin) if not name.startswith("_") and has(name)]
        if lost and not issubclass(cls, mixin):
            bases = ", ".join(base.__name__ for base in (*cls.__bases__, mixin))
            raise UserError(
                f"{cls.__name__}.{lost[0]} is a hook of {mixin.__name__}, from which the class must be derived: write "
                f"class {cls.__name__}({bases})"
            )


def observation(method: Method, context: Context) -> tuple[ObservesPath | None, Any]:
    """The method, if it observes the path with its settings, and the statistics of an empty path."""
    statistics = method.path_statistics(context) if isinstance(method, ObservesPath) else None
    return (method, statistics) if isinstance(method, ObservesPath) and statistics is not None else (None, ())


def adapted(method: Method, training: Training) -> Training:
    """The optimiser settings that the method really uses."""
    return method.adapt(training) if isinstance(method, FixesTraining) else training


def frozen(method: Method, context: Context) -> frozenset[str]:
    """Names of the parameters that stay as they are in this round."""
    return method.frozen(context) if isinstance(method, OwnNetwork) else frozenset()


def traffic(method: Method, message: Any) -> float:
    """How many float32 numbers it takes to send a message: one for each element; a Gaussian knows how it is sent."""
    if isinstance(method, CountsTraffic):
        return method.traffic(message)
    leaves = trees.leaves(message, is_leaf=lambda node: isinstance(node, Gaussian))
    return sum(leaf.numbers_sent() if isinstance(leaf, Gaussian) else count(leaf) for leaf in leaves)


def task_of(method: Method, task: Task) -> Task:
    """The task of the network that the method really trains: the task itself, unless the method has its own network.

    Made once for a task and method; of a task that is the method's already, it is the same again.
    """
    if not isinstance(method, OwnNetwork) or type(method).network is OwnNetwork.network:
        return task

    def network(module: nn.Module) -> nn.Module:
        made = method.network(module)
        if not isinstance(made, nn.Module):
            raise wrong(method, "network", "an nn.Module", type(made).__name__)
        return made

    return task.with_network(method, network)


def with_round_lr(training: Training, round: int) -> Training:
    """The settings of round r."""
    return training.in_round(round)
