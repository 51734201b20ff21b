"""FedMA: federated matched averaging; one layer per round is matched, averaged and frozen, the layers above retrain.

    A_i <- mu_0 / sigma_0 + sum_n v_n / sigma     v_n: weights in and bias of the clients' units that are matched to i
    P_i <- 1 / sigma_0 + n_i / sigma              n_i: how many they are
    w_i <- A_i / P_i                              the unit i of the server's layer l

In the round of layer l, clients train the layers l, l + 1, ... while those below are frozen; then the units of layer l
are matched, and every client's layer l + 1 gets its inputs in the order of the server's units, zeros where it has none.
With the last hidden layer comes the output: the clients' mean, the row of each class weighted by their shares of it. In
the next cycle every client starts from the server's units that its own were matched to.

A unit of a convolution is a filter. How units are matched is written in unit_matching.py, how networks grow without
changing shapes in widened_network.py. A cycle takes as many rounds as there are hidden layers; in between, layers that
are not matched yet are averaged as they are, for measuring alone.

Wang, Yurochkin, Sun, Papailiopoulos, Khazaeni: Federated Learning with Matched Averaging, ICLR 2020.

Where the published code (IBM/FedMA) differs:
- from the second layer on, it puts the prior mean 0.1 of the bias on the first weight;
- its branch for one hidden layer uses an undefined variable; its communication works for one model only, because the
  index of the first linear layer is written into the code; a gamma that is set there is not used;
- its baselines FedAvg and FedProx start from the mean of independently initialised networks. Here all methods start
  from common weights, this one, too, unless `own_init`;
- it retrains the last layer by settings of its own; here all rounds have those of `training`.

Clients that do not take part are matched with the network they had.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning import streams
from fl_lightning.client_state import ClientMemory
from fl_lightning.contrib.unit_matching import (
    BIAS_MEAN,
    Matching,
    Prior,
    Units,
    by_class,
    class_shares,
    counted,
    match,
    require_settings,
)
from fl_lightning.contrib.widened_network import (
    check_room,
    check_wide,
    in_use,
    layer_in_use,
    layers_of,
    live_units,
    pairs,
    require_growth,
    restricted,
    stacked_starts,
    widened,
    widths,
)
from fl_lightning.method import Cohort, Context, CountsTraffic, Local, Method, OwnNetwork, Server
from fl_lightning.models.likelihoods.base import require_classes
from fl_lightning.params import Params, cast_like, count, weighted_sum
from fl_lightning.training import Training


class Row(NamedTuple):
    """A client: the network it starts from, its units among the server's, its samples of each class.

    And how many layers were merged since it was sent any.
    """

    params: Params
    units: tuple[Tensor, ...]
    counts: Tensor
    behind: Tensor


class State(NamedTuple):
    """The server's network, the number of the hidden layer that is matched next, from 0, and the clients."""

    params: Params
    layer: int
    clients: ClientMemory[Row]


class Shared(NamedTuple):
    """The layer that is matched in this round, and how many numbers a member is sent, in the mean."""

    layer: int
    numbers: float


class Report(NamedTuple):
    """The client's network, its samples of each class, and how many numbers of the network the server needs."""

    params: Params
    counts: Tensor
    numbers: int


@dataclass(frozen=True)
class FedMa(Method, OwnNetwork, CountsTraffic):
    """Match and average hidden units and filters layer by layer, one layer per round, and retrain the layers above.

    Attributes:
        sigma: Variance of a client's weights around the server's.
        sigma0: Variance of the server's weights around their prior mean; the smaller, the more they shrink.
        gamma: Controls the number of units: small values force matches, large ones make new units.
        sweeps: How often every client is matched anew, given all others.
        own_init: Whether every client begins with random weights of its own instead of common ones.
        growth: Room for units of the server, as a multiple of a client's; at most 700, unless a client has more.
    """

    display_name: ClassVar[str] = "FedMA"
    version: ClassVar[int] = 2

    sigma: float = 1.0
    sigma0: float = 1.0
    gamma: float = 7.0
    sweeps: int = 5
    own_init: bool = False
    growth: float = 4.0

    def __post_init__(self) -> None:
        require_settings(self.sigma, self.sigma0, self.gamma, self.sweeps)
        require_growth(self.growth)

    def network(self, module: nn.Module) -> nn.Module:
        return widened(module, self.growth, convolutions=True, method="fedma")

    def check(self, training: Training, server: Server) -> None:
        require_classes("fedma", server.task.likelihood)
        check_wide("fedma", server.task, server.holdout)

    def init(self, params: Params, num_clients: int) -> State:
        output = params[layers_of(params)[-1].bias]
        blank = Row(params, live_units(params), torch.zeros_like(output), output.new_zeros((), dtype=torch.long))
        return State(params, 0, ClientMemory.blank(blank))

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        starts = [self._start(state, n) for n in cohort.members]
        numbers = [self._numbers(state, n, start) for n, start in zip(cohort.members, starts, strict=True)]
        own_init = self.own_init and cohort.round == 1
        shared = Shared(state.layer, sum(numbers) / len(numbers))
        return Context(stacked_starts(starts, cohort.members, cohort.server.seed, own_init), shared, own_start=True)

    def _start(self, state: State, client: int) -> Params:
        if client in state.clients:
            return state.clients[client].params
        units = dict(enumerate(state.clients.default.units))  # clients that join later have the most popular units
        return restricted(state.params, {number: own for number, own in units.items() if number >= state.layer})

    def _numbers(self, state: State, client: int, start: Params) -> int:
        """What a client is sent: the layers that were merged since its last round, and its units; at first, a model."""
        if client not in state.clients:
            return in_use(start)
        last = len(layers_of(start)) - 1
        row = state.clients[client]
        merged = {(state.layer - back) % max(last, 1) for back in range(1, int(row.behind) + 1)}
        if last - 1 in merged:  # with it came the output
            merged.add(last)
        own = sum(len(row.units[number]) for number in merged if number < last)
        return sum(layer_in_use(state.params, number) for number in merged) + own

    def frozen(self, context: Context) -> frozenset[str]:
        shared: Shared = context.shared
        return frozenset(name for layer in layers_of(context.start)[: shared.layer] for name in layer)

    def report(self, local: Local, context: Context) -> Report:
        shared: Shared = context.shared
        labels = local.data.dataset.train_y[local.data.indices]
        last = len(layers_of(local.params)) - 1
        needed = {shared.layer, last} if shared.layer >= last - 1 else {shared.layer}
        numbers = sum(layer_in_use(local.params, number) for number in needed)
        return Report(local.params, counted(labels, local.data.dataset.num_classes, local.params), numbers)

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        old, none = state.clients, torch.zeros_like(state.clients.default.behind)
        new = {n: Row(r.params, old[n].units, r.counts, none) for n, r in zip(cohort.members, reports, strict=True)}
        rows = {n: new.get(n, old[n]) for n in sorted({*old.seen, *new})}
        rows = {n: row._replace(behind=row.behind + 1) for n, row in rows.items()}
        hidden = len(layers_of(state.params)) - 1
        if hidden > 0:
            matched = self._match(list(rows.values()), state.layer, cohort)
            check_room(
                "fedma", len(matched.means), len(state.params[layers_of(state.params)[state.layer].bias]), state.layer
            )
            assigned = zip(rows.items(), matched.assignments, strict=True)
            rows = {n: merged(row, state.layer, matched.means, units) for (n, row), units in assigned}
        params = self._average(state.params, list(rows.values()))
        layer = state.layer + 1
        if layer >= hidden:  # the cycle ends: all layers are merged
            layer = 0
            rows = {n: row._replace(params=restricted(params, dict(enumerate(row.units)))) for n, row in rows.items()}
        return State(params, layer, state.clients.replaced(rows))

    def _match(self, rows: Sequence[Row], number: int, cohort: Cohort) -> Matching:
        clients = []
        for row in rows:
            layers = layers_of(row.params)
            units = row.units[number]
            weight, bias = pairs(row.params, layers, number)[units].flatten(1), row.params[layers[number].bias][units]
            vectors = torch.cat([weight, bias[:, None]], dim=1).double().cpu()
            clients.append(Units(vectors, torch.full((vectors.shape[1],), 1 / self.sigma, dtype=torch.float64)))
        mean = torch.zeros(clients[0].vectors.shape[1], dtype=torch.float64)
        mean[-1] = BIAS_MEAN
        stream = streams.generator(cohort.server.seed, "matching", cohort.round, number)
        return match(clients, Prior(mean, self.sigma0, self.gamma), self.sweeps, stream)

    def _average(self, like: Params, rows: Sequence[Row]) -> Params:
        """The mean of the clients' networks, which have merged layers in common; of the output by class."""
        output, shares = layers_of(like)[-1], class_shares([row.counts.cpu() for row in rows])
        samples = [float(row.counts.sum()) for row in rows]
        mean = weighted_sum((row.params for row in rows), [number / sum(samples) for number in samples])
        for name in output:
            mean[name] = by_class(shares.to(like[name].device), [row.params[name] for row in rows])
        return cast_like({name: mean[name] for name in like}, like)

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        units = widths(after.clients[n].units for n in after.clients.seen)
        return {"matched_layer": float(before.layer + 1), **units}

    def traffic(self, message: Any) -> float:
        """The layer that is matched alone, up before it is and down after it was."""
        sent, buffers = message
        if isinstance(sent, Context):
            shared: Shared = sent.shared
            return shared.numbers + count(buffers)
        return int(sent.numbers) + count((sent.counts, buffers))


def merged(row: Row, number: int, means: Tensor, units: Tensor) -> Row:
    """The client with the server's layer, and its next layer with the inputs in the order of the server's units."""
    layers, params = layers_of(row.params), dict(row.params)
    layer, following = layers[number], layers[number + 1]
    weight, bias = torch.zeros_like(params[layer.weight]), torch.zeros_like(params[layer.bias])
    weight[: len(means)] = means[:, :-1].to(weight).view(len(means), *weight.shape[1:])
    bias[: len(means)] = means[:, -1].to(bias)
    above, units = pairs(row.params, layers, number + 1), units.to(bias.device)
    moved = torch.zeros_like(above)
    moved[:, units] = above[:, row.units[number]]
    params |= {layer.weight: weight, layer.bias: bias, following.weight: moved.reshape(params[following.weight].shape)}
    own = (*row.units[:number], units, *row.units[number + 1 :])
    return row._replace(params=params, units=own)
