"""Runs as tidy tables: one row per run, or one per run and round, with the dotted settings as columns.

    from analysis import runs
    table = runs.load("runs", study="demo")                     # final GA, LA, ... of every run
    table = runs.load("runs", where={"data.alpha": 0.01, "method": ["fola", "fedavg"]})
    curves = runs.rounds("runs", study="demo")                  # GA, LA, ... of every round

Columns of both: every setting by its dotted key, with its type (`data.alpha` is a number); `case`, what the run is
called in figures; `method`, `data`, `model`, `seed`, `partition` (equal for equal splits), `status`, `run_id`.
The metrics of `load` are those of the last round; `best_GA` is the largest of all rounds, `rounds` their number.

`status` is finished, diverged, stopped (before its last round), running, or failed. `ended` says whether the run's
last number is a result: it finished, or its own rule or its study's had seen enough. `confirms` says whether a run is
on a fresh seed that confirms a choice; nobody chooses by it. Runs that diverged are kept: what they measured before
stays in the table.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from analysis import studies, versions
from analysis.columns import cases_of, narrow, no_such, pivot, status_of, typed, with_defaults
from analysis.store import Content, Store, open_store
from analysis.sweeps import Sweep, joined, steps
from fl_lightning.errors import UserError, unknown
from fl_lightning.runs.palette import DISPLAY
from fl_lightning.runs.provenance import SETTINGS_TAG, VERSIONS_TAG
from fl_lightning.runs.recording import STOPPED_TAG
from fl_lightning.runs.track import PARENT_TAG
from fl_lightning.system.spreadsheet import original
from tune.record import SWEPT_TAG

Place = str | Path | None
KEY_COLUMNS = ("run_id", "case", "method", "data", "model", "seed", "partition", "status", "ended", "diverged")
STUDY_PREFIX = "study."
# What tune calls the runs that others of a study are measured against.
REFERENCE = "reference"


class NoRuns(UserError):  # noqa: N818 - reads as what it says
    """The store is fine, but holds no run of that kind."""


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
        where: Only runs with these values of columns; a list allows several, None means no value.
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
        return pivot(self._content.tags)

    @cached_property
    def table(self) -> pd.DataFrame:
        """All runs, the oldest first."""
        content = self._content
        # Sweeps have params and metrics of their own; runs without a method have only just begun.
        begun = set(content.params.loc[content.params["key"].eq("method"), "run_id"])
        frame = content.runs.loc[content.runs["run_id"].isin(begun)].set_index("run_id").sort_values("start")
        settings = with_defaults(typed(pivot(content.params, begun).reindex(frame.index)))
        metrics = pivot(content.latest, begun).reindex(frame.index)
        tags = self._tags.reindex(frame.index)
        reached = content.latest.loc[content.latest["key"].eq("GA")].set_index("run_id")["round"]
        frame["rounds"] = reached.reindex(frame.index).fillna(0).astype(int)
        frame["best_GA"] = content.best.set_index("run_id")["value"].reindex(frame.index).astype(float)
        for name in ("partition", "identity", "diverged", "case", "study", SETTINGS_TAG, VERSIONS_TAG):
            frame[name] = tags.get(name)
        purpose = tags.get("purpose")
        frame["confirms"] = purpose.eq("confirm") if purpose is not None else False
        frame["status"] = status_of(frame.pop("state"), tags.get("status"))
        for name in ("GA", "LA"):
            if name not in metrics:
                metrics[name] = float("nan")
        for name in ("method", "seed"):
            if name not in settings:  # nobody has begun
                settings[name] = None
        frame = pd.concat([frame, metrics.astype(float), settings], axis=1)
        frame["ended"] = frame["status"].eq("finished") | _by_own_rule(frame, tags.get(STOPPED_TAG))
        frame["start"] = pd.to_datetime(frame["start"], unit="ms")
        frame["end"] = pd.to_datetime(frame["end"], unit="ms")
        frame = frame.reset_index()
        frame["case"] = cases_of(frame)
        first = [name for name in KEY_COLUMNS if name in frame]
        return frame[[*first, *(name for name in frame if name not in first)]]

    @cached_property
    def sweeps(self) -> list[Sweep]:
        """Every sweep of the store, the one that was begun or gone on with last at the end."""
        tags = self._tags
        if "kind" not in tags:
            return []
        found = tags.loc[tags["kind"].eq("sweep")]
        turn = self._content.runs.set_index("run_id")["start"].reindex(found.index)  # in milliseconds
        if SWEPT_TAG in found:  # those of earlier versions lack it
            swept = pd.to_datetime(found[SWEPT_TAG]).map(lambda time: time.timestamp() * 1000, na_action="ignore")
            turn = swept.fillna(turn)
        return [self._sweep(str(run_id)) for run_id in turn.sort_values().index]

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
        return joined(steps(self._sweeps_of(study, scale)))

    def _sweeps_of(self, study: str, scale: str) -> list[Sweep]:
        return [sweep for sweep in self.sweeps if (sweep.study, sweep.scale) == (study, scale)]

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
                table, outdated = self._of_study(table, study, scale)
                remarks += outdated
            for name, value in (tags or {}).items():
                table = self._tagged(table, name, value)
            table = self.narrowed(table, where or {})
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
        table = table.loc[~repeated]
        if (older := versions.superseded(table)).any():
            remarks.append(f"{older.sum()} runs were made by an older version of the code and computed again since")
        table = table.loc[~older].reset_index(drop=True)
        remarks += [*versions.mixed(table), *_unfinished(table)]
        table.attrs["remarks"] = remarks
        if study is not None and (sweep := self.sweep(study, str(table["scale"].iloc[0]))):
            table.attrs |= studies.attributes(sweep.content)
            table.attrs["stages"] = True
        return table

    def narrowed(self, table: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
        """The runs of a table that have these values of columns, or of tags that users have given them."""
        for name, value in where.items():
            if name not in table and name in self._tags:
                table = self._tagged(table, name, value)
            else:
                table = narrow(table, name, value)
        return table

    def tags_of(self, run_id: str) -> dict[str, str]:
        """All tags of a run."""
        return {str(name): str(value) for name, value in self._tags.loc[run_id].dropna().items()}

    def metrics_of(self, run: "pd.Series[Any]") -> dict[str, float]:
        """What was measured in the last round of a run, a row of a table."""
        names = ["GA", "LA", *sorted(self._metric_names - {"GA", "LA"})]
        return {name: float(run[name]) for name in names if name in run.index and pd.notna(run[name])}

    def settings_of(self, run: "pd.Series[Any]") -> dict[str, Any]:
        """The settings of a run by dotted key."""
        params = self._content.params
        mine = params.loc[params["run_id"].eq(run["run_id"]), "key"]
        return {key: run[key] for key in mine}

    def _tagged(self, table: pd.DataFrame, name: str, value: Any) -> pd.DataFrame:
        if name not in self._tags:
            raise no_such("tag", name, self._tags)
        values = list(map(str, value)) if isinstance(value, list | set | frozenset) else [str(value)]
        carrying = self._tags.index[self._tags[name].isin(values)]
        return table.loc[table["run_id"].isin(carrying)]

    def rounds(self, table: pd.DataFrame, metrics: Collection[str] | None = None) -> pd.DataFrame:
        """One row for every round of the runs of a table, with all their settings."""
        settings = self.without_metrics(table)
        if not len(table):
            nothing = settings.assign(round=pd.Series(dtype=int), GA=pd.Series(dtype=float), LA=pd.Series(dtype=float))
            nothing.attrs.update(table.attrs)
            return nothing
        if metrics is not None and table.attrs.get("metric"):  # settings are chosen by it
            metrics = {*metrics, table.attrs["metric"]}
        long = self.store.history(list(table["run_id"]), metrics)
        # A round that was computed again after a kill may have other seconds: the later ones count.
        wide = long.drop_duplicates(["run_id", "round", "key"], keep="last").pivot(
            index=["run_id", "round"], columns="key", values="value"
        )
        wide = wide.rename_axis(columns=None).reset_index().sort_values(["run_id", "round"])
        if "rounds" in table:  # a study's rule may have had enough of a run that another study takes further
            wide = wide.loc[wide["round"].le(wide["run_id"].map(table.set_index("run_id")["rounds"]))]
        merged = settings.merge(wide, on="run_id", how="inner", validate="one_to_many")
        merged.attrs.update(table.attrs)
        return merged

    def without_metrics(self, table: pd.DataFrame) -> pd.DataFrame:
        """The columns of a table that were not measured: settings, tags, names."""
        return table[[name for name in table if name not in self._metric_names and name != "rounds"]]

    def artifact(self, run_id: str, name: str) -> Path | None:
        """A file that a run has left, on this machine; None if there is none."""
        return self.store.artifact(run_id, name)

    @cached_property
    def _metric_names(self) -> set[str]:
        return {*map(str, self._content.latest["key"].unique()), "best_GA", "GA", "LA"}

    def _of_study(self, table: pd.DataFrame, study: str, scale: str | None) -> tuple[pd.DataFrame, list[str]]:
        """The runs of a study as it was swept last, and what is left out because it was another then."""
        if study not in self.studies:
            from tune.study_file import names

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
        sweeps = self._sweeps_of(study, scale)
        last = joined(taken := steps(sweeps))
        cases = {run_id: case for sweep in sweeps for run_id, case in sweep.cases.items()}
        latest = last.cases if last else {}
        outdated = cases.keys() - latest.keys() if latest else set()
        if latest:  # what an earlier sweep had begun and never listed
            begun = self._tags.index[
                self._tags[PARENT_TAG].isin([sweep.run_id for sweep in sweeps if sweep not in taken])
            ]
            outdated |= set(begun) - latest.keys() - self._references
        dropped = self._no_longer_listed(table.loc[table["run_id"].isin(tagged)], taken, latest) - outdated
        table = table.loc[~table["run_id"].isin(outdated | dropped)]
        chosen = table.loc[table["run_id"].isin(tagged) | table["run_id"].isin(cases)].copy()
        labels = [cases.get(run_id, own) for run_id, own in zip(chosen["run_id"], chosen["case"], strict=True)]
        chosen["case"] = [DISPLAY.get(label, label) for label in labels]
        chosen["study"], chosen["scale"] = study, scale
        place = {run_id: number for number, run_id in enumerate(latest)}
        chosen = chosen.iloc[chosen["run_id"].map(place).fillna(len(place)).to_numpy().argsort(kind="stable")]
        if last:
            chosen = studies.as_the_study_sees(chosen, last.content, self.store)
        remarks = {
            "of an earlier form of the study are left out": outdated,
            "that the study has made and no longer asks for are left out": dropped,
        }
        return chosen, [f"{len(ids)} runs {words}" for words, ids in remarks.items() if ids]

    def _no_longer_listed(self, tagged: pd.DataFrame, taken: Sequence[Sweep], listed: Mapping[str, str]) -> set[str]:
        """Whole runs of cases whose sweep has ended without listing them: of settings that were the best once, or that
        came with imported runs. A sweep that is still at work lists its runs later.

        Args:
            tagged: Runs of the study, by their own tags.
            taken: The sweeps of the study that count.
            listed: What these list.
        """
        state = self._content.runs.set_index("run_id")["state"]
        ended = [sweep for sweep in taken if sweep.cases and state[sweep.run_id] == "FINISHED"]
        swept = {DISPLAY.get(case["label"], case["label"]) for sweep in ended for case in sweep.content["cases"]}
        whole = tagged["ended"] | tagged["status"].eq("diverged")
        # What has been repeated since, with --fresh or by newer code, is told apart by `load`.
        setting = tagged[SETTINGS_TAG].astype("string") + " " + tagged["federation.rounds"].astype("string")
        repeated = setting.isin(setting.loc[tagged["run_id"].isin(listed)].dropna())
        unlisted = tagged.loc[whole & tagged["case"].isin(swept) & ~repeated, "run_id"]
        return set(unlisted) - listed.keys() - self._references

    @cached_property
    def _references(self) -> set[str]:
        """Runs that others are measured against; no sweep lists them."""
        return set(self._tags.index[self._tags["case"].eq(REFERENCE)]) if "case" in self._tags else set()

    def _sweep(self, run_id: str) -> Sweep:
        tags = self._tags.loc[run_id].dropna()
        study = str(tags["study"])
        content: dict[str, Any] = {}
        if path := self.artifact(run_id, "study.yaml"):
            content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
        cases: dict[str, str] = {}
        if path := self.artifact(run_id, "runs.csv"):
            text = path.read_text(encoding="utf-8").strip()
            listed = pd.read_csv(path, usecols=["run_id", "case"], dtype=str) if text else None
            if listed is not None:
                cases = dict(zip(listed["run_id"], listed["case"].map(original), strict=True))
        return Sweep(study, str(tags[f"{STUDY_PREFIX}{study}"]), run_id, content, cases)


def _by_own_rule(frame: pd.DataFrame, tag: "pd.Series[Any] | None") -> "pd.Series[bool]":
    """Whether a run was stopped by a rule of its own, and has not gone on since."""
    if tag is None:
        return pd.Series(False, frame.index)
    after = tag.astype("string").str.extract(r"^round (\d+)", expand=False).astype(float)
    return frame["status"].eq("stopped") & after.eq(frame["rounds"])


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
