"""Several methods on the same problem: runs them one after the other and puts their results side by side."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from fl_lightning.config import RunConfig, configure
from fl_lightning.errors import require
from fl_lightning.experiment import Outputs, check, finish, rounds
from fl_lightning.record import Measurement
from fl_lightning.runs.folder import Result
from fl_lightning.runs.recording import adopt


class Outcome(NamedTuple):
    """One run of a comparison."""

    variant: str
    seed: int
    result: Result
    config: RunConfig


Announce = Callable[[RunConfig, str], Callable[[int, Measurement], None]]


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


def compare(
    settings: Mapping[str, Any],
    variants: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    announce: Announce,
    fresh: bool = False,
    name: str = "",
) -> list[Outcome]:
    """Run every variant at every seed. All settings are checked before the first run starts.

    Args:
        settings: Of all runs alike.
        variants: Methods with options, as `variant_settings` reads them.
        seeds: Of every variant.
        out: Folder of all runs.
        announce: Asked before each run for who watches its rounds.
        fresh: Compute again what an earlier process has computed.
        name: Of the comparison: its runs are tagged as those of a study of this name; by default `name_of`.
    """
    for kind, names in (("method", list(map(label_of, variants))), ("seed", list(map(str, seeds)))):
        twice = [name for name in names if names.count(name) > 1]
        remedy = "give each a label of its own, as label:name+option=value" if kind == "method" else "name it once"
        require(not twice, f"the {kind} {''.join(twice[:1])!r} is named twice; {remedy}")
    configs = [
        (variant, seed, configure({**settings, **variant_settings(variant), "seed": seed}))
        for seed in seeds
        for variant in variants
    ]
    for _, seed, config in configs:
        if seed == seeds[0]:
            check(config)
    name = name or name_of(settings, variants)
    outcomes = []
    for variant, seed, config in configs:
        label = label_of(variant)
        tags = {"study": name, f"study.{name}": "all", "case": label}
        result = finish(rounds(config, out, fresh, Outputs(tags)), announce(config, label))
        adopt(config, out, result, tags)  # a run that was there before
        outcomes.append(Outcome(label, seed, result, config))
    return outcomes


def name_of(settings: Mapping[str, Any], variants: Sequence[str]) -> str:
    """A name for a comparison that is the same for the same methods and settings, whatever the seeds.

    >>> name_of({"data.alpha": 0.01}, ["fedavg", "no prior:fola+strength=0"])
    'fedavg-no_prior-c547'
    """
    labels = "-".join(re.sub(r"[^A-Za-z0-9_.=+]+", "_", label_of(variant)) for variant in variants)
    what = json.dumps([dict(settings), *variants], sort_keys=True, default=str)
    return f"{labels}-{hashlib.sha256(what.encode()).hexdigest()[:4]}"


def rounds_to(history: Sequence[Measurement], threshold: float) -> int | None:
    """The first round with GA at or above the threshold."""
    return next((i for i, m in enumerate(history, start=1) if m.metrics["GA"] >= threshold), None)


def table(outcomes: Sequence[Outcome], threshold: float) -> list[dict[str, str]]:
    """One row per variant: mean and standard deviation over seeds of GA and LA, and the rounds to a threshold."""
    rows = []
    for variant in dict.fromkeys(outcome.variant for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.variant == variant]
        ended = [outcome.result for outcome in mine if outcome.result.status == "finished"]
        reached = [rounds_to(outcome.result.history, threshold) for outcome in mine]
        numbers = [number for number in reached if number is not None]
        rows.append(
            {
                "method": variant,
                "GA (%)": _spread([100 * result.final["GA"] for result in ended]),
                "LA (%)": _spread([100 * result.final["LA"] for result in ended]),
                f"rounds to {threshold:.0%}": (_spread(numbers, digits=0) if numbers else "never")
                + (f" ({len(numbers)}/{len(mine)})" if numbers and len(numbers) < len(mine) else ""),
                "runs": f"{len(mine)}"
                if len(ended) == len(mine)
                else f"{len(mine)}, {len(mine) - len(ended)} diverged",
            }
        )
    return rows


def _spread(values: Sequence[float], digits: int = 1) -> str:
    if not values:
        return "-"
    mean = f"{fmean(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {stdev(values):.1f}"
