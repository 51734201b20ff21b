"""PFNM: probabilistic federated neural matching; hidden units are matched before they are averaged.

    unit l of client j   v_jl = (bias, weights out), in the first hidden layer also its weights in
    precision            1 / sigma; f_jk / sigma for a weight to class k, f_jk being the client's share of its samples
    unit i of the server A_i / P_i = (mu_0 / sigma_0 + sum q_j v_jl) / (1 / sigma_0 + sum q_j)   over units matched to i
    output bias          the same with the precisions f_jk / sigma

How units are matched is written in unit_matching.py. The hidden layers are matched from the top down: weights
out of a layer are put in the order that was found for the layer above it. The server's network is wider than those of
the clients; all train a network with room for more units, of which those not in use are zero
(widened_network.py). In the next round a client starts from the units that its own were matched to.

Yurochkin, Agarwal, Ghosh, Greenewald, Hoang, Khazaeni: Bayesian Nonparametric Federated Learning of Neural Networks,
ICML 2019.

Where the published code (IBM/probabilistic-federated-neural-matching) differs from the paper's objective:
- it has ln(n_i / (J - n_i)) where the objective has twice that, beside 2 ln(gamma / J) for new units;
- its iterative variant starts from the prior's mean where mean times precision is meant, which is the same for
  sigma_0 = 1 only;
- a class that no client has gives 0/0; here all clients have equal shares of it;
- weights to units that a client does not have count as zeros it has observed (`absent`: zero, the default here, too);
- its search over sigma, sigma_0 and gamma goes by the accuracy on the pooled training data, which no server has; tune
  them by `data.validation`.

Clients that do not take part count as if they had sent back what they would have been sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fl_lightning import streams
from fl_lightning.client_state import ClientMemory
from fl_lightning.contrib.unit_matching import (
    BIAS_MEAN,
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
from fl_lightning.params import Params, count, zip_map
from fl_lightning.training import Training


class Row(NamedTuple):
    """What is known of a client: the server's units that it has, layer by layer, and its samples of each class."""

    units: tuple[Tensor, ...]
    counts: Tensor


class State(NamedTuple):
    """The server's network, and the units of each client."""

    params: Params
    clients: ClientMemory[Row]


class Report(NamedTuple):
    """The client's network, and how many samples of each class it has, which the server learns about its data."""

    params: Params
    counts: Tensor


class Part(NamedTuple):
    """A client as it is matched: weights (units, inputs) and biases of its own units, and where they are from."""

    weights: list[Tensor]
    biases: list[Tensor]
    units: tuple[Tensor, ...]
    counts: Tensor
    is_absent: bool


@dataclass(frozen=True)
class Pfnm(Method, OwnNetwork, CountsTraffic):
    """Match the hidden units of the clients' networks, then average those that are the same.

    Attributes:
        sigma: Variance of a client's weights around the server's.
        sigma0: Variance of the server's weights around their prior mean; the smaller, the more they shrink.
        gamma: Controls the number of units: small values force matches, large ones make new units.
        sweeps: How often every client is matched anew, given all others.
        absent: Weights to units that a client does not have: zero counts them as observed zeros, missing leaves them
            out.
        own_init: Whether every client begins with random weights of its own instead of common ones.
        growth: Room for units of the server, as a multiple of a client's; at most 700, unless a client has more.
    """

    display_name: ClassVar[str] = "PFNM"

    sigma: float = 1.0
    sigma0: float = 1.0
    gamma: float = 1.0
    sweeps: int = 3
    absent: Literal["zero", "missing"] = "zero"
    own_init: bool = False
    growth: float = 4.0

    def __post_init__(self) -> None:
        require_settings(self.sigma, self.sigma0, self.gamma, self.sweeps)
        require_growth(self.growth)

    def network(self, module: nn.Module) -> nn.Module:
        return widened(module, self.growth, convolutions=False, method="pfnm")

    def check(self, training: Training, server: Server) -> None:
        require_classes("pfnm", server.task.likelihood)
        check_wide("pfnm", server.task, server.holdout)

    def init(self, params: Params, num_clients: int) -> State:
        output = params[layers_of(params)[-1].bias]
        return State(params, ClientMemory.blank(Row(live_units(params), torch.zeros_like(output))))

    def broadcast(self, state: State, cohort: Cohort) -> Context:
        starts = [restricted(state.params, dict(enumerate(state.clients[n].units))) for n in cohort.members]
        own_init = self.own_init and cohort.round == 1
        return Context(stacked_starts(starts, cohort.members, cohort.server.seed, own_init), own_start=True)

    def report(self, local: Local, context: Context) -> Report:
        labels = local.data.dataset.train_y[local.data.indices]
        return Report(local.params, counted(labels, local.data.dataset.num_classes, local.params))

    def aggregate(self, state: State, cohort: Cohort, reports: Sequence[Report]) -> State:
        new = dict(zip(cohort.members, reports, strict=True))
        ids = sorted({*state.clients.seen, *new})
        rows = {n: state.clients[n] for n in ids}
        rows |= {n: Row(rows[n].units, report.counts) for n, report in new.items()}
        parts = [part_of(new[n].params if n in new else state.params, rows[n], n not in new) for n in ids]
        merged, units = self._merge(state.params, parts, cohort)
        device = merged[next(iter(merged))].device
        places = {
            n: Row(tuple(layer.to(device) for layer in own), rows[n].counts) for n, own in zip(ids, units, strict=True)
        }
        return State(merged, state.clients.replaced(places))

    def _merge(self, like: Params, parts: Sequence[Part], cohort: Cohort) -> tuple[Params, list[tuple[Tensor, ...]]]:
        """The server's network, and for every client the units of each layer that its own were matched to."""
        layers, shares = layers_of(like), class_shares([part.counts for part in parts])
        top, wide = len(layers) - 1, {name: torch.zeros_like(value, device="cpu") for name, value in like.items()}
        if top == 0:  # nothing to match
            for name, values in (
                (layers[0].weight, [p.weights[0] for p in parts]),
                (layers[0].bias, [p.biases[0] for p in parts]),
            ):
                wide[name] = by_class(shares, values).view_as(wide[name]).to(wide[name].dtype)
            return zip_map(lambda new, old: new.to(old.device), wide, like), [() for _ in parts]
        above: list[Tensor] = []  # for each client the units of the layer above
        found: list[list[Tensor]] = []
        for number in reversed(range(top)):
            units, mean = self._vectors(parts, shares, number, above)
            stream = streams.generator(cohort.server.seed, "matching", cohort.round, number)
            matched = match(units, Prior(mean, self.sigma0, self.gamma), self.sweeps, stream)
            inputs = parts[0].weights[0].shape[1] if number == 0 else 0
            check_room("pfnm", len(matched.means), len(wide[layers[number].bias]), number)
            into, bias, out = torch.split(matched.means, [inputs, 1, matched.means.shape[1] - inputs - 1], dim=1)
            here = len(matched.means)
            wide[layers[number].bias][:here] = bias[:, 0]
            wide[layers[number + 1].weight][: out.shape[1], :here] = out.T
            if number == 0:
                wide[layers[0].weight][:here] = into
            above = matched.assignments
            found.insert(0, above)
        wide[layers[-1].bias] = self._output_bias(parts, shares).to(wide[layers[-1].bias].dtype)
        merged = zip_map(lambda new, old: new.to(old.device), wide, like)
        return merged, [tuple(layer[place] for layer in found) for place in range(len(parts))]

    def _vectors(
        self, parts: Sequence[Part], shares: Tensor, number: int, above: Sequence[Tensor]
    ) -> tuple[list[Units], Tensor]:
        """The units of a hidden layer as vectors (weights in, bias, weights out), and the prior's mean of them."""
        certain = 1 / self.sigma
        width = int(torch.cat(list(above)).max()) + 1 if above else shares.shape[1]
        inputs = parts[0].weights[0].shape[1] if number == 0 else 0
        found = []
        for place, part in enumerate(parts):
            bias = part.biases[number]
            precision = torch.full((inputs + 1 + width,), certain, dtype=torch.float64)
            out = part.weights[number + 1].T
            if above:  # in the order of the server's units
                out = bias.new_zeros(len(bias), width).index_copy(1, above[place], out)
                if self.absent == "missing":
                    precision[inputs + 1 :] = torch.zeros(width).double().index_fill(0, above[place], certain)
            else:
                precision[inputs + 1 :] = shares[place] * certain
            into = part.weights[0] if number == 0 else bias.new_zeros(len(bias), 0)
            vectors = torch.cat([into, bias[:, None], out], dim=1)
            found.append(Units(vectors, precision, part.units[number].cpu() if part.is_absent else None))
        mean = torch.zeros(inputs + 1 + width, dtype=torch.float64)
        mean[inputs] = BIAS_MEAN
        return found, mean

    def _output_bias(self, parts: Sequence[Part], shares: Tensor) -> Tensor:
        observed = by_class(shares, [part.biases[-1] for part in parts]) / self.sigma
        precision = shares.sum(0) / self.sigma
        return (BIAS_MEAN / self.sigma0 + observed) / (1 / self.sigma0 + precision)

    def diagnose(
        self, before: State, cohort: Cohort, reports: Sequence[Report], after: State
    ) -> dict[str, float | list[float]]:
        return widths(after.clients[n].units for n in after.clients.seen)

    def traffic(self, message: Any) -> float:
        """Units in use alone."""
        sent, buffers = message
        if isinstance(sent, Context):
            return in_use(sent.start) + count(buffers)
        return in_use(sent.params) + count((sent.counts, buffers))


def part_of(params: Params, row: Row, is_absent: bool) -> Part:
    """A client's own units, out of the wide network."""
    layers, weights, biases = layers_of(params), [], []
    for number, layer in enumerate(layers):
        weight, bias = pairs(params, layers, number)[:, :, 0], params[layer.bias]
        if number < len(layers) - 1:
            weight, bias = weight[row.units[number]], bias[row.units[number]]
        if number > 0:
            weight = weight[:, row.units[number - 1]]
        weights.append(weight.double().cpu())
        biases.append(bias.double().cpu())
    return Part(weights, biases, row.units, row.counts.cpu(), is_absent)
