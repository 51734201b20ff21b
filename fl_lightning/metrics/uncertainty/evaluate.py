"""All numbers of a posterior's predictions on a test set and on OOD inputs, and the curves behind figures.

Names: `KIND/NLL`, `KIND/ECE`, ... for every kind of prediction, `KIND/AUROC/NAME` for OOD inputs NAME, which the
entropy of the prediction is to find (`KIND/AUROC_information/NAME` by the disagreement of draws or of an ensemble).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning.data.dataset import Dataset
from fl_lightning.metrics.uncertainty import predictive
from fl_lightning.metrics.uncertainty.calibration import (
    BINS,
    Calibration,
    binned_evenly,
    detection,
    risk_coverage,
    selective,
)
from fl_lightning.metrics.uncertainty.posterior import Posterior
from fl_lightning.models.inputs import Inputs, each, number, split
from fl_lightning.system import activity

# Test samples that are standardised and predicted together.
BLOCK = 1000
COVERAGES = 101
HISTOGRAM = 40

Arrays = dict[str, NDArray[Any]]


class Findings(NamedTuple):
    """What was measured: numbers by name, and curves by name."""

    metrics: dict[str, float]
    arrays: Arrays


class Seen(NamedTuple):
    """Predictions for some inputs, as far as rankings need them.

    Attributes:
        entropy: Of every sample.
        information: Of every sample, or None.
        confidence: The largest probability.
        hits: Whether it is that of the true class; empty without labels.
    """

    entropy: Tensor
    information: Tensor | None
    confidence: Tensor
    hits: Tensor


def measure(posterior: Posterior, dataset: Dataset, kinds: Sequence[str], strange: Mapping[str, Inputs]) -> Findings:
    """Calibration, ranking and detection for every kind of prediction.

    Args:
        posterior: Of the model.
        dataset: Whose test set is looked at, block by block.
        kinds: Of predictions, see `uncertainty.kinds`.
        strange: Out-of-distribution inputs by name, stored as the test set is.
    """
    metrics: dict[str, float] = {}
    arrays: Arrays = {"bins": np.array(BINS), "coverage": np.linspace(0, 1, COVERAGES)}
    sums, seen = _looked_at(posterior, dataset, dataset.test_x, dataset.test_y, kinds)
    outside = {name: _looked_at(posterior, dataset, x, None, kinds)[1] for name, x in strange.items()}
    highest = float(np.log(dataset.num_classes))
    edges = np.linspace(0, highest, HISTOGRAM + 1)
    arrays["entropy_edges"] = edges
    for kind in kinds:
        one = seen[kind]
        found = sums[kind].metrics()
        found["adaptive_ECE"] = float(binned_evenly(one.confidence, one.hits).error())
        found |= selective(one.confidence, one.hits)
        metrics |= {f"{kind}/{name}": value for name, value in found.items()}
        for name, values in sums[kind].top._asdict().items():
            arrays[f"{kind}/{name}"] = values.cpu().numpy()
        risk = risk_coverage(one.confidence, one.hits)
        places = (torch.linspace(0, 1, COVERAGES) * len(risk)).ceil().long().clamp(1, len(risk)) - 1
        arrays[f"{kind}/risk"] = risk.cpu().numpy()[places.numpy()]
        arrays[f"{kind}/entropy"] = _histogram(one.entropy, edges)
        for name, others in outside.items():
            other = others[kind]
            for metric, value in detection(one.entropy, other.entropy).items():
                metrics[f"{kind}/{metric}/{name}"] = value
            arrays[f"{kind}/entropy/{name}"] = _histogram(other.entropy, edges)
            if one.information is not None and other.information is not None:
                by_information = detection(one.information, other.information)["AUROC"]
                metrics[f"{kind}/AUROC_information/{name}"] = by_information
    return Findings(metrics, arrays)


def _looked_at(
    posterior: Posterior, dataset: Dataset, inputs: Inputs, labels: Tensor | None, kinds: Sequence[str]
) -> tuple[dict[str, Calibration], dict[str, Seen]]:
    sums: dict[str, Calibration] = {}
    parts: dict[str, list[Seen]] = {kind: [] for kind in kinds}
    device = posterior.task.device
    total = number(inputs)
    for first, raw in zip(range(0, total, BLOCK), split(inputs, BLOCK), strict=True):
        activity.say(f"predicting, {first} of {total} samples")
        x = dataset.inputs(each(lambda one: one.to(device), raw), posterior.task.dtype)
        found = predictive.predict(posterior, x, kinds)
        y = None if labels is None else labels[first : first + BLOCK].to(device)
        for kind, prediction in found.items():
            confidence, guess = prediction.probabilities.max(1)
            hits = torch.empty(0) if y is None else guess == y
            parts[kind].append(Seen(prediction.entropy, prediction.information, confidence, hits))
            if y is not None:
                block = Calibration.of(prediction.log_probabilities, y, by_class=True)
                sums[kind] = sums[kind].plus(block) if kind in sums else block
    return sums, {kind: _joined(several) for kind, several in parts.items()}


def _joined(parts: Sequence[Seen]) -> Seen:
    columns = [None if values[0] is None else torch.cat(values) for values in zip(*parts, strict=True)]
    return Seen(*columns)  # type: ignore[arg-type]


def _histogram(values: Tensor, edges: NDArray[Any]) -> NDArray[Any]:
    inside = values.cpu().numpy().clip(edges[0], edges[-1])
    return np.histogram(inside, edges)[0]
