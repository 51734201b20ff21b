"""What runs have left beside numbers: accuracies along the ridge, precision matrices, partitions."""

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.study import Study
from fl_lightning.data.shares import class_counts
from fl_lightning.errors import UserError
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import divided

# The file of `fl_lightning.metrics.ridge_scan`.
PROBES = "laplace.npz"
# The file of `fl_lightning.runs.final_round`.
TRUST = "uncertainty.npz"


@lru_cache(maxsize=8)
def ridges(study: Study) -> Study:
    """The study with one row for every run, probed round, path (ridge or line) and share pi_1: the accuracy there."""
    rows = []
    for run_id in study.runs["run_id"]:
        arrays = _probed(study, run_id)
        for name, accuracies in arrays.items():
            number, _, path = name.removeprefix("r").partition("_")
            if path in ("ridge", "line"):
                shares = arrays[f"r{number}_share"]
                along = {"share": shares, "accuracy": accuracies}
                rows.append(pd.DataFrame({"run_id": run_id, "round": int(number), "path": path, **along}))
    found = pd.concat(rows) if rows else pd.DataFrame(columns=["run_id", "round", "path", "share", "accuracy"])
    return study.of(study.settings.merge(found, on="run_id", how="inner"))


@lru_cache(maxsize=8)
def trust(study: Study) -> Study:
    """Those runs that ended in a final round, with its curves in the column `arrays`."""
    ended = study.runs.loc[study.runs["ended"], "run_id"]
    found = {run_id: arrays for run_id in ended if (arrays := _probed(study, run_id, TRUST))}
    mine = study.settings.loc[study.runs["run_id"].isin(found)]
    return study.of(mine.assign(arrays=mine["run_id"].map(found)))


def precision_matrix(study: Study) -> tuple[NDArray[Any], str]:
    """A picture of one client's precision and whose it is: the first full one of the last probed round."""
    best: tuple[int, NDArray[Any], str] = (0, np.empty(0), "")
    for _, run in study.runs.iterrows():
        for name, values in _probed(study, run["run_id"]).items():
            number, _, kind = name.removeprefix("r").partition("_")
            if kind == "precision" and (values.ndim, int(number)) > (best[1].ndim if best[1].size else 0, best[0]):
                best = (int(number), values, f"{run['case']}, client 1, round {number}, seed {run['seed']}")
    return best[1], best[2]


def partitions(study: Study, most: int = 6) -> dict[str, NDArray[Any]]:
    """Samples per client and class of the different partitions, made again from the settings.

    Args:
        study: The runs; those whose data are not on this machine are left out.
        most: Not more than so many.
    """
    table = study.runs
    keys = [name for name in map(str, table) if name in ("data", "seed") or name.startswith("data.")]
    varied = [name for name in keys if table[name].nunique(dropna=False) > 1]
    found: dict[str, NDArray[Any]] = {}
    for _, run in table.drop_duplicates("partition").sort_values(varied).iterrows():
        if len(found) < most and (counts := _counts({key: run[key] for key in keys})) is not None:
            title = ", ".join(f"{name.rpartition('.')[2]} {run[name]}" for name in varied) or str(run["data"])
            found[title] = counts
    return found


def _probed(study: Study, run_id: str, name: str = PROBES) -> dict[str, NDArray[Any]]:
    path = study.file(run_id, name)
    if path is None:
        return {}
    with np.load(path, allow_pickle=False) as file:
        return dict(file)


def _counts(settings: Mapping[str, Any]) -> NDArray[Any] | None:
    """Samples per client and class, on which it trains; None if the data are not here."""
    known = {key: value for key, value in settings.items() if value is not None and value == value}
    root = known.get("data.root")
    if root is not None and not Path(str(root)).exists():  # recorded on another machine; perhaps they lie elsewhere
        del known["data.root"]
    try:
        config = configure({key: list(v) if isinstance(v, tuple) else v for key, v in known.items()})
        dataset = config.source.load()
    except (UserError, OSError):
        return None
    counts: NDArray[Any] = class_counts(dataset.strata, divided(config, dataset).clients, dataset.num_strata).numpy()
    return counts
