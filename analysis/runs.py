"""Runs as tidy tables: one row per run, or one per run and round, with the dotted settings as columns.

    from analysis import runs
    table = runs.load("runs", study="demo")                     # final GA, LA, ... of every run
    table = runs.load("runs", where={"data.alpha": 0.01, "method": ["fola", "fedavg"]})
    curves = runs.rounds("runs", study="demo")                  # GA, LA, ... of every round

Columns of both: every setting by its dotted key, with its type (`data.alpha` is a number); `case`, what the run is
called in figures; `method`, `data`, `model`, `seed`, `partition` (equal for equal splits), `status`, `run_id`.
The metrics of `load` are those of the last round; `best_GA` is the largest of all rounds, `rounds` their number.

`status` is finished, diverged, stopped (before its last round), running, or failed. `ended` says whether the run's
last number is a result: it finished, or its study's own rule had seen enough. Runs that diverged are kept: what they
measured before stays in the table.
"""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml
from numpy.typing import NDArray

from analysis.store import Content, Store, open_store
from fl_lightning import discovery
from fl_lightning.config import fields_of
from fl_lightning.errors import UserError, unknown

Place = str | Path | None
# Settings that are strings or switches make another variant of a method; numbers are tuned.
KEY_COLUMNS = ("run_id", "case", "method", "data", "model", "seed", "partition", "status", "ended", "diverged")
EXAMPLES = ("data.alpha", "training.lr", "method.strength", "seed", "GA", "LA")
STUDY_PREFIX = "study."
# The file of `fl_lightning.ridge_probe`.
PROBES = "laplace.npz"
# How methods are written in papers.
DISPLAY = {
    "centralised": "centralised",
    "data_sharing": "data sharing",
    "fedavg": "FedAvg",
    "fedbe": "FedBE",
    "fedcurv": "FedCurv",
    "fednova": "FedNova",
    "fedpa": "FedPA",
    "fedprox": "FedProx",
    "fedsgd": "FedSGD",
    "fola": "FOLA",
    "scaffold": "SCAFFOLD",
}


class NoRuns(UserError):  # noqa: N818 - reads as what it says
    """The store is fine, but holds no run of that kind."""


class Sweep(NamedTuple):
    """A sweep that has left its parent run.

    Attributes:
        study: Its name.
        scale: At which scale.
        run_id: Of the parent run.
        content: The study as it was swept; empty while unknown.
        cases: What its runs are called, by run id; empty until it has ended.
    """

    study: str
    scale: str
    run_id: str
    content: Mapping[str, Any]
    cases: Mapping[str, str]


def load(
    store: Place = None,
    study: str | None = None,
    where: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    scale: str | None = None,
    absent: str = "error",
) -> pd.DataFrame:
    """One row per run.

    Args:
        store: Folder of runs, database file or MLflow URI; without it MLFLOW_TRACKING_URI, else the folder `runs`.
        study: Only runs of this study.
        where: Only runs with these values of columns; a list allows several.
        tags: Only runs with these MLflow tags.
        scale: Of the study; needed if the store has several of it.
        absent: What to do if no run is left: `error`, or `empty` for an empty table whose remarks say why.

    Raises:
        UserError: If the store, the study or a column does not exist.
    """
    return Runs(store).load(study, where, tags, scale, absent)


def rounds(
    store: Place = None,
    study: str | None = None,
    where: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    scale: str | None = None,
    absent: str = "error",
    metrics: Collection[str] | None = None,
) -> pd.DataFrame:
    """One row per run and round; arguments as for `load`, and `metrics` to read only some of them."""
    opened = Runs(store)
    return opened.rounds(opened.load(study, where, tags, scale, absent), metrics)


@dataclass(frozen=True)
class Runs:
    """All runs of a store; it is read once.

    Attributes:
        place: Folder of runs, database file or MLflow URI.
    """

    place: Place = None

    @cached_property
    def store(self) -> Store:
        """Where the runs are."""
        return open_store(self.place)

    @cached_property
    def _content(self) -> Content:
        return self.store.content()

    @cached_property
    def _tags(self) -> pd.DataFrame:
        return _pivot(self._content.tags)

    @cached_property
    def table(self) -> pd.DataFrame:
        """All runs, the oldest first."""
        content = self._content
        # Sweeps have params and metrics of their own; runs without a method have only just begun.
        begun = set(content.params.loc[content.params["key"].eq("method"), "run_id"])
        frame = content.runs.loc[content.runs["run_id"].isin(begun)].set_index("run_id").sort_values("start")
        settings = _typed(_pivot(content.params, begun).reindex(frame.index))
        metrics = _pivot(content.latest, begun).reindex(frame.index)
        tags = self._tags.reindex(frame.index)
        reached = content.latest.loc[content.latest["key"].eq("GA")].set_index("run_id")["round"]
        frame["rounds"] = reached.reindex(frame.index).fillna(0).astype(int)
        frame["best_GA"] = content.best.set_index("run_id")["value"].reindex(frame.index).astype(float)
        for name in ("partition", "identity", "diverged", "case", "study"):
            frame[name] = tags.get(name)
        frame["status"] = _status(frame.pop("state"), tags.get("status"))
        for name in ("GA", "LA"):
            if name not in metrics:
                metrics[name] = float("nan")
        for name in ("method", "seed"):
            if name not in settings:  # nobody has begun
                settings[name] = None
        frame = pd.concat([frame, metrics.astype(float), settings], axis=1)
        frame["ended"] = frame["status"].eq("finished")
        frame["start"] = pd.to_datetime(frame["start"], unit="ms")
        frame["end"] = pd.to_datetime(frame["end"], unit="ms")
        frame = frame.reset_index()
        frame["case"] = _cases(frame)
        first = [name for name in KEY_COLUMNS if name in frame]
        return frame[[*first, *(name for name in frame if name not in first)]]

    @cached_property
    def sweeps(self) -> list[Sweep]:
        """Every sweep of the store, the oldest first."""
        tags = self._tags
        if "kind" not in tags:
            return []
        started = self._content.runs.set_index("run_id")["start"]
        found = tags.loc[tags["kind"].eq("sweep")]
        return [self._sweep(str(run_id)) for run_id in started.reindex(found.index).sort_values().index]

    @cached_property
    def studies(self) -> dict[str, list[str]]:
        """The studies of the store and their scales; runs without a study do not count."""
        found: dict[str, list[str]] = {}
        for key, values in self._tags.items():
            if str(key).startswith(STUDY_PREFIX):
                found[str(key).removeprefix(STUDY_PREFIX)] = sorted(values.dropna().unique())
        return dict(sorted(found.items()))

    def sweep(self, study: str, scale: str) -> Sweep | None:
        """What is known of a study that has runs here; the latest, if it was swept in several forms."""
        return next((s for s in reversed(self.sweeps) if (s.study, s.scale) == (study, scale)), None)

    def load(
        self,
        study: str | None = None,
        where: Mapping[str, Any] | None = None,
        tags: Mapping[str, str] | None = None,
        scale: str | None = None,
        absent: str = "error",
    ) -> pd.DataFrame:
        """One row per run; see `load`. Of runs repeated with --fresh the newest stays, and the attribute
        `attrs["remarks"]` of the table says what else a reader should know.
        """
        table, remarks = self.table, []
        try:
            if not len(table):
                raise NoRuns(f"{self.store.place} holds no runs yet; make some with `fl-lightning demo`")
            if study is not None:
                table = self._of_study(table, study, scale)
            for name, value in (tags or {}).items():
                if name not in self._tags:
                    raise _no_such("tag", name, self._tags)
                carrying = self._tags.index[self._tags[name].eq(str(value))]
                table = table.loc[table["run_id"].isin(carrying)]
            for column, value in (where or {}).items():
                table = _narrow(table, column, value)
            if not len(table):
                raise NoRuns(_nothing_left(study, where, tags))
        except NoRuns as reason:
            if absent != "empty":
                raise
            nothing = self.table.iloc[:0].assign(scale=None)
            nothing.attrs["remarks"] = [str(reason)]
            return nothing
        repeated = table["identity"].notna() & table.sort_values(["ended", "start"]).duplicated("identity", keep="last")
        if repeated.any():
            remarks.append(f"{repeated.sum()} runs were repeated with --fresh; only the newest of each counts")
        table = table.loc[~repeated].reset_index(drop=True)
        remarks += _unfinished(table)
        table.attrs["remarks"] = remarks
        if study is not None and (sweep := self.sweep(study, str(table["scale"].iloc[0]))):
            table.attrs["conditions"] = list(sweep.content.get("environments") or ())
        return table

    def rounds(self, table: pd.DataFrame, metrics: Collection[str] | None = None) -> pd.DataFrame:
        """One row for every round of the runs of a table, with all their settings."""
        settings = table[[name for name in table if name not in self._metric_names and name not in ("rounds",)]]
        if not len(table):
            nothing = settings.assign(round=pd.Series(dtype=int), GA=pd.Series(dtype=float), LA=pd.Series(dtype=float))
            nothing.attrs.update(table.attrs)
            return nothing
        long = self.store.history(list(table["run_id"]), metrics)
        # A round that was computed again after a kill may have other seconds: the later ones count.
        wide = long.drop_duplicates(["run_id", "round", "key"], keep="last").pivot(
            index=["run_id", "round"], columns="key", values="value"
        )
        wide = wide.rename_axis(columns=None).reset_index().sort_values(["run_id", "round"])
        merged = settings.merge(wide, on="run_id", how="inner", validate="one_to_many")
        merged.attrs.update(table.attrs)
        return merged

    def artifact(self, run_id: str, name: str) -> Path | None:
        """A file that a run has left, on this machine; None if there is none."""
        return self.store.artifact(run_id, name)

    def ridges(self, table: pd.DataFrame) -> pd.DataFrame:
        """One row for every run, probed round, path (ridge or line) and share pi_1: the accuracy there."""
        rows = []
        for run_id in table["run_id"]:
            arrays = self._probed(run_id)
            for name, accuracies in arrays.items():
                number, _, path = name.removeprefix("r").partition("_")
                if path in ("ridge", "line"):
                    shares = arrays[f"r{number}_share"]
                    rows.append(
                        pd.DataFrame(
                            {
                                "run_id": run_id,
                                "round": int(number),
                                "path": path,
                                "share": shares,
                                "accuracy": accuracies,
                            }
                        )
                    )
        found = pd.concat(rows) if rows else pd.DataFrame(columns=["run_id", "round", "path", "share", "accuracy"])
        settings = table[[name for name in table if name not in self._metric_names and name not in ("rounds",)]]
        merged = settings.merge(found, on="run_id", how="inner")
        merged.attrs.update(table.attrs)
        return merged

    def precision_matrix(self, table: pd.DataFrame) -> tuple[NDArray[Any], str]:
        """A picture of one client's precision and whose it is: the first full one of the last probed round."""
        best: tuple[int, NDArray[Any], str] = (0, np.empty(0), "")
        for _, run in table.iterrows():
            for name, values in self._probed(run["run_id"]).items():
                number, _, kind = name.removeprefix("r").partition("_")
                if kind == "precision" and (values.ndim, int(number)) > (best[1].ndim if best[1].size else 0, best[0]):
                    best = (int(number), values, f"{run['case']}, client 1, round {number}, seed {run['seed']}")
        return best[1], best[2]

    def partitions(self, table: pd.DataFrame, most: int = 6) -> dict[str, NDArray[Any]]:
        """Samples per client and class of the different partitions, made again from the settings.

        Args:
            table: Runs; those whose data are not on this machine are left out.
            most: Not more than so many.
        """
        keys = [name for name in map(str, table) if name in ("data", "seed") or name.startswith("data.")]
        varied = [name for name in keys if table[name].nunique(dropna=False) > 1]
        found: dict[str, NDArray[Any]] = {}
        for _, run in table.drop_duplicates("partition").sort_values(varied).iterrows():
            if len(found) < most and (counts := _counts({key: run[key] for key in keys})) is not None:
                title = ", ".join(f"{name.rpartition('.')[2]} {run[name]}" for name in varied) or str(run["data"])
                found[title] = counts
        return found

    def _probed(self, run_id: str) -> dict[str, NDArray[Any]]:
        path = self.artifact(run_id, PROBES)
        if path is None:
            return {}
        with np.load(path, allow_pickle=False) as file:
            return dict(file)

    @cached_property
    def _metric_names(self) -> set[str]:
        return {*map(str, self._content.latest["key"].unique()), "best_GA", "GA", "LA"}

    def _of_study(self, table: pd.DataFrame, study: str, scale: str | None) -> pd.DataFrame:
        if study not in self.studies:
            from tune.study import names

            if study in names():
                raise NoRuns(
                    f"{self.store.place} holds no runs of the study {study}; make them with "
                    f"`fl-lightning sweep {study} --scale small`"
                )
            error = unknown("study", study, self.studies or names())
            # A name like no other is no slip of the pen, but a study that was never swept here.
            raise error if "did you mean" in str(error) else NoRuns(str(error))
        scales = self.studies[study]
        if scale is None and len(scales) > 1:
            raise UserError(
                f"the study {study} is in the store at the scales {', '.join(scales)}; name one of them as scale"
            )
        if scale is not None and scale not in scales:
            raise unknown(f"scale of {study}", scale, scales)
        scale = scale or scales[0]
        tagged = self._tags.index[self._tags[f"{STUDY_PREFIX}{study}"].eq(scale)]
        # A run that another study or scale had computed carries that one's tags; the sweep's own list has it too.
        sweeps = [s for s in self.sweeps if (s.study, s.scale) == (study, scale)]
        cases = {run_id: case for sweep in sweeps for run_id, case in sweep.cases.items()}
        chosen = table.loc[table["run_id"].isin(tagged) | table["run_id"].isin(cases)].copy()
        chosen["case"] = chosen["run_id"].map(cases).fillna(chosen["case"]).map(lambda case: DISPLAY.get(case, case))
        chosen["study"], chosen["scale"] = study, scale
        if any(sweep.content.get("stop") for sweep in sweeps):
            chosen["ended"] |= chosen["status"].eq("stopped")
        return chosen

    def _sweep(self, run_id: str) -> Sweep:
        tags = self._tags.loc[run_id].dropna()
        study = str(tags["study"])
        content: dict[str, Any] = {}
        if path := self.artifact(run_id, "study.yaml"):
            content = yaml.safe_load(path.read_text()) or {}
        cases: dict[str, str] = {}
        if path := self.artifact(run_id, "runs.csv"):
            text = path.read_text().strip()
            listed = pd.read_csv(path, usecols=["run_id", "case"], dtype=str) if text else None
            cases = dict(zip(listed["run_id"], listed["case"], strict=True)) if listed is not None else {}
        return Sweep(study, str(tags[f"{STUDY_PREFIX}{study}"]), run_id, content, cases)


def column(table: pd.DataFrame, name: str) -> pd.Series:
    """A column of a table, or an error that names the nearest one."""
    if name not in table:
        raise _no_such("column", name, table)
    return table[name]


def _no_such(kind: str, name: str, known: pd.DataFrame) -> UserError:
    near = get_close_matches(name, list(map(str, known)), n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"columns are, for example, {', '.join(EXAMPLES)}"
    return UserError(f"no run has a {kind} {name!r}; {hint}")


def _pivot(long: pd.DataFrame, run_ids: Collection[str] | None = None) -> pd.DataFrame:
    if run_ids is not None:
        long = long.loc[long["run_id"].isin(run_ids)]
    return long.pivot(index="run_id", columns="key", values="value").rename_axis(columns=None)


def _typed(settings: pd.DataFrame) -> pd.DataFrame:
    """Numbers, switches and lists as what they are; lists become tuples, so that one can group by them."""

    def parse(text: Any) -> Any:
        if not isinstance(text, str):
            return None
        try:
            value = json.loads(text)
        except ValueError:
            return text
        return _hashable(value)

    typed = {}
    for name in settings:
        meaning = {text: parse(text) for text in settings[name].unique()}  # few different ones among thousands
        values = pd.Series([meaning[text] for text in settings[name]], index=settings.index, dtype=object)
        typed[name] = values.infer_objects()
    return pd.DataFrame(typed, index=settings.index)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def _status(state: "pd.Series[Any]", tag: "pd.Series[Any] | None") -> "pd.Series[Any]":
    """Of the run, not of MLflow: a diverged run is FINISHED there."""
    words = {"RUNNING": "running", "SCHEDULED": "running", "FAILED": "failed", "KILLED": "stopped"}
    plain = state.map(words)
    return plain.where(state.ne("FINISHED"), tag if tag is not None else "finished").fillna("finished")


def _cases(frame: pd.DataFrame) -> "pd.Series[Any]":
    """What a run is called: by its study, else by its method and those options that make a variant of it."""
    labels = frame["method"].map(lambda name: DISPLAY.get(name, name))
    for method, mine in frame.groupby("method"):
        for name in [c for c in map(str, frame) if c.startswith("method.") and mine[c].map(_is_variant).any()]:
            default = _default(str(method), name.removeprefix("method."))
            other = mine[name].map(lambda value, default=default: _is_variant(value) and value != default)
            if mine[name].nunique() > 1 or other.any():
                suffix = mine.loc[other, name].map(lambda v, n=name: f" {n.removeprefix('method.')}={v}")
                labels.loc[suffix.index] += suffix
    return frame["case"].map(lambda case: DISPLAY.get(case, case)).fillna(labels)


def _counts(settings: Mapping[str, Any]) -> NDArray[Any] | None:
    """Samples per client and class; None if the data are not here."""
    from fl_lightning.config import configure  # torch: only who splits data again waits for it
    from fl_lightning.data.partition import class_counts, partition

    known = {key: value for key, value in settings.items() if value is not None and value == value}
    root = known.get("data.root")
    if root is not None and not Path(str(root)).exists():  # recorded on another machine; perhaps they lie elsewhere
        del known["data.root"]
    try:
        config = configure({key: list(v) if isinstance(v, tuple) else v for key, v in known.items()})
        dataset = config.source.load()
    except (UserError, OSError):
        return None
    clients = partition(dataset.train_y, config.split, config.seed, dataset.owners)
    counts: NDArray[Any] = class_counts(dataset.train_y, clients, dataset.num_classes).numpy()
    return counts


def _is_variant(value: Any) -> bool:
    return isinstance(value, str | bool)


def _default(method: str, option: str) -> Any:
    try:
        return fields_of(discovery.find("methods", method))[option].default
    except (UserError, KeyError):  # somebody's own method, or one of another version
        return None


def _narrow(table: pd.DataFrame, name: str, value: Any) -> pd.DataFrame:
    values = list(value) if isinstance(value, list | set | frozenset) else [value]
    chosen = column(table, name).map(lambda found: any(found == _hashable(one) for one in values))
    return table.loc[chosen.astype(bool)]


def _nothing_left(study: str | None, where: Mapping[str, Any] | None, tags: Mapping[str, str] | None) -> str:
    conditions = [f"{key} = {value}" for key, value in {**(where or {}), **(tags or {})}.items()]
    of_study = f" of the study {study}" if study else ""
    return f"no run{of_study} has {' and '.join(conditions)}; ask for less" if conditions else f"no run{of_study} yet"


def _unfinished(table: pd.DataFrame) -> list[str]:
    """What a reader must know about runs that are no results."""
    counts = table["status"].value_counts()
    meaning = {
        "diverged": "diverged; they are counted, but not averaged",
        "running": "have not ended yet, or were killed",
        "failed": "failed",
        "stopped": "were stopped before their last round",
    }
    return [
        f"{counts[status]} of {len(table)} runs {text}"
        for status, text in meaning.items()
        if status in counts and not table.loc[table["status"].eq(status), "ended"].all()
    ]
