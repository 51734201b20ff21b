"""A study: which settings are tried, under which conditions, how often, and what counts as good.

One YAML or Python file, data without logic:

    about: FOLA against FedAvg.                 # shown by `fl-lightning list studies`
    base: {data: digits, federation.rounds: 20} # settings of every run, by dotted key
    environments: {data.alpha: [0.01, 1]}       # given conditions; every combination is a comparison of its own
    given:                                      # settings that go with a condition
      - {when: {data.alpha: 0.01}, training.lr: 0.05}
    cases:                                      # what is compared, each with settings and a space of its own
      - {label: FedAvg, method: fedavg}
      - {label: FOLA, method: fola, space: {method.strength: [1, 100]}}
    space: {training.lr: [0.1, 0.01]}           # what is tuned, for every case: a list is a grid
    pretrain: {training.lr: 0.05}               # one run on the server's data, from which all networks start
    seeds: 3                                    # 0, 1, 2; or a list
    confirm: {seeds: 5}                         # the best settings again, on seeds 3 to 7, which chose nothing
    scales: {smoke: {seeds: 1}}                 # named changes of all this, chosen by --scale

A space may also say `{choice: [...]}`, `{uniform: [low, high]}` or `{loguniform: [low, high]}`; then `search` says how
many samples every case gets in every environment, the same for all: `search: {algorithm: optuna, samples: 20}`.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from fl_lightning.errors import require, unknown
from fl_lightning.metrics.early_stopping import Stop
from fl_lightning.metrics.metric import GA
from tune.best import ROUNDS

REFERENCE = "@reference"
# In the folder of a sweep: what was swept, whether it has ended, which runs it has, and the best settings to read.
STUDY, STATE, TABLE, SUMMARY = "study.yaml", "sweep.json", "runs.csv", "best.md"
# Keys that studies did not always have: they count for the identity where they say something.
LATER = frozenset({"given", "confirming", "among", "pretrain"})
# More than these is a slip: every setting takes a moment before anything is computed. The largest of our own studies
# has 6,250 settings and 187,500 runs.
MOST_SETTINGS, MOST_RUNS = 10_000, 200_000
MOST_SEEDS = 10_000
MOST_ROUNDS = 1_000_000
Distribution = Literal["choice", "uniform", "loguniform"]
Algorithm = Literal["grid", "random", "optuna"]


class Range(NamedTuple):
    """Where the values of one setting come from; `grid` takes every one of them."""

    kind: Literal["grid", "choice", "uniform", "loguniform"]
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Case:
    """What is compared: a method, or a variant of it.

    Attributes:
        label: What it is called in tables and figures.
        settings: What it fixes: method, options.
        space: What is tuned for it alone.
        confirming: On how many of the confirming seeds, the first ones, its best setting runs; None is all.
    """

    label: str
    settings: Mapping[str, Any]
    space: Mapping[str, Range] = field(default_factory=dict)
    confirming: int | None = None


@dataclass(frozen=True)
class Given:
    """Settings that go with a condition, such as the model of a data set.

    Attributes:
        when: The values, by key, any of which each of these settings must have.
        settings: What then takes the place of `base`.
    """

    when: Mapping[str, tuple[Any, ...]]
    settings: Mapping[str, Any]

    def holds(self, settings: Mapping[str, Any]) -> bool:
        """Whether settings meet the condition; flags are text, and `1e-1` is 0.1."""
        return all(
            any(str(value) == str(settings.get(key)) or number(value) == number(settings.get(key)) for value in values)
            for key, values in self.when.items()
        )


@dataclass(frozen=True)
class Search:
    """How the space is searched.

    Attributes:
        algorithm: Every combination (grid), independent draws (random), or Optuna's Bayesian search (optuna).
        samples: Settings that each case may try in each environment: the same budget for all.
        scheduler: asha stops bad settings early, by the metric after every round, within a case and environment.
        grace: Rounds that asha grants every setting.
        reduction: asha keeps one of this many at each of its stages.
    """

    algorithm: Algorithm = "grid"
    samples: int | None = None
    scheduler: Literal["none", "asha"] = "none"
    grace: int = 1
    reduction: int = 3

    def __post_init__(self) -> None:
        if self.algorithm not in get_args(Algorithm):
            raise unknown("search.algorithm", str(self.algorithm), get_args(Algorithm))
        if self.scheduler not in ("none", "asha"):
            raise unknown("search.scheduler", str(self.scheduler), ("none", "asha"))
        require(
            self.algorithm == "grid" or whole(self.samples),
            f"search.samples must say how many settings each case may try, a whole number >= 1, got {self.samples}",
        )
        require(
            self.algorithm != "grid" or self.samples is None,
            f"search.samples is {self.samples}, but a grid tries all settings; use search.algorithm random or optuna",
        )
        require(whole(self.grace), f"search.grace must be a whole number of rounds >= 1, got {self.grace}")
        require(
            whole(self.reduction) and self.reduction >= 2,
            f"search.reduction must be a whole number >= 2, got {self.reduction}",
        )
        require(
            self.scheduler == "none" or self.algorithm == "optuna",
            f"search.scheduler {self.scheduler} goes with search.algorithm optuna, got {self.algorithm}",
        )


@dataclass(frozen=True)
class Confirm:
    """How the best settings are confirmed.

    Attributes:
        seeds: Repetitions that have no part in choosing.
    """

    seeds: tuple[int, ...]

    def __post_init__(self) -> None:
        require(bool(self.seeds), "confirm.seeds is empty; give a number or a list, such as confirm: {seeds: 5}")


@dataclass(frozen=True)
class Study:
    """What a sweep computes.

    Attributes:
        name: Of the study.
        scale: Which of its scales this is.
        about: A sentence.
        base: Settings of every run.
        environments: Conditions; a comparison in every combination of them.
        given: Settings that go with some of these conditions.
        cases: What is compared.
        space: What is tuned for all of them.
        seeds: Repetitions.
        metric: Of the last round, averaged over seeds, it decides what is best: the largest, or the smallest of NLL,
            RMSE and others that are good if small. In a file that
            does not say, GA_validation if `base` has data.validation, else GA; the same for `stop`.
        search: How the space is searched.
        stop: When a run need not go on.
        continue_to: The best setting of every case and environment goes on to this many rounds.
        confirm: The best setting of every case and environment runs again on seeds that had no part in choosing; they
            alone go on to more rounds then.
        thresholds: Levels of GA whose round of arrival the table shows.
        keep_checkpoints: Whether the final models stay on disk.
        keep_models: Whether the final models stay as state dicts, on disk and in MLflow.
        memory: GB that a run takes; where they are scarce, fewer runs at once.
        report: Whether figures and tables of the study are made at the end and stored with the sweep in MLflow.
        reference: Settings of a run that is computed first, for every environment and seed; where a setting is
            `@reference`, the folder of that run takes its place.
        among: The labels of all cases, where only some of them take part.
        pretrain: Settings of a run that is computed first, once for every environment; the networks of all cases and
            seeds start from it. It trains in one place on the server's data (data.holdout), unless they say otherwise.
    """

    name: str
    scale: str
    about: str = ""
    base: Mapping[str, Any] = field(default_factory=dict)
    environments: Mapping[str, Range] = field(default_factory=dict)
    given: tuple[Given, ...] = ()
    cases: tuple[Case, ...] = ()
    space: Mapping[str, Range] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    metric: str = GA
    search: Search = field(default_factory=Search)
    stop: Stop | None = None
    continue_to: int | None = None
    confirm: Confirm | None = None
    thresholds: tuple[float, ...] = ()
    keep_checkpoints: bool = False
    keep_models: bool = False
    reference: Mapping[str, Any] | None = None
    report: bool = False
    memory: float = 0.0
    among: tuple[str, ...] = ()
    pretrain: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        require(isinstance(self.metric, str), f"metric must be the name of a metric, got {self.metric!r}")
        for name in ("keep_checkpoints", "keep_models"):
            given = getattr(self, name)
            require(isinstance(given, bool), f"{name} must be true or false, got {given!r}")
        require(
            isinstance(self.memory, int | float) and self.memory >= 0,
            f"memory must be a number of GB >= 0, got {self.memory!r}",
        )
        labels = [case.label for case in self.cases]
        require(bool(labels), f"study {self.name} has no cases; name at least one method under `cases`")
        twice = [label for label in labels if labels.count(label) > 1]
        require(not twice, f"study {self.name} has two cases called {''.join(twice[:1])!r}; give each its own label")
        require(bool(self.seeds), f"study {self.name} has no seeds; give a number or a list, such as seeds: 3")
        spaces = [self.space, *(case.space for case in self.cases)]
        drawn = [key for space in spaces for key, values in space.items() if values.kind != "grid"]
        require(
            not drawn or self.search.algorithm != "grid",
            f"study {self.name} draws {', '.join(sorted(set(drawn)))} at random, which a grid cannot; give "
            "`search: {algorithm: optuna, samples: 20}` or lists of values",
        )
        self._check_size()
        for key, values in self.environments.items():
            require(values.kind == "grid", f"environments.{key} must be a list of values, got {values.kind}")
        self._check_given()
        require(
            self.search.algorithm == "grid" or any(spaces),
            f"study {self.name} searches an empty space; name at least one key under `space`",
        )
        require(
            self.continue_to is None
            or (whole(self.continue_to) and self.continue_to <= MOST_ROUNDS and self.search.scheduler == "none"),
            f"continue_to must be a number of rounds, {MOST_ROUNDS:,} at most, and goes with search.scheduler none, "
            f"got {self.continue_to}",
        )
        tuned = [key for space in spaces for key in space]
        require(
            self.continue_to is None or ROUNDS not in tuned,
            f"study {self.name} tunes {ROUNDS}, which continue_to sets; leave one of them out",
        )
        again = sorted(set(self.seeds) & set(self.confirm.seeds if self.confirm else ()))
        require(
            not again,
            f"confirm.seeds must have no part in choosing, but {', '.join(map(str, again))} are among the seeds of "
            f"study {self.name}; give other numbers, or how many",
        )

        fresh = len(self.confirm.seeds) if self.confirm else 0
        for case in self.cases:
            require(
                case.confirming is None or (whole(case.confirming) and case.confirming <= fresh),
                f"study {self.name}: confirming of {case.label} must be a whole number of the {fresh} seeds of "
                f"`confirm`, got {case.confirming!r}; leave it out for all of them",
            )
        settings = [self.base, *(case.settings for case in self.cases)]
        require(
            self.reference is not None or not any(REFERENCE in map(str, one.values()) for one in settings),
            f"study {self.name} has a setting {REFERENCE} but no `reference`; give the settings of the reference run",
        )

    def _check_size(self) -> None:
        """Refuse what would take too long to be written down, by its numbers alone."""
        spaces = [{**self.space, **case.space} for case in self.cases]
        grids = [math.prod(len(values.values) for values in space.values()) for space in spaces]
        points = sum(grids) if self.search.algorithm == "grid" else len(spaces) * (self.search.samples or 0)
        settings = points * math.prod(len(values.values) for values in self.environments.values())
        runs = settings * len(self.seeds)
        require(
            settings <= MOST_SETTINGS and runs <= MOST_RUNS,
            f"study {self.name} may have at most {MOST_SETTINGS:,} settings and {MOST_RUNS:,} runs, got {settings:,} "
            f"settings with {len(self.seeds)} seeds; give fewer values, or draw some of them with `search`",
        )

    def _check_given(self) -> None:
        require(
            self.pretrain is None or self.search.algorithm != "optuna",
            f"study {self.name}: pretrain goes with search.algorithm grid or random, got optuna",
        )
        for one in self.given:
            strange = [key for key in one.when if key not in self.environments and key not in self.base]
            require(
                not strange,
                f"study {self.name}: given.when expected settings of environments or base, got {', '.join(strange)}; "
                "name them there",
            )
            twice = [key for key in one.settings if key in self.environments or key in one.when]
            require(
                not twice,
                f"study {self.name}: given sets {', '.join(twice)}, which is a condition itself; leave one out",
            )

    def base_in(self, environment: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of every run under some conditions."""
        # All seeds start from one network, so that its data must not be any seed's clients'.
        base = dict(self.base) if self.pretrain is None else {"data.holdout_seed": 0, **self.base}
        for one in self.given:
            if one.holds({**self.base, **environment}):
                base |= one.settings
        return base

    def only(self, labels: Sequence[str]) -> "Study":
        """The study with some of its cases alone, by their labels."""
        known = {case.label: case for case in self.cases}
        for label in labels:
            if label not in known:
                raise unknown(f"case of study {self.name}", label, known)
        chosen = tuple(case for case in self.cases if case.label in labels)
        return replace(self, cases=chosen, among=tuple(known)) if len(chosen) < len(known) else self

    def confirming_seeds(self, label: str) -> tuple[int, ...]:
        """The fresh seeds on which the best setting of a case runs, by its label."""
        (case,) = (case for case in self.cases if case.label == label)
        return self.confirm.seeds[: case.confirming] if self.confirm else ()

    @property
    def identity(self) -> str:
        """A short hash of everything the study says."""
        said = asdict(self, dict_factory=lambda items: {key: v for key, v in items if v or key not in LATER})
        return hashlib.sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:8]

    @property
    def params(self) -> dict[str, Any]:
        """What MLflow shows of it."""
        return {"metric": self.metric, "seeds": len(self.seeds), "cases": [case.label for case in self.cases]}


def number(value: Any) -> float:
    """A number, also where YAML takes it for text, as it does with 1e-3; NaN if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return math.nan


def whole(value: Any) -> bool:
    """Whether it is a whole number of at least 1."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
