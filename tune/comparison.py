"""Several methods on the same problem: a small study, whose results are put side by side."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fl_lightning.errors import require
from fl_lightning.experiment import check
from fl_lightning.metrics.early_stopping import Stop
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.system import activity
from tune.estimate import Estimate
from tune.grid import cells
from tune.outcome import CellOutcome
from tune.study import Case, Study
from tune.sweep import Options, check_place, local_slots, missing, sweep
from tune.work import Watch

# Ray and its processes take ten seconds to start, on a busy machine a minute: shorter comparisons do without.
WORTH_SECONDS = 60.0


def variant_settings(variant: str) -> dict[str, str]:
    """The settings of a method with options, written `name+option=value+option=value`; `label:` may stand before it.

    >>> variant_settings("product only:fola+strength=0+damping=1e-3")
    {'method': 'fola', 'method.strength': '0', 'method.damping': '1e-3'}
    """
    name, *options = variant.rpartition(":")[2].split("+")
    settings = {"method": name}
    for option in options:
        key, equals, value = option.partition("=")
        require(bool(equals), f"a method's option is written name=value, got {option!r} in {variant!r}")
        settings[f"method.{key}"] = value
    return settings


def label_of(variant: str) -> str:
    """What a variant is called in tables and pictures."""
    return variant.partition(":")[0]


def study_of(
    settings: Mapping[str, Any],
    variants: Sequence[str],
    seeds: Sequence[int],
    name: str | None = None,
    stop: Stop | None = None,
) -> Study:
    """A comparison as a study: a case for every variant, in one environment.

    Args:
        settings: Of every run.
        variants: What is compared, as `variant_settings` reads them.
        seeds: Repetitions.
        name: By which a report can select it; by default `name_of`.
        stop: When a run need not go on.
    """
    for kind, names in (("method", list(map(label_of, variants))), ("seed", list(map(str, seeds)))):
        twice = [one for one in names if names.count(one) > 1]
        remedy = "give each a label of its own, as label:name+option=value" if kind == "method" else "name it once"
        require(not twice, f"the {kind} {''.join(twice[:1])!r} is named twice; {remedy}")
    cases = tuple(Case(label_of(variant), variant_settings(variant)) for variant in variants)
    about = f"Comparison of {', '.join(case.label for case in cases)}."
    name = name or name_of(settings, variants)
    base = dict(settings)
    return Study(name, "", about, base, cases=cases, seeds=tuple(seeds), stop=stop, keep_checkpoints=True)


def compare(study: Study, options: Options, watch: Watch) -> tuple[list[CellOutcome], dict[str, str]]:
    """Run every variant at every seed, on every core. All settings are checked before the first run starts.

    Returns:
        The cases with their runs that have ended, and those that could not be computed, with the reason.
    """
    configs = [config for cell in cells(study) for config in cell.configs]
    for config in configs:
        if config.seed == study.seeds[0]:
            check(config)
    todo = configs if options.fresh else missing(configs, options.out, study.stop)
    if todo:
        check_place(todo, options)
    room = local_slots(options.resources) // (1 if options.workers == "auto" else options.workers)
    slots = min(options.max_concurrent or len(todo), len(todo), room)
    alone = options.address is None and (slots <= 1 or _seconds(todo) < WORTH_SECONDS)
    found = sweep(study, options._replace(in_process=alone, pictures=True), watch)
    return [cell for cell in found.cells if cell.runs], found.failures


def _seconds(configs: Sequence[RunConfig]) -> float:
    """About how long the runs take one after the other."""
    activity.say("measuring a small round of every kind of run")
    estimate = Estimate()
    return sum(map(estimate.seconds, configs))


def name_of(settings: Mapping[str, Any], variants: Sequence[str]) -> str:
    """A name for a comparison that is the same for the same methods and settings, whatever the seeds.

    >>> name_of({"data.alpha": 0.01}, ["fedavg", "no prior:fola+strength=0"])
    'fedavg-no_prior-c547'
    """
    labels = "-".join(re.sub(r"[^A-Za-z0-9_.=+]+", "_", label_of(variant)) for variant in variants)
    what = json.dumps([dict(settings), *variants], sort_keys=True, default=str)
    return f"{labels}-{hashlib.sha256(what.encode()).hexdigest()[:4]}"
