"""Calibration of predictions: reliability, risk and coverage, entropies in and out of distribution.

Every row of panels is one alpha, every column one data set; seeds are pooled, as one larger test set. The prediction is
that from the posterior (probit), or where there is none that of the mean.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.layout_engine import ConstrainedLayoutEngine
from numpy.typing import NDArray

from analysis import comparisons, style
from analysis.study import Study
from analysis.style import Picture
from fl_lightning.runs.plotting import calibration_panel
from fl_lightning.runs.plotting.palette import Look

Arrays = dict[str, NDArray[Any]]
PREFERRED = ("probit", "glm_mc", "nn", "ensemble", "map")
MOST_PANELS = 3
# Conditions that have panels of their own.
SHOWN = ("data", "data.alpha")


def reliability(study: Study) -> Picture:
    """Accuracy over confidence; below the diagonal predictions are overconfident, above it they are underconfident."""
    return _by_alpha(study, lambda panel, pooled, looks: calibration_panel.reliability(panel, pooled, looks))


def risk_coverage(study: Study) -> Picture:
    """The error among the most confident predictions: the lower, the better confidence tells hits from errors."""
    return _by_alpha(study, lambda panel, pooled, looks: calibration_panel.risk(panel, pooled, looks))


def entropies(study: Study) -> Picture:
    """A calibrated model predicts large entropies for out-of-distribution inputs."""
    if problem := _lacking(study.runs):
        return style.empty(problem, study)
    study, remarks = comparisons.largest(study, SHOWN)
    curves = study.runs
    cases = list(dict.fromkeys(curves["case"]))
    case = next((name for name in cases if "FOLA" in name and "kron" in name), cases[0])
    mine = curves.loc[curves["case"].eq(case)]
    scenes = _scenes(mine)
    figure, panels = style.picture(len(scenes), height=1.9, across=mine["data"].nunique())
    for panel, (title, chosen) in zip(panels, scenes, strict=True):
        rows = mine.loc[chosen]
        kind = _kind(rows["arrays"].iloc[0])
        pooled = _pooled(list(rows["arrays"]))
        strange = [name.split("/")[2] for name in pooled if name.startswith(f"{kind}/entropy/")]
        calibration_panel.entropies(panel, pooled, kind, strange)
        panel.set_title(f"{case}, {title}", fontsize=8)
    return _finish(figure, study.of(mine), remarks)


def _by_alpha(study: Study, draw: Callable[[Axes, Arrays, Mapping[str, Look]], None]) -> Picture:
    if problem := _lacking(study.runs):
        return style.empty(problem, study)
    study, remarks = comparisons.largest(study, SHOWN)
    curves = study.runs
    looks = style.looks_of(curves)
    scenes = _scenes(curves)
    figure, panels = style.picture(len(scenes), height=2.1, across=curves["data"].nunique())
    for panel, (title, chosen) in zip(panels, scenes, strict=True):
        pooled: Arrays = {}
        for case in looks:
            rows = curves.loc[chosen & curves["case"].eq(case)]
            if len(rows):
                found = _pooled(list(rows["arrays"]))
                kind = _kind(found)
                own = {name: values for name, values in found.items() if name.startswith(f"{kind}/")}
                pooled |= {f"{case}/{name.removeprefix(f'{kind}/')}": values for name, values in own.items()}
                pooled["coverage"] = found["coverage"]
        present = {case: look for case, look in looks.items() if f"{case}/risk" in pooled}
        draw(panel, pooled, present)
        panel.set_title(title, fontsize=8)
    style.legend(figure, style.case_entries(looks))
    return _finish(figure, study, remarks)


def _finish(figure: Picture, study: Study, remarks: Sequence[str]) -> Picture:
    curves = study.runs
    kinds = sorted({_kind(arrays) for arrays in curves["arrays"]})
    seeds = curves["seed"].nunique()
    style.headline(figure, f"prediction: {', '.join(kinds)}; {seeds} seed{'s' * (seeds != 1)} pooled; 15 bins")
    if isinstance(layout := figure.get_layout_engine(), ConstrainedLayoutEngine):
        layout.set(h_pad=0.08)  # the title of a panel stands apart from the label of the one above
    figure.remarks = [*study.remarks, *remarks]
    figure.run_ids = list(dict.fromkeys(curves["run_id"]))
    return figure


def _pooled(several: Sequence[Arrays]) -> Arrays:
    """Counts add up; risks and edges are averaged, over test sets of one size."""
    kinds = set.intersection(*(set(arrays) for arrays in several))
    mean = ("risk", "coverage", "entropy_edges", "bins")
    return {
        name: np.mean([arrays[name] for arrays in several], axis=0)
        if name.rpartition("/")[2] in mean
        else np.sum([arrays[name] for arrays in several], axis=0)
        for name in several[0]
        if name in kinds
    }


def _kind(arrays: Mapping[str, Any]) -> str:
    known = calibration_panel.kinds_of(arrays)
    return next(kind for kind in PREFERRED if kind in known)


def _scenes(curves: pd.DataFrame) -> list[tuple[str, "pd.Series[bool]"]]:
    """The panels, row by row: their titles, and which runs they show."""
    names = list(dict.fromkeys(curves["data"]))
    found = []
    for alpha in _alphas(curves):
        for name in names:
            chosen = curves["data"].eq(name) & curves["data.alpha"].eq(alpha)
            title = f"{name}, α = {comparisons.shown(alpha)}" if len(names) > 1 else f"α = {comparisons.shown(alpha)}"
            found += [(title, chosen)] if chosen.any() else []
    return found


def _alphas(curves: pd.DataFrame) -> list[Any]:
    """The smallest, the largest, and one between them."""
    known = sorted(curves["data.alpha"].unique())
    if len(known) <= MOST_PANELS:
        return known
    return [known[0], known[len(known) // 2], known[-1]]


def _lacking(curves: pd.DataFrame) -> str:
    return "" if len(curves) else "no run has had a final round (uncertainty.final_round)"
