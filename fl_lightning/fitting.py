"""Whether a model fits the data: it takes the inputs, and gives the outputs that the likelihood asks for."""

import torch

from fl_lightning import streams
from fl_lightning.data.dataset import Dataset
from fl_lightning.data.plan import ClientData
from fl_lightning.errors import UserError, require
from fl_lightning.inputs import each, named
from fl_lightning.likelihoods.plain import Plain
from fl_lightning.task import Task

# What torch and Python raise where a model and its inputs do not fit.
UNFIT = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError)


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
        f"the data are of {its.task}, and the likelihood of the task is that of {mine.task}; use Task(model, "
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
        "layer as many outputs, those that it is told as num_classes if it takes (shape, num_classes)",
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
