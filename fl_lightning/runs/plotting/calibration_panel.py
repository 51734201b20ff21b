"""Calibration, drawn: reliability, risk and coverage, entropies in and out of distribution."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from fl_lightning.runs.plotting import palette, strokes
from fl_lightning.runs.plotting.palette import Look

Arrays = Mapping[str, NDArray[Any]]
# Bins with fewer samples than this say little, and are left out of a line.
FEWEST = 5


def kinds_of(arrays: Arrays) -> list[str]:
    """The kinds of prediction that were measured."""
    return [name.partition("/")[0] for name in arrays if name.endswith("/risk")]


def looks_of(kinds: Sequence[str]) -> dict[str, Look]:
    """Colour and marker of every kind of prediction: the same in every picture."""
    return palette.looks(kinds, {})


def reliability(panel: Axes, arrays: Arrays, looks: Mapping[str, Look]) -> None:
    """Accuracy over confidence, bin by bin; below the diagonal a model is overconfident."""
    panel.plot([0, 100], [0, 100], color=palette.current().faint, lw=0.8, linestyle=(0, (1.2, 1.2)))
    for kind, look in looks.items():
        counts = arrays[f"{kind}/samples"]
        known = counts >= FEWEST
        confidence, hits = (100 * arrays[f"{kind}/{name}"][known] / counts[known] for name in ("confidence", "hits"))
        strokes.curve(panel, confidence, hits, look)
    panel.set(xlabel="confidence (%)", ylabel="accuracy (%)", xlim=(0, 100), ylim=(0, 100))


def risk(panel: Axes, arrays: Arrays, looks: Mapping[str, Look]) -> None:
    """The error among the most confident predictions, over their share."""
    for kind, look in looks.items():
        strokes.curve(panel, 100 * arrays["coverage"][1:], 100 * arrays[f"{kind}/risk"][1:], look)
    panel.set(xlabel="coverage (%)", ylabel="risk (error rate, %)", xlim=(0, 100))
    panel.set_ylim(bottom=0)


def entropies(panel: Axes, arrays: Arrays, kind: str, strange: Sequence[str]) -> None:
    """How often each entropy is predicted: for the test set, and for out-of-distribution inputs."""
    edges = arrays["entropy_edges"]
    names = {"test set": f"{kind}/entropy", **{name: f"{kind}/entropy/{name}" for name in strange}}
    colours = [palette.current().ink, *palette.sequence(max(len(strange), 1))]
    for place, (label, key) in enumerate(names.items()):
        counts = arrays[key]
        share = 100 * counts / max(1, counts.sum())
        dash: Any = "solid" if place == 0 else palette.DASHES[(place - 1) % len(palette.DASHES)]
        panel.stairs(share, edges, color=colours[place], linestyle=dash, lw=1.3, label=label)
    panel.set(xlabel=f"predictive entropy ({kind})", ylabel="share of inputs (%)")
    panel.set_xlim(0, float(np.max(edges)))
    panel.legend(fontsize=6, frameon=False, labelcolor=palette.current().ink)
