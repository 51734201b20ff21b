"""A model and its likelihood as pure functions of named parameters."""

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from fl_lightning import streams
from fl_lightning.errors import require
from fl_lightning.models import lora
from fl_lightning.models.inputs import Inputs, arguments, shown
from fl_lightning.models.lightning_module import user_step
from fl_lightning.models.likelihoods.base import Likelihood
from fl_lightning.models.likelihoods.classification import Classification, as_likelihood
from fl_lightning.models.tuning import BATCH_NORMS
from fl_lightning.params import Params, weighted_sum


class Weights(NamedTuple):
    """A whole model: trainable parameters, and buffers such as BatchNorm's statistics, which no method touches."""

    params: Params
    buffers: Params


class Score(NamedTuple):
    """A model on a test set.

    Attributes:
        accuracy: The metric of the task: accuracy, R2, share of tokens that are right.
        nll: Mean negative log-likelihood.
        brier: Brier score, where asked for and where there are classes.
        ece: Expected calibration error, the same.
        others: Further metrics of the task by name, such as RMSE.
    """

    accuracy: float
    nll: float
    brier: float | None = None
    ece: float | None = None
    others: dict[str, float] | None = None


CLASSIFICATION = Classification()


class Task:
    """A model and what its outputs say of the targets: classification, unless another likelihood is given.

    The given module is a workbench: engines load weights into it. Its initial weights are kept as `initial`.

    Args:
        model: Any module that maps a batch of inputs to outputs, such as logits.
        likelihood: One of `fl_lightning.models.likelihoods`; or any function that gives the negative log-likelihood of
            labels given logits, with torch's `reduction` argument: its curvature at the outputs is then not known.
        mixed: The shorter type in which training computes the network (bfloat16 or float16), if it does.
        still: Names of modules that compute in evaluation mode, also in training, because nothing in them or before
            them is trained. Their buffers do not belong to the weights.

    Attributes:
        step: The training of a LightningModule: its `training_step` is then the loss. None of other networks.
    """

    def __init__(
        self,
        model: nn.Module,
        likelihood: Likelihood | Callable[..., Tensor] = CLASSIFICATION,
        mixed: torch.dtype | None = None,
        still: Collection[str] = (),
    ) -> None:
        self.model = model
        self.still = frozenset(still)
        self.likelihood = as_likelihood(likelihood)
        self.mixed = mixed
        self.step = user_step(model)
        self.names = tuple(name for name, p in model.named_parameters() if p.requires_grad)
        self.initial = self.weights()
        self._networks: dict[Hashable, Task] = {}

    @classmethod
    def of(cls, module: nn.Module, **options: Any) -> "Task":
        """The task of a module as it is; a LightningModule is trained by its own `training_step`."""
        return cls(module, **options)

    def with_network(self, owner: Hashable, network: Callable[[nn.Module], nn.Module]) -> "Task":
        """The task whose model is made from this one's, at its initial weights; made once for each owner.

        Args:
            owner: The asking part, such as a method with its settings.
            network: Makes the module that is really trained from a copy of the model; the same every time.
        """
        if owner not in self._networks:
            require(
                self.step is None,
                f"{type(owner).__name__} trains a network of its own, made from the model, which the training_step of "
                "a LightningModule does not know; use a plain nn.Module, or another method",
            )
            plain = Task(deepcopy(self.model), self.likelihood)
            plain.load(self.initial)
            with streams.global_noise(0, "network"):  # a layer that is made draws weights, even unused ones
                module = network(plain.model).to(self.device, self.dtype)
            made = Task(module, self.likelihood, self.mixed)
            made._networks = self._networks  # so that the task of a network is also its own
            self._networks[owner] = made
        return self._networks[owner]

    @property
    def num_params(self) -> int:
        """d, the number of trainable parameters."""
        return sum(value.numel() for value in self.initial.params.values())

    @property
    def has_batch_norm(self) -> bool:
        """Whether there is BatchNorm in the model: in training, samples of a batch then depend on each other."""
        return any(
            isinstance(module, BATCH_NORMS) and name not in self.still for name, module in self.model.named_modules()
        )

    @property
    def dtype(self) -> torch.dtype:
        return next(iter(self.initial.params.values())).dtype

    @property
    def device(self) -> torch.device:
        return next(iter(self.initial.params.values())).device

    def weights(self) -> Weights:
        """A copy of the weights that the workbench holds now."""
        params = {name: p.detach().clone() for name, p in self.model.named_parameters() if p.requires_grad}
        buffers = {name: b for name, b in self.model.named_buffers() if name.rpartition(".")[0] not in self.still}
        return Weights(params, {name: b.detach().clone() for name, b in buffers.items()})

    def load(self, weights: Weights) -> None:
        """Put weights onto the workbench."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in weights.params:
                    parameter.copy_(weights.params[name])
            for name, buffer in self.model.named_buffers():
                if name in weights.buffers:
                    buffer.copy_(weights.buffers[name])

    def merged_buffers(self, before: Params, clients: Sequence[Weights], weights: Sequence[float]) -> Params:
        """The server's buffers after a round: averages like those of models, and what averaged adapters lack."""
        merged = average_buffers([client.buffers for client in clients], weights)
        return merged | lora.residuals(self.model, before, [client.params for client in clients], weights)

    def sent_buffers(self, buffers: Params) -> Params:
        """The buffers that training changes, which clients send."""
        return lora.without_residuals(buffers)

    def train(self, mode: bool = True) -> None:
        """Training mode, or evaluation mode, for all that does not stand still."""
        self.model.train(mode)
        for name in self.still if mode else ():
            self.model.get_submodule(name).training = False

    def outputs(self, x: Inputs) -> Tensor:
        """The output of the model on the workbench, as it stands there."""
        return shown(self.model, x)

    def logits(self, weights: Weights, x: Inputs) -> Tensor:
        """The model's output with these weights; in the mode (training or evaluation) that the workbench is in."""
        output: Tensor = functional_call(self.model, {**weights.params, **weights.buffers}, *arguments(x))
        return output

    def loss(self, weights: Weights, x: Inputs, y: Tensor) -> Tensor:
        """Mean negative log-likelihood of a batch."""
        if self.step is not None:
            return self.step.loss_at({**weights.params, **weights.buffers}, x, y)
        return self.likelihood(self.logits(weights, x), y)

    def gradient(self, weights: Weights, x: Inputs, y: Tensor) -> Params:
        """The gradient of the batch's loss with respect to the parameters."""
        if self.step is not None:
            return self.step.gradient(*weights, x, y)
        found: Params = grad(lambda params: self.loss(Weights(params, weights.buffers), x, y))(weights.params)
        return found

    def batch_loss(self, x: Inputs, y: Tensor, position: int = 0) -> Tensor:
        """The loss of a training batch at the weights on the workbench; `position` is its number in the epoch."""
        with self.autocast():
            if self.step is not None:
                return self.step.loss(x, y, position)
            outputs = self.outputs(x)
        return self.likelihood(outputs.to(self.dtype), y)

    def autocast(self) -> AbstractContextManager[Any]:
        """In which training computes the network: mixed precision, if there is one."""
        if self.mixed is None:
            return nullcontext()
        return torch.autocast(self.device.type, self.mixed, cache_enabled=False)

    def masked_loss(self, weights: Weights, x: Inputs, y: Tensor, mask: Tensor) -> Tensor:
        """Mean over the samples that the mask (1 or 0) keeps; padded batches need it."""
        with self.autocast():
            outputs = self.logits(weights, x)
        losses = self.likelihood(outputs.to(self.dtype), y, reduction="none")
        return (losses * mask).sum() / mask.sum().clamp(min=1)

    @contextmanager
    def in_mode(self, training: bool) -> Iterator[None]:
        """Training mode, or evaluation mode, for this block."""
        was_training = self.model.training
        self.train(training)
        try:
            yield
        finally:
            self.train(was_training)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients, for this block."""
        with self.in_mode(False), torch.no_grad():
            yield


def average_buffers(buffers: Sequence[Params], weights: Sequence[float]) -> Params:
    """BatchNorm's statistics are averaged like models; counters take the largest value."""
    mean = weighted_sum(({k: v for k, v in b.items() if v.is_floating_point()} for b in buffers), weights)
    return {
        name: mean[name].to(value.dtype) if name in mean else torch.stack([other[name] for other in buffers]).amax(0)
        for name, value in buffers[0].items()
    }
