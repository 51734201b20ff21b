"""Forms that know the network's layers: moments of their inputs, of inputs and gradients, or the whole last layer.

Curvature is taken at the end of local training: accumulating factors at every step would nearly double its cost, and
the moments of the first layer's inputs do not depend on the model at all. Earlier rounds count through the factors,
A_n <- A_n / r + ((r - 1) / r) A_S, and the same for G. Parameters that belong to no linear or convolutional layer have
a diagonal precision, the Fisher of all samples at the final model.
"""

import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning import streams
from fl_lightning.curvature import kronecker_factors, last_layer, softmax_hessian
from fl_lightning.curvature.fisher import diagonal_fisher
from fl_lightning.curvature.kronecker_factors import GradientKind
from fl_lightning.curvature.layers import Call, Recording, record
from fl_lightning.errors import require
from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.blocks import Blocks
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.full import Full
from fl_lightning.gaussian.improper import Flat
from fl_lightning.gaussian.input_kronecker import Inputs
from fl_lightning.gaussian.kronecker import Kron
from fl_lightning.method import Local, Server, Traits
from fl_lightning.methods.parts.curvature_form import Form
from fl_lightning.methods.parts.diagonal_form import require_independent_samples
from fl_lightning.models.likelihoods.base import require_curvature
from fl_lightning.models.likelihoods.classification import Classification
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import Params, count, zeros
from fl_lightning.system import memory
from fl_lightning.training import Training

# The block of the parameters that have no layer of their own.
REST = "other parameters"
# Up to so many outputs (classes) all of them are pushed back; beyond, one draw of labels.
MOST_OUTPUTS = 10


class OfInputs(Form):
    """Lambda = I (x) A for every layer: one forward pass, no labels."""

    uses: ClassVar = frozenset({"fisher", "first_layer", "prior", "round_scaling"})
    needs_likelihood: ClassVar = False

    def check(self, name: str, training: Training, server: Server) -> None:
        require_independent_samples(self.measuring.fisher, server)
        x = _example(server)
        empty = self.nothing(server.task.initial.params, server.task, x)
        require(
            any(key != REST for key in empty.blocks),
            f"method.curvature_form {name} needs a linear or convolutional layer with unshared weights, found none; "
            "use --method.curvature_form diagonal",
        )
        require_memory(name, empty, server)

    def nothing(self, params: Params, task: Task | None = None, x: Tensor | None = None) -> Blocks:
        recording = recorded(params, task, x)
        parts: list[tuple[str, Gaussian]] = []
        for position, call in enumerate(recording.calls):
            own = {name: params[name] for name in call.names}
            size = params[call.weight][0].numel() + (call.bias is not None)
            parts.append((call.weight, self._averaged(position, own) or self._empty(own, size)))
        return Blocks.of(params, parts + _rest(params, recording.rest, zeros(params)))

    def measured(self, local: Local, start: Params) -> Blocks:
        params, weights = local.params, Weights(local.params, local.buffers)
        found = kronecker_factors.factors(local.task, weights, local.data, self._gradients(local), _stream(local))
        parts: list[tuple[str, Gaussian]] = []
        for position, (weight, inputs) in enumerate(found.inputs.items()):
            own = _own(params, weight, inputs)
            parts.append((weight, self._averaged(position, own) or self._gaussian(own, weight, found)))
        fisher = _fisher(self, local) if found.rest else {}
        return Blocks.of(params, parts + _rest(params, found.rest, fisher))

    def certain_precision(self, server: Server) -> float:
        calls = recorded(server.task.initial.params, server.task, _example(server)).calls
        averaged = self.measuring.first_layer == "average"
        # Of one sample: the patches of a convolution, the positions of a sequence, else one.
        places = (call.output.numel() // len(call.layer.weight) for call in calls[averaged:] if call.bias is not None)
        return float(max(places, default=0))

    def _averaged(self, position: int, own: Params) -> Gaussian | None:
        return Flat(own) if position == 0 and self.measuring.first_layer == "average" else None

    def _gradients(self, local: Local) -> GradientKind | None:
        return None

    def _empty(self, own: Params, size: int) -> Gaussian:
        return Inputs(own, _zeros(own, size))

    def _gaussian(self, own: Params, weight: str, found: kronecker_factors.Factors) -> Gaussian:
        return Inputs(own, found.inputs[weight].to(own[weight].dtype))

    @property
    def traits(self) -> Traits:
        return Traits()  # no gradients


class OfInputsAndGradients(OfInputs):
    """Lambda = G (x) A for every layer: one forward pass and, for exact gradients, a backward pass for each class."""

    uses: ClassVar = frozenset({"fisher", "first_layer", "prior", "slopes", "solver", "projection", "damping_slopes"})
    needs_likelihood: ClassVar = True

    def check(self, name: str, training: Training, server: Server) -> None:
        if self.measuring.slopes != "empirical":
            require_curvature(server.task.likelihood)
        super().check(name, training, server)

    def certain_precision(self, server: Server) -> float:
        return 0.0

    def _gradients(self, local: Local) -> GradientKind:
        classes, targets = local.data.dataset.num_classes, local.data.dataset.train_y
        outputs = math.prod(local.task.likelihood.output_shape(classes, targets) or (classes,))
        return self.measuring.slopes or ("exact" if outputs <= MOST_OUTPUTS else "sampled")

    def _empty(self, own: Params, size: int) -> Gaussian:
        return Kron(own, _zeros(own, size), _zeros(own, len(next(iter(own.values())))))

    def _gaussian(self, own: Params, weight: str, found: kronecker_factors.Factors) -> Gaussian:
        dtype = own[weight].dtype
        return Kron(own, found.inputs[weight].to(dtype), found.gradients[weight].to(dtype))

    @property
    def traits(self) -> Traits:
        return Traits(extra_passes=1)


class OfLastLayer(Form):
    """The full Gauss-Newton matrix of the last layer, whose outputs are the logits; the rest averaged or diagonal.

    Lambda = (1/m) sum_i (diag P_i - P_i P_i^T) (x) a~_i a~_i^T with the layer's inputs a~ = (a, 1): the exact Hessian.
    Other likelihoods than classification have their own curvature in place of diag P - P P^T.
    """

    uses: ClassVar = frozenset({"fisher", "rest", "prior", "round_scaling"})

    def check(self, name: str, training: Training, server: Server) -> None:
        require_curvature(server.task.likelihood)
        require_independent_samples(self.measuring.fisher, server)
        require_memory(name, self.nothing(server.task.initial.params, server.task, _example(server)), server)

    def nothing(self, params: Params, task: Task | None = None, x: Tensor | None = None) -> Blocks:
        last = _last(recorded(params, task, x))
        own = {name: params[name] for name in last.names}
        size = count(own)
        matrix = params[last.weight].new_zeros(1, 1).expand(size, size)  # takes no memory
        return Blocks.of(params, [(last.weight, Full(own, matrix)), *self._others(params, own, zeros(params))])

    def measured(self, local: Local, start: Params) -> Blocks:
        params = local.params

        def at_work(x: Tensor) -> Call:
            return _last(recorded(params, local.task, x, local.buffers))

        def samples() -> Iterator[tuple[Tensor, Tensor]]:
            for x, y in local.data.blocks():
                last = at_work(x)
                inputs, outputs = last.input, last.output.detach()
                if last.bias is not None:
                    inputs = torch.cat([inputs, torch.ones_like(inputs[..., :1])], dim=-1)
                if by_pairs:
                    yield inputs, softmax_hessian.pair_weights(outputs).div_(len(local.data))
                else:
                    for rows, curvature in last_layer.rows(local.task.likelihood, inputs, outputs, y):
                        yield rows, curvature / len(local.data)

        by_pairs = type(local.task.likelihood) is Classification
        own = {name: params[name] for name in at_work(local.data.fetch(local.data.indices[:1])[0]).names}
        matrix = (softmax_hessian if by_pairs else last_layer).hessian(samples(), own)
        fisher = _fisher(self, local) if self.measuring.rest == "diagonal" else {}
        return Blocks.of(params, [(next(iter(own)), Full(own, matrix)), *self._others(params, own, fisher)])

    def _others(self, params: Params, own: Params, fisher: Params) -> list[tuple[str, Gaussian]]:
        rest = tuple(name for name in params if name not in own)
        if self.measuring.rest == "diagonal":
            return _rest(params, rest, fisher)
        return [(REST, Flat({name: params[name] for name in rest}))] if rest else []


def recorded(params: Params, task: Task | None, x: Tensor | None, buffers: Params | None = None) -> Recording:
    """The network at work in evaluation mode."""
    assert task is not None, "the blocks follow from the network: `begin` has it"
    assert x is not None
    with task.evaluating():
        return record(task, Weights(params, task.initial.buffers if buffers is None else buffers), x)


def require_memory(name: str, empty: Blocks, server: Server) -> None:
    """Refuse factors for which there is not enough memory, naming what they would take."""
    task, clients = server.task, sum(size > 0 for size in server.sizes)
    numbers = count(empty.parts())
    # Every client's report, the server's state before and after, and sums and factors of them in float64.
    needed = numbers * ((clients + 2) * task.dtype.itemsize + 3 * 8)
    what = f"method.curvature_form {name} of {task.num_params:,} parameters for {clients} clients"
    remedy = "use --method.curvature_form diagonal, a model with narrower layers, or fewer clients"
    memory.require_room(what, needed, task.device, remedy)


def _last(recording: Recording) -> Call:
    last = recording.calls[-1] if recording.calls else None
    require(
        last is not None and last.input.dim() == last.output.dim() >= 2 and last.gives(recording.logits),
        "method.curvature_form last_layer needs a network whose last layer is linear and gives the logits; use "
        "--method.curvature_form kron or diagonal",
    )
    assert last is not None
    return last


def _own(params: Params, weight: str, inputs: Tensor) -> Params:
    """The parameters of a layer: its bias is among them if the factor A has a row for it."""
    own = {weight: params[weight]}
    if len(inputs) > params[weight][0].numel():
        bias = weight.removesuffix("weight") + "bias"
        own[bias] = params[bias]
    return own


def _rest(params: Params, names: tuple[str, ...], fisher: Params) -> list[tuple[str, Gaussian]]:
    if not names:
        return []
    return [(REST, Diagonal({name: params[name] for name in names}, {name: fisher[name] for name in names}))]


def _fisher(form: Form, local: Local) -> Params:
    weights, batch_size = Weights(local.params, local.buffers), local.training.batch_size
    return diagonal_fisher(local.task, weights, local.data, form.measuring.fisher, batch_size)


def _stream(local: Local) -> torch.Generator:
    """From which the labels of sampled gradients are drawn."""
    return streams.generator(local.plan.seed, "slopes", local.plan.round, local.client)


def _zeros(own: Params, size: int) -> Tensor:
    return next(iter(own.values())).new_zeros(size, size)


def _example(server: Server) -> Tensor:
    x: Tensor = server.holdout.fetch(torch.zeros(1, dtype=torch.long, device=server.holdout.indices.device))[0]
    return x
