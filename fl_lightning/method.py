"""The vocabulary of a federated method: what the server sends, what a client shows and reports, and the hooks.

A method is written once, as pure functions; engines turn its client hooks into training. Hooks never write to
`self` or to their inputs, use no global randomness and know nothing of devices, logging or files. One input is the
method's own, the trace, which goes from step to step and is seen by nobody else.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fl_lightning.data.plan import ClientData, Plan
from fl_lightning.gaussian.form import Gaussian
from fl_lightning.params import Params, count, zip_map
from fl_lightning.penalty import Penalty
from fl_lightning.rules.rule import Rule
from fl_lightning.rules.usual import usual
from fl_lightning.task import Task
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
    """Who takes part in a round, and what the server knows about it.

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
        return self._replace(start=start, own=pytree.tree_map_only(Tensor, part, self.own))


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
        trace: What `observe` has folded up.
        num_steps: T_n, optimiser steps taken.
        num_epochs: Epochs taken.
        training: The optimiser settings it used.
        task: Model and likelihood, for methods that look at the data once more.
        data: Its data, for the same.
        plan: Which samples it saw in which step.
        rule_state: What the local rule remembers after the last step, if the rule is the method's own.
    """

    client: int
    params: Params
    buffers: Params
    trace: Any
    num_steps: int
    num_epochs: int
    training: Training
    task: Task
    data: ClientData
    plan: Plan
    rule_state: Any = ()


class OwnPosterior(NamedTuple):
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


class ClientHooks(Protocol):
    """What an engine asks of whoever has clients trained: a method, or several that watch the same training.

    The hooks are explained where `Method` has them.
    """

    def frozen(self, context: Context) -> frozenset[str]: ...

    def penalty(self, context: Context) -> Penalty | None: ...

    def rule(self, training: Training, context: Context) -> Rule: ...

    def trace(self, context: Context) -> Any: ...

    def observe(self, trace: Any, step: Step) -> Any: ...

    @property
    def observes(self) -> bool: ...

    @property
    def needs_squares(self) -> bool: ...

    @property
    def one_by_one(self) -> bool: ...


@dataclass(frozen=True)
class Method(ABC):
    """One federated method. Its fields are its hyperparameters; its hooks stand in the order of a round.

    The client hooks (`frozen`, `penalty`, `rule`, `trace`, `observe`, `report`) are written for one client.

    `version` is part of a run's identity: raise it when the method's numbers change, or a default of its fields does.
    """

    version: ClassVar[int] = 1

    def adapt(self, training: Training) -> Training:
        """The optimiser settings that the method really uses, if it prescribes some of them."""
        return training

    def network(self, module: nn.Module) -> nn.Module:
        """The network that is really trained, made from a copy of the model that the settings name.

        Stochastic in training mode if it likes, through torch's global generator, which engines seed for every client
        and round; deterministic in evaluation mode. Its parameters are what all other hooks see.
        """
        return module

    def check(self, training: Training, server: Server) -> None:  # noqa: B027 - nothing to refuse
        """Raise `UserError` for settings that do not go together, before anything is trained."""

    def local_data(self, own: Sequence[Tensor], holdout: Tensor, seed: int) -> Sequence[Tensor]:
        """Which samples each client trains on, given its own ones and those that belong to no client."""
        return own

    @abstractmethod
    def init(self, params: Params, num_clients: int) -> Any:
        """The server's state before the first round. Later states have the same structure and shapes."""

    def begin(self, params: Params, num_clients: int, task: Task, x: Tensor) -> Any:
        """The same for a method whose state depends on the network itself, at work on an input x."""
        return self.init(params, num_clients)

    def prepare(self, state: Any, server: Server) -> Any:
        """Work of the server before the first round, such as a warm-up; not repeated on resume."""
        return state

    def gather(self, cohort: Cohort, data: Sequence[ClientData]) -> tuple[Cohort, Sequence[ClientData]]:
        """Who trains on what in this round: everybody on their own, unless a method brings the data together."""
        return cohort, data

    def broadcast(self, state: Any, cohort: Cohort) -> Context:
        """What the server sends."""
        return Context(start=state.params)

    def frozen(self, context: Context) -> frozenset[str]:
        """Names of parameters that stay as they are to the bit in this round; the same for every client, never all."""
        return frozenset()

    def penalty(self, context: Context) -> Penalty | None:
        """What is added to the client's loss in this round; `None` is no penalty, exactly."""
        return None

    def rule(self, training: Training, context: Context) -> Rule:
        """How the client uses gradients in this round: the user's optimiser, unless a method brings one of its own.

        Where the learning rate changes within a round, it is asked for every step, with the settings of the step.
        """
        return usual(training)

    def trace(self, context: Context) -> Any:
        """The empty statistics of the local path, in memory of their own."""
        return ()

    def observe(self, trace: Any, step: Step) -> Any:
        """Fold one step into the statistics.

        Nobody looks at the trace of an earlier step, so it may be written into and returned, where clients are trained
        one by one (`step.fraction` is then a float).
        """
        return trace

    @abstractmethod
    def report(self, local: Local, context: Context) -> Any:
        """What the client sends back: a NamedTuple of tensors."""

    @abstractmethod
    def aggregate(self, state: Any, cohort: Cohort, reports: Sequence[Any]) -> Any:
        """The server's state after the round. Reports are in the order of the cohort's members."""

    def diagnose(
        self, before: Any, cohort: Cohort, reports: Sequence[Any], after: Any
    ) -> dict[str, float | list[float]]:
        """Numbers worth logging: one for the round, or a list with one for each member of the cohort."""
        return {}

    def posteriors(self, cohort: Cohort, reports: Sequence[Any]) -> Sequence[Gaussian]:
        """The clients' posteriors as they enter the aggregation, damping included, if the method has any."""
        return ()

    def ensemble(self, state: Any, cohort: Cohort, reports: Sequence[Any]) -> Sequence[Params]:
        """The models whose mean prediction is the method's own ensemble, if it is not that of the clients' models.

        Args:
            state: Of the server before the round.
            cohort: Who took part.
            reports: What they sent.
        """
        return ()

    def posterior(self, state: Any, round: int, training: Training, sizes: Sequence[int]) -> OwnPosterior | None:
        """The server's own posterior, if the method keeps one, for predictions from it.

        Args:
            state: Of the server after a round.
            round: Which.
            training: How clients trained.
            sizes: Numbers of training samples of all clients.
        """
        return None

    def traffic(self, message: Any) -> float:
        """How many float32 numbers it takes to send a message; a bit is 1/32, a Gaussian knows how it is sent.

        Args:
            message: To a client, its context without `own`, or from it, its report; and the model's buffers: a pair.
        """
        leaves = pytree.tree_leaves(message, is_leaf=lambda node: isinstance(node, Gaussian))
        return sum(leaf.numbers_sent() if isinstance(leaf, Gaussian) else count(leaf) for leaf in leaves)

    def advice(self, metrics: Mapping[str, float]) -> str:
        """What the user should hear about the numbers of a round, such as a step that overshoots; mostly nothing."""
        return ""

    @property
    def drops_stragglers(self) -> bool:
        """Whether clients that did not finish their epochs are left out of the round."""
        return False

    @property
    def observes(self) -> bool:
        """Whether the local path matters to the method at all; engines skip the bookkeeping if not."""
        return type(self).observe is not Method.observe

    @property
    def needs_squares(self) -> bool:
        """Whether `observe` reads `Step.squares`, the squared per-sample gradients."""
        return False

    @property
    def one_by_one(self) -> bool:
        """Whether clients cannot be trained several at once, such as when a trace grows with every step."""
        return False

    @property
    def extra_passes(self) -> int:
        """Gradient passes over the client's data beside the training steps, for the count of gradient evaluations."""
        return 0


def task_of(method: Method, task: Task) -> Task:
    """The task of the network that the method really trains: the task itself, unless the method has its own network.

    Made once for a task and method; of a task that is the method's already, it is the same again.
    """
    return task if type(method).network is Method.network else task.with_network(method, method.network)


def with_round_lr(training: Training, round: int) -> Training:
    """The settings of round r."""
    return training.in_round(round)
