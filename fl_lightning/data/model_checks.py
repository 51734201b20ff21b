"""Whether model and data fit: inputs, outputs, and batches of samples that may depend on each other.

All is tried out on a few samples rather than declared, so that they hold for any module a user brings.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl_lightning import streams
from fl_lightning.data.batches import ClientData
from fl_lightning.data.dataset import Dataset
from fl_lightning.errors import UserError, require
from fl_lightning.models.inputs import Inputs, device_of, each, named, number, part
from fl_lightning.models.likelihoods.classification import Plain
from fl_lightning.models.task import Task, Weights
from fl_lightning.params import zip_map
from fl_lightning.training import Training

# Samples on which a model is tried out.
EXAMPLES = 8
# What torch and Python raise where a model and its inputs do not fit.
UNFIT = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError, AssertionError)


def couples_samples(task: Task, data: ClientData) -> bool:
    """Whether in training the output for a sample depends on the others of its batch, as BatchNorm makes it.

    Seen from the output for the first sample, once among the others and once among copies of itself: batches of the
    same shape, so that dropout draws the same masks for both.

    Args:
        task: Model and likelihood.
        data: Whose training set the samples are taken from.
    """
    if task.has_batch_norm:
        return True
    x = _examples(data)
    copies = part(x, torch.zeros(number(x), dtype=torch.long, device=device_of(x)))
    return not torch.allclose(_in_training(task, x)[0], _in_training(task, copies)[0], equal_nan=True)


def loss_is_likelihood(task: Task, data: ClientData) -> bool:
    """Whether the loss is the likelihood of the outputs: always, but for the training step of a LightningModule.

    Args:
        task: Model and likelihood.
        data: Whose training set the samples are taken from.
    """
    if task.step is None:
        return True
    number = min(EXAMPLES, len(data.dataset.train_y))
    x, y = data.fetch(torch.arange(number, device=data.indices.device))
    with task.evaluating(), streams.undisturbed():
        own = task.loss(task.initial, x, y)
        return torch.allclose(own, task.likelihood(task.logits(task.initial, x), y), rtol=1e-4)


def smallest_batch(task: Task, data: ClientData) -> int:
    """The fewest samples that the model can be trained on at once: 2 where BatchNorm would see one value per unit.

    BatchNorm over images has many values in each of them, and takes single ones.

    Args:
        task: Model and likelihood.
        data: Whose training set a sample is taken from.
    """
    if not task.has_batch_norm:
        return 1
    try:
        _in_training(task, part(_examples(data), slice(1)))
    except ValueError:  # "Expected more than 1 value per channel when training"
        return 2
    return 1


def check_batches(training: Training, sizes: Sequence[int], smallest: int) -> None:
    """Refuse settings and clients that leave a model too few samples for a step.

    Args:
        training: The optimiser settings.
        sizes: Numbers of samples that the clients train on.
        smallest: The fewest samples that the model can be trained on at once.
    """
    require(
        training.batch_size is None or training.batch_size >= smallest,
        f"training.batch_size must be at least {smallest} for this model, whose BatchNorm has no variance in a batch "
        f"of one, got {training.batch_size}; raise it, or use a model with GroupNorm or LayerNorm",
    )
    lonely = [client for client, size in enumerate(sizes) if 0 < size < smallest]
    require(
        not lonely,
        f"this model needs clients with at least {smallest} samples, because its BatchNorm has no variance in a batch "
        f"of one, but {_clients(lonely)} a single one; set --data.min_samples {smallest}, use another data.partition, "
        "or a model with GroupNorm or LayerNorm",
    )


def _clients(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:5])) + (" and others" if len(numbers) > 5 else "")
    return f"client {shown} has" if len(numbers) == 1 else f"clients {shown} have"


def _examples(data: ClientData) -> Inputs:
    """The first inputs of the training set, of any client."""
    few = min(EXAMPLES, len(data.dataset.train_y))
    return data.fetch(torch.arange(few, device=data.indices.device))[0]


def _in_training(task: Task, x: Inputs) -> Tensor:
    """The outputs in training mode; BatchNorm's statistics and the random stream stay unchanged."""
    weights = Weights(task.initial.params, zip_map(torch.clone, task.initial.buffers))
    with task.in_mode(True), torch.no_grad(), streams.undisturbed():
        return task.logits(weights, each(torch.clone, x))


def check_fit(task: Task, data: ClientData) -> None:
    """Refuse a model that does not fit, before anything is trained; tried out on one sample in evaluation mode.

    Args:
        task: Model and likelihood.
        data: Whose training set the sample is taken from.
    """
    dataset = data.dataset
    mine, its = task.likelihood, dataset.likelihood
    require(
        mine.task == its.task or (isinstance(mine, Plain) and its.has_classes),
        f"the task's likelihood is {mine.task}, the data need {its.task}; use Task(model, "
        "likelihood=dataset.likelihood)",
    )
    x, y = data.fetch(torch.zeros(1, dtype=torch.long, device=data.indices.device))
    try:
        with task.evaluating(), streams.undisturbed():
            found = tuple(task.logits(task.initial, each(torch.clone, x)).shape)
    except UNFIT as error:
        others = "lstm or transformer" if dataset.num_tokens else "mlp or softmax"
        raise UserError(
            f"the model cannot take {in_words(dataset)} ({reason(error)}); use another, such as --model {others}"
        ) from error
    shape = mine.output_shape(dataset.num_classes, y)
    require(
        shape is None or found == (1, *shape),
        f"the model must give outputs of shape {shape} for a sample of {mine.task}, got {found[1:]}; give its last "
        "layer as many outputs; a model that takes (shape, num_classes) gets the number as num_classes",
    )


def in_words(dataset: Dataset) -> str:
    """What a model is shown."""
    kinds = {torch.uint8: "bytes", torch.long: "tokens"}
    inputs = named(dataset.train_x, "").values()
    return "inputs of " + " and ".join(f"{kinds.get(x.dtype, 'numbers')} of shape {tuple(x.shape[1:])}" for x in inputs)


def reason(error: BaseException) -> str:
    r"""An error of torch or of a user's model in one line.

    >>> reason(ValueError("wrong  shape\nof x"))
    'ValueError: wrong shape of x'
    """
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
