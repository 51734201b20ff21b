"""Runs as two tidy tables: one row per run, and one per run and round, with the dotted settings as columns.

    from analysis import runs
    study = runs.load("runs", study="demo")
    study.runs                                                  # final GA, LA, ... of every run
    study.rounds                                                # GA, LA, ... of every round
    runs.load("runs", where={"data.alpha": 0.01, "method": ["fola", "fedavg"]})

Columns of both: every setting by its dotted key, with its type (`data.alpha` is a number); `case`, what the run is
called in figures; `method`, `data`, `model`, `seed`, `partition` (equal for equal splits), `status`, `run_id`.
The metrics of `runs` are those of the last round; `best_GA` is the largest of all rounds, `rounds` their number.

`status` is finished, diverged, stopped (before its last round), running, or failed. `ended` says whether the run's
last number is a result: it finished, or its own rule or its study's had seen enough. `confirms` says whether a run is
on a fresh seed that confirms a choice; no choice rests on it. Runs that diverged stay: what they measured before
stays in the table.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import pandas as pd

from analysis import study_records
from analysis.columns import cases_of, hashable, narrow, no_such, with_defaults
from analysis.sources import STUDY_PREFIX, Place, Source, open_source
from analysis.study import Study
from analysis.study_records import NO_SPEC, Sweep, joined, steps
from fl_lightning.errors import UserError, unknown
from fl_lightning.metrics.metric import GA, LA
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.runs.folder import STOPPED_TAG, Result
from fl_lightning.runs.known_run import KnownRun
from fl_lightning.runs.plotting.palette import DISPLAY
from fl_lightning.runs.provenance import SETTINGS_TAG, VERSIONS_TAG
from fl_lightning.runs.tracking.sync import PARENT_TAG
from tune.study_file import names

KEY_COLUMNS = ("run_id", "case", "method", "data", "model", "seed", "partition", "status", "ended", "diverged")
WITHOUT = "runs without a study"
# What tune calls the runs that others of a study are measured against.
REFERENCE = "reference"


class NoRuns(UserError):  # noqa: N818 - reads as what it says
    """The place is fine, but holds no run of that kind."""


def load(
    place: Place = None,
    study: str | None = None,
    where: Mapping[str, Any] | None = None,
    tags: Mapping[str, str] | None = None,
    scale: str | None = None,
    absent: str = "error",
) -> Study:
    """Some runs, as tables.

    Args:
        place: Folder of runs or MLflow URI; without it MLFLOW_TRACKING_URI, else the folder `runs`.
        study: Only runs of this study.
        where: Only runs with these values of columns; a list allows several, None means no value.
        tags: Only runs with these MLflow tags.
        scale: Of the study; needed if there are several of it.
        absent: What to do if no run is left: `error`, or `empty` for empty tables and a remark that says why.

    Raises:
        UserError: If the place, the study or a column does not exist.
    """
    return Runs(place).load(study, where, tags, scale, absent)


def of_results(results: Iterable[tuple[str, RunConfig, Result]]) -> Study:
    """Runs that this process has seen end; no file is read.

    Args:
        results: What each is called, its settings, and how it ended.
    """
    known = [
        KnownRun(
            run_id=result.run_id or result.identity,  # while no store has answered
            name=result.name,
            status="finished" if result.status == "stopped" else result.status,  # by the rule that all of them have
            start=0.0,
            end=0.0,
            settings=config.flat(),
            tags={**result.tags, "case": case},
            rounds=[measurement.metrics for measurement in result.history],
            folder=result.folder,
        )
        for case, config, result in results
        if result.history
    ]
    return Study(tables_of(known), measured_in(known))


def measured_in(known: Iterable[KnownRun]) -> pd.DataFrame:
    """One row per run and round, with all metrics."""
    rows = [{"run_id": run.run_id, "round": i, **one} for run in known for i, one in enumerate(run.rounds, start=1)]
    table = pd.DataFrame(rows, columns=None if rows else ["run_id", "round"])
    names = {*map(str, table), GA, LA} - {"run_id", "round"}
    return table.reindex(columns=["run_id", "round", *sorted(names)])


def tables_of(known: Sequence[KnownRun]) -> pd.DataFrame:
    """One row per run, the oldest first."""
    known = sorted(known, key=lambda run: run.start)
    index = pd.Index([run.run_id for run in known], name="run_id")
    frame = pd.DataFrame({name: [getattr(run, name) for run in known] for name in ("name", "status")}, index)
    for name in ("start", "end"):
        frame[name] = pd.to_datetime([1000 * getattr(run, name) for run in known], unit="ms").round("ms")
    frame["rounds"] = [max((i for i, one in enumerate(run.rounds, start=1) if GA in one), default=0) for run in known]
    values = [[one[GA] for one in run.rounds if one.get(GA, float("nan")) == one.get(GA)] for run in known]
    frame["best_GA"] = [max(mine, default=float("nan")) for mine in values]
    for name in ("partition", "identity", "diverged", "case", "study", SETTINGS_TAG, VERSIONS_TAG):
        frame[name] = [run.tags.get(name) for run in known]
    frame["confirms"] = [run.tags.get("purpose") == "confirm" for run in known]
    after = pd.Series([_stopped_after(run) for run in known], index)
    frame["ended"] = frame["status"].eq("finished") | (frame["status"].eq("stopped") & frame["rounds"].eq(after))
    last: list[dict[str, float]] = [{key: one[key] for one in run.rounds for key in one} for run in known]
    names = sorted({GA, LA}.union(*last))
    metrics = pd.DataFrame(last, index, columns=names, dtype=float)
    keys = sorted({"method", "seed"}.union(*(run.settings for run in known)))
    chosen = [{key: hashable(value) for key, value in run.settings.items()} for run in known]
    settings = with_defaults(pd.DataFrame(chosen, index, columns=keys, dtype=object).infer_objects())
    frame = pd.concat([frame, metrics, settings], axis=1).reset_index()
    frame["case"] = cases_of(frame)
    first = [name for name in KEY_COLUMNS if name in frame]
    return frame[[*first, *(name for name in frame if name not in first)]]


def _stopped_after(run: KnownRun) -> int | None:
    """In which round a rule of its own has stopped a run."""
    words = run.tags.get(STOPPED_TAG, "").partition(":")[0].split()
    return int(words[1]) if len(words) == 2 and words[1].isdigit() else None


@dataclass(frozen=True)
class Runs:
    """All runs of a place; they are read once.

    Attributes:
        place: Folder of runs or MLflow URI.
    """

    place: Place = None

    @cached_property
    def source(self) -> Source:
        """Where the runs are."""
        return open_source(self.place)

    @cached_property
    def known(self) -> dict[str, KnownRun]:
        """All runs, by their ids."""
        return {run.run_id: run for run in self.source.runs()}

    @cached_property
    def table(self) -> pd.DataFrame:
        """All runs, the oldest first."""
        return tables_of(list(self.known.values()))

    @cached_property
    def measured(self) -> pd.DataFrame:
        """All rounds."""
        return measured_in(self.known.values())

    @cached_property
    def _tags(self) -> pd.DataFrame:
        tags = [run.tags for run in self.known.values()]
        return pd.DataFrame(tags, list(self.known), columns=sorted({PARENT_TAG}.union(*tags)), dtype=object)

    @cached_property
    def sweeps(self) -> list[Sweep]:
        """Every sweep of the place, the one that was begun or gone on with last at the end."""
        return sorted(map(self._by_run, self.source.sweeps()), key=lambda sweep: sweep.swept)

    def _by_run(self, sweep: Sweep) -> Sweep:
        """The sweep with the cases of its runs by their ids, whatever its table knows them by."""
        ids: dict[str, list[str]] = {run_id: [run_id] for run_id in self.known}
        for run_id, run in self.known.items():
            ids.setdefault(run.tags.get("identity", ""), []).append(run_id)
        return sweep._replace(cases={run: case for name, case in sweep.cases.items() for run in ids.get(name, ())})

    @cached_property
    def studies(self) -> dict[str, list[str]]:
        """The studies of the place and their scales; runs without a study do not count."""
        found: dict[str, set[str]] = {}
        for run in self.known.values():
            for key, scale in run.tags.items():
                if key.startswith(STUDY_PREFIX):
                    found.setdefault(key.removeprefix(STUDY_PREFIX), set()).add(scale)
        for sweep in self.sweeps:
            found.setdefault(sweep.study, set()).add(sweep.scale)
        return {name: sorted(scales) for name, scales in sorted(found.items())}

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
    ) -> Study:
        """Some runs as tables; see `load`. A server may hold runs repeated with --fresh; the newest of each stays."""
        table, remarks = self.table, list[str]()
        try:
            if not len(table):
                raise NoRuns(f"{self.source.place} holds no runs yet; make some with `fl-lightning demo`")
            if study is not None:
                table, remarks = self._of_study(table, study, scale)
            for name, value in (tags or {}).items():
                table = self._tagged(table, name, value)
            table = self.narrowed(table, where or {})
            if not len(table):
                raise NoRuns(_nothing_left(study, where, tags))
        except NoRuns as reason:
            if absent != "empty":
                raise
            nothing = self.table.iloc[:0].assign(scale=None)
            name = study or ""
            return Study(nothing, self.measured.iloc[:0], NO_SPEC, (str(reason),), name, name, scale or "")
        table, outdated = _newest(table)
        remarks += [*outdated, *study_records.mixed(table), *_unfinished(table)]
        is_reference = table["case"].eq(REFERENCE)
        if is_reference.any():
            remarks.append(f"{is_reference.sum()} more runs are references that others are measured against")
        runs, references = table.loc[~is_reference].reset_index(drop=True), table.loc[is_reference]
        scale = str(table["scale"].iloc[0]) if study is not None else ""
        sweep = self.sweep(study, scale) if study is not None else None
        spec = study_records.spec_of(sweep.content) if sweep else NO_SPEC
        measured = self.measured.loc[self.measured["run_id"].isin(runs["run_id"])]
        title = f"{study}, scale {scale}" if scale not in ("", "all") else study or ""
        found = Study(runs, measured, spec, tuple(remarks), title, study or "", scale, references, sweep)
        return replace(found, file=self.source.artifact)

    def narrowed(self, table: pd.DataFrame, where: Mapping[str, Any]) -> pd.DataFrame:
        """The runs of a table that have these values of columns, or of tags that users have given them."""
        for name, value in where.items():
            if name not in table and name in self._tags:
                table = self._tagged(table, name, value)
            else:
                table = narrow(table, name, value)
        return table

    def metrics_of(self, run_id: str) -> dict[str, float]:
        """What was measured last of a run."""
        rounds = self.known[run_id].rounds
        last = {key: value for one in rounds for key, value in one.items() if value == value}
        if GA in last:
            last["best_GA"] = max(one[GA] for one in rounds if GA in one)
        return {name: last[name] for name in (GA, LA, *sorted(last.keys() - {GA, LA})) if name in last}

    def _tagged(self, table: pd.DataFrame, name: str, value: Any) -> pd.DataFrame:
        if name not in self._tags:
            raise no_such("tag", name, self._tags)
        values = list(map(str, value)) if isinstance(value, list | set | frozenset) else [str(value)]
        carrying = self._tags.index[self._tags[name].isin(values)]
        return table.loc[table["run_id"].isin(carrying)]

    def _of_study(self, table: pd.DataFrame, study: str, scale: str | None) -> tuple[pd.DataFrame, list[str]]:
        """The runs of a study as it was swept last, and what is left out because it was another then."""
        scale = self._scale_of(study, scale)
        tags = self._tags.get(f"{STUDY_PREFIX}{study}")
        tagged = set(tags.index[tags.eq(scale)]) if tags is not None else set()
        # A run that another study or scale had computed carries that one's tags; the sweep's own list has it too.
        sweeps = self._sweeps_of(study, scale)
        last = joined(taken := steps(sweeps))
        cases = {run_id: case for sweep in sweeps for run_id, case in sweep.cases.items()}
        latest = last.cases if last else {}
        outdated = cases.keys() - latest.keys() if latest else set()
        if latest:  # what an earlier sweep had begun and never listed
            gone = {sweep.run_id for sweep in sweeps if sweep not in taken and sweep.run_id}
            begun = set(self._tags.index[self._tags[PARENT_TAG].isin(gone)])
            outdated |= begun - latest.keys() - self._references
        dropped = self._no_longer_listed(table.loc[table["run_id"].isin(tagged)], taken, latest) - outdated
        table = table.loc[~table["run_id"].isin(outdated | dropped)]
        chosen = table.loc[table["run_id"].isin(tagged | cases.keys())].copy()
        labels = [cases.get(run_id, own) for run_id, own in zip(chosen["run_id"], chosen["case"], strict=True)]
        chosen["case"] = [DISPLAY.get(label, label) for label in labels]
        chosen["study"], chosen["scale"] = study, scale
        place = {run_id: number for number, run_id in enumerate(latest)}
        chosen = chosen.iloc[chosen["run_id"].map(place).fillna(len(place)).to_numpy().argsort(kind="stable")]
        if last:
            chosen = study_records.as_the_study_sees(chosen, last.content, self.measured)
        remarks = {
            "of an earlier form of the study are left out": outdated,
            "that the study has made and no longer asks for are left out": dropped,
        }
        return chosen, [f"{len(ids)} runs {words}" for words, ids in remarks.items() if ids]

    def _scale_of(self, study: str, scale: str | None) -> str:
        """The scale that is meant, of a study that is here."""
        if study not in self.studies:
            if study in names():
                raise NoRuns(
                    f"{self.source.place} holds no runs of the study {study}; make them with "
                    f"`fl-lightning sweep {study} --scale small`"
                )
            error = unknown("study", study, self.studies or names())
            # A name like no other means a study that was never swept here.
            raise error if "did you mean" in str(error) else NoRuns(str(error))
        scales = self.studies[study]
        if scale is None and len(scales) > 1:
            raise UserError(
                f"the study {study} is in the store at the scales {', '.join(scales)}; name one of them as scale"
            )
        if scale is not None and scale not in scales:
            raise unknown(f"scale of {study}", scale, scales)
        return scale or scales[0]

    def _no_longer_listed(self, tagged: pd.DataFrame, taken: Sequence[Sweep], listed: Mapping[str, str]) -> set[str]:
        """Whole runs of cases whose sweep has ended without listing them: of settings that were the best once, or that
        came with imported runs. A sweep that is still at work lists its runs later.

        Args:
            tagged: Runs of the study, by their own tags.
            taken: The sweeps of the study that count.
            listed: What these list.
        """
        ended = [sweep for sweep in taken if sweep.cases and sweep.ended]
        swept = {DISPLAY.get(case["label"], case["label"]) for sweep in ended for case in sweep.content["cases"]}
        whole = tagged["ended"] | tagged["status"].eq("diverged")
        # What has been repeated since, with --fresh or by newer code, is left to `load`.
        setting = tagged[SETTINGS_TAG].astype("string") + " " + tagged["federation.rounds"].astype("string")
        repeated = setting.isin(setting.loc[tagged["run_id"].isin(listed)].dropna())
        unlisted = tagged.loc[whole & tagged["case"].isin(swept) & ~repeated, "run_id"]
        return set(unlisted) - listed.keys() - self._references

    @cached_property
    def _references(self) -> set[str]:
        """Runs that others are measured against; no sweep lists them."""
        return {run_id for run_id, run in self.known.items() if run.tags.get("case") == REFERENCE}


def _newest(table: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """Without what was computed again since, and what that was."""
    repeated = table["identity"].notna() & table.sort_values(["ended", "start"]).duplicated("identity", keep="last")
    remarks = []
    if repeated.any():
        remarks.append(f"{repeated.sum()} runs were repeated with --fresh; only the newest of each counts")
    table = table.loc[~repeated]
    if (older := study_records.superseded(table)).any():
        remarks.append(f"{older.sum()} runs were made by an older version of the code and computed again since")
    return table.loc[~older].reset_index(drop=True), remarks


def _nothing_left(study: str | None, where: Mapping[str, Any] | None, tags: Mapping[str, str] | None) -> str:
    conditions = [f"{key} = {value}" for key, value in {**(where or {}), **(tags or {})}.items()]
    of_study = f" of the study {study}" if study else ""
    return f"no run{of_study} has {' and '.join(conditions)}; ask for less" if conditions else f"no run{of_study} yet"


def _unfinished(table: pd.DataFrame) -> list[str]:
    """What a reader must know about runs without a result."""
    counts = table["status"].value_counts()
    meaning = {
        "diverged": "diverged; they are counted, but not averaged",
        "running": "have not ended yet",
        "failed": "failed",
        "stopped": "were stopped before their last round",
    }
    return [
        f"{counts[status]} of {len(table)} runs {text}"
        for status, text in meaning.items()
        if status in counts and not table.loc[table["status"].eq(status), "ended"].all()
    ]


def studies(
    place: Place | Runs = None,
    study: str | None = None,
    scale: str | None = None,
    where: Mapping[str, Any] | None = None,
) -> Iterator[Study]:
    """The studies of a place.

    Args:
        place: Folder of runs or MLflow URI, or `Runs`.
        study: Only this one; if there are no runs of it, one empty study says so.
        scale: Only this one.
        where: Only runs with these values of columns; a study without any is empty and says so.

    Raises:
        UserError: If there is no such place, no run in it, or no such study or column.
    """
    runs = place if isinstance(place, Runs) else Runs(place)
    if study is None:
        if not len(runs.table):
            raise NoRuns(f"{runs.source.place} holds no runs yet; make some with `fl-lightning demo`")
        if where:
            runs.load(where=where)  # or every study would say for itself that it has no such runs, or no such column
        for name in runs.studies:
            yield from _of_study(runs, name, None, where)
        yield from _without_study(runs, where)
    elif study in runs.studies:
        yield from _of_study(runs, study, scale, where)
    else:
        yield runs.load(study, where, absent="empty")


def _of_study(runs: Runs, study: str, scale: str | None, where: Mapping[str, Any] | None) -> Iterator[Study]:
    for size in runs.studies[study] if scale is None else [scale]:
        yield runs.load(study, where, scale=size, absent="empty")


def _without_study(runs: Runs, where: Mapping[str, Any] | None) -> Iterator[Study]:
    alone = runs.table.loc[runs.table["study"].isna()]
    for name, value in (where or {}).items():
        alone = narrow(alone, name, value)
    # Accuracies on different data, or of different models, do not belong into one picture.
    problems = list(alone[["data", "model"]].drop_duplicates().itertuples(index=False))
    for data, model in problems:
        title = f"{WITHOUT}: {data}, {model}" if len(problems) > 1 else WITHOUT
        mine = {**(where or {}), "study": None, "data": data, "model": model}
        yield replace(runs.load(where=mine), title=title)
