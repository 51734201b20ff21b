"""Studies from files: those that come with the project, and users' YAML or Python files."""

import math
import re
import runpy
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from fl_lightning.errors import UserError, require, unknown
from fl_lightning.metrics.early_stopping import Stop
from fl_lightning.metrics.metric import GA, VALIDATION
from tune.study import MOST_SEEDS, Case, Confirm, Distribution, Given, Range, Search, Study, number, whole

FOLDER = Path(__file__).parent / "studies"
DEFAULT_SCALE = "small"
PLAIN = re.compile(r"\w[\w .-]*")
MOST_LETTERS = 120
# Of a file, and of what its anchors unfold to: a few lines of YAML can stand for more than any memory holds.
MOST_BYTES, MOST_VALUES, DEEPEST = 300_000, 100_000, 20
# What other programs call the keys of a study.
MEANT = {
    **dict.fromkeys(("description", "title", "summary", "doc"), "about"),
    **dict.fromkeys(("grid", "params", "parameters", "hyperparameters", "sweep"), "space"),
    **dict.fromkeys(("settings", "config", "defaults", "fixed", "common"), "base"),
    **dict.fromkeys(("methods", "method", "algorithms"), "cases"),
    **dict.fromkeys(("conditions", "scenarios"), "environments"),
    **dict.fromkeys(("repeats", "repetitions", "runs"), "seeds"),
    **dict.fromkeys(("goal", "objective", "monitor"), "metric"),
}


def names() -> list[str]:
    """The studies that come with the package."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str, scale: str | None = None, overrides: Mapping[str, Any] | None = None) -> Study:
    """What a file describes, by its name among those that come with the package, or by its path.

    Args:
        name: One of `names()`, or a path; a Python file defines a mapping called STUDY.
        scale: Which of its scales; without one `small`, or the study as it stands if it has no scales.
        overrides: Settings for all runs; a key that the study varies is pinned to the value.
    """
    content = _read(name)
    usual = _data_of(content)
    scales = content.pop("scales", {}) or {}
    require(isinstance(scales, Mapping), f"{name}: scales must be a mapping of names, got {scales!r}")
    if scale is not None and scale not in scales:
        if not scales:
            raise UserError(f"study {name} has no scales, got --scale {scale}; leave it out")
        raise unknown("scale", scale, scales)
    for known in scales:
        _require_plain(f"{name}: the name of a scale", known)
    scale = _usual(scale, scales)
    changes = (scales[scale] or {}) if scale else {}
    require(isinstance(changes, Mapping), f"{name}: scale {scale} must be a mapping, got {changes!r}")
    for key, value in changes.items():
        merges = isinstance(content.get(key), Mapping) and isinstance(value, Mapping)
        content[key] = _merged(f"{name}: {key}", key == "base", content[key], value) if merges else value
    if usual != (now := _data_of(content)) and content.get("about"):
        content["about"] = f"{content['about']} (At this scale on {now} instead of {usual}.)"
    content.pop("workers", None)  # see `workers_of`
    title = Path(name).stem if _is_file(name) else name
    return _with_default_metric(_pin(_parse(title, scale or "", content), overrides or {}), content)


def workers_of(name: str, scale: str | None = None) -> int | str | None:
    """What a file says about the processes in which a trial trains its clients, if anything: no part of the study."""
    content = _read(name)
    scales = content.get("scales") or {}
    chosen = scales.get(_usual(scale, scales)) if isinstance(scales, Mapping) else None
    found: int | str | None = (chosen if isinstance(chosen, Mapping) else {}).get("workers", content.get("workers"))
    return found


def _usual(scale: str | None, scales: Mapping[str, Any]) -> str:
    """The scale that is asked for, or the usual one of a study."""
    return scale or (DEFAULT_SCALE if DEFAULT_SCALE in scales else next(iter(scales), ""))


def _merged(where: str, flatten: bool, old: Any, new: Any) -> dict[str, Any]:
    """Two mappings, the new one winning; `training: {lr: 1}` is `training.lr: 1`."""
    return {**_mapping(where, old, flatten), **_mapping(where, new, flatten)}


def _data_of(content: Mapping[str, Any]) -> Any:
    base = content.get("base")
    return base.get("data") if isinstance(base, Mapping) else None


def describe(name: str) -> str:
    """The sentence about a study."""
    return str(_read(name).get("about", ""))


def _is_file(name: str) -> bool:
    return Path(name).suffix in (".yaml", ".yml", ".py")


def _read(name: str) -> dict[str, Any]:
    if not _is_file(name):
        if name not in names():
            raise unknown("study", name, names())
        path = FOLDER / f"{name}.yaml"
    else:
        path = Path(name)
    try:
        if path.suffix == ".py":
            content: Any = runpy.run_path(str(path)).get("STUDY")
            require(content is not None, f"{path} must define STUDY, a mapping; see docs/sweeps.md")
        else:
            size = path.stat().st_size
            require(size <= MOST_BYTES, f"{path} must have at most {MOST_BYTES:,} bytes, got {size:,}; shorten it")
            text = path.read_text(encoding="utf-8")
            # Counted before it is read: merged anchors (<<) unfold while they are.
            require(
                _counted(yaml.compose(text, yaml.SafeLoader), 2 * DEEPEST, MOST_VALUES) <= MOST_VALUES, _too_large(path)
            )
            content = yaml.safe_load(text)
    except FileNotFoundError:
        raise UserError(f"no study at {path}; fl-lightning list studies shows those that come with it") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split()).replace('"<unicode string>"', path.name)
        raise UserError(f"{path} is not valid YAML: {reason}") from None
    except UserError:
        raise
    except RecursionError:
        raise UserError(_too_large(path)) from None
    except (Exception, SystemExit) as error:  # whatever a user's Python file may do
        raise UserError(f"{path} cannot be run: {type(error).__name__}: {error}") from None
    require(_counted(content, DEEPEST, MOST_VALUES) <= MOST_VALUES, _too_large(path))
    require(isinstance(content, Mapping), f"{path} must hold a mapping with base, cases, space, ..., got {content!r}")
    return dict(content)


def _counted(content: Any, deepest: int, most: int) -> int:
    """How many values there are, counted up to so many; nested too deep, or in themselves, they are too many."""
    content = content.value if isinstance(content, yaml.CollectionNode) else content
    if not isinstance(content, Mapping | list | tuple):
        return 1
    number = 1 if deepest else most + 1
    for value in content.values() if isinstance(content, Mapping) else content:
        if number > most:
            break
        number += _counted(value, deepest - 1, most - number)
    return number


def _too_large(path: Path) -> str:
    return (
        f"{path} must hold at most {MOST_VALUES:,} values, nested at most {DEEPEST} deep, got more, counting what its "
        "anchors (&, *) stand for; write out what is meant"
    )


def _require_plain(what: str, name: Any) -> None:
    """Names of studies and scales become names of folders and tags."""
    require(
        isinstance(name, str) and PLAIN.fullmatch(name) is not None and len(name) <= MOST_LETTERS,
        f"{what} must be letters, digits, blanks and any of _ . - and begin with a letter or digit, at most "
        f"{MOST_LETTERS} in all, got {name!r}",
    )


def _parse(name: str, scale: str, content: Mapping[str, Any]) -> Study:
    _require_plain("the name of a study (its file)", name)
    _check_keys(name, content)
    values = dict(content)
    for key in ("environments", "space"):
        if key in values:
            values[key] = _space(f"{name}: {key}", values[key])
    for key in ("base", "reference", "pretrain"):
        if values.get(key) is not None:
            values[key] = _mapping(f"{name}: {key}", values[key])
    values["given"] = tuple(_given(name, item) for item in _listed(f"{name}: given", values.get("given") or ()))
    values["cases"] = tuple(_case(name, item) for item in _listed(f"{name}: cases", values.get("cases", ())))
    values["seeds"] = tuple(dict.fromkeys(seeds_of(f"{name}: seeds", values.get("seeds", 1))))
    for key, cls in (("search", Search), ("stop", Stop)):
        if values.get(key) is not None:
            values[key] = _section(f"{name}: {key}", cls, values[key])
    if values.get("confirm") is not None:
        values["confirm"] = _confirm(name, values["confirm"], values["seeds"])
    if "thresholds" in values:
        levels = values["thresholds"]
        good = isinstance(levels, Sequence) and all(isinstance(level, int | float) for level in levels)
        require(good, f"{name}: thresholds must be a list of numbers, got {levels!r}")
        values["thresholds"] = tuple(levels)
    return Study(name, scale, **values)


def _check_keys(name: str, content: Mapping[str, Any]) -> None:
    """Refuse all unknown keys at once, each with what was meant."""
    known = {item.name for item in fields(Study)} - {"name", "scale", "among"}
    there, hints = ", ".join(sorted({*known, "scales", "workers"})), []
    for key in (str(key) for key in content if key not in known):
        near = [MEANT[key]] if key in MEANT else get_close_matches(key.lower(), known, n=1)
        hint = (
            f" (did you mean {near[0]!r}?)" if near else " (leave it out: the file names the study)" * (key == "name")
        )
        hints.append(f"{key!r}{hint}")
    require(not hints, f"unknown keys in the file of study {name!r}: {', '.join(hints)}; expected some of {there}")


def _case(study: str, content: Any) -> Case:
    settings = {"method": content} if isinstance(content, str) else _mapping(f"{study}: a case", content)
    space = _space(f"{study}: space of a case", settings.pop("space", {}))
    confirming: Any = settings.pop("confirming", None)
    label = settings.pop("label", None) or settings.get("method")
    require(isinstance(label, str), f"{study}: a case must name its method, got {content!r}")
    require(
        str(label).isprintable() and len(str(label)) <= MOST_LETTERS,
        f"{study}: the label of a case must be one line of at most {MOST_LETTERS} letters, got {label!r}",
    )
    return Case(str(label), settings, space, confirming)


def _given(study: str, content: Any) -> Given:
    where = f"{study}: given"
    require(
        isinstance(content, Mapping) and isinstance(content.get("when"), Mapping) and len(content) > 1,
        f"{where} must be a list of conditions with their settings, such as {{when: {{data: cifar10}}, model: cnn}}, "
        f"got {content!r}",
    )
    when = _mapping(where, content["when"])
    settings = _mapping(where, {key: value for key, value in content.items() if key != "when"})
    return Given({key: tuple(v) if isinstance(v, list | tuple) else (v,) for key, v in when.items()}, settings)


def _space(where: str, content: Any) -> dict[str, Range]:
    space = {}
    for key, values in _mapping(where, content or {}, flatten=False).items():
        if isinstance(values, Mapping):
            require(len(values) == 1, f"{where}: {key} must be a list or one of choice, uniform, loguniform")
            ((kind, bounds),) = values.items()
            if kind not in get_args(Distribution):
                raise unknown(f"distribution of {key}", str(kind), get_args(Distribution))
        else:
            kind, bounds = "grid", values
        require(
            isinstance(bounds, Sequence) and not isinstance(bounds, str) and len(bounds) > 0,
            f"{where}: {key} must be a list with at least one value, got {bounds!r}",
        )
        if kind in ("uniform", "loguniform"):
            low, high = (number(bound) for bound in bounds) if len(bounds) == 2 else (math.nan, math.nan)
            require(
                low < high and (kind == "uniform" or low > 0),
                f"{where}: {key} must be {kind}: [low, high] with {'0 < ' * (kind == 'loguniform')}low < high, "
                f"got {bounds!r}",
            )
            bounds = [low, high]
        space[str(key)] = Range(kind, tuple(bounds))
    return space


def seeds_of(where: str, content: Any) -> tuple[int, ...]:
    """The seeds that a number of them, a list, or text with either means.

    >>> seeds_of("--seeds", "3"), seeds_of("--seeds", "0,4"), seeds_of("--seeds", "2-4")
    ((0, 1, 2), (0, 4), (2, 3, 4))
    """
    content = _seeds_in(content)
    if whole(content):
        require(content <= MOST_SEEDS, f"{where} must be at most {MOST_SEEDS:,} in number, got {content}")
        return tuple(range(content))
    good = isinstance(content, Sequence) and not isinstance(content, str) and all(isinstance(s, int) for s in content)
    require(good, f"{where} must be a number of seeds such as 3, or name them as 0,4 or 0-4, got {content!r}")
    return tuple(content)


def _seeds_in(text: Any) -> Any:
    """A number, or a list of numbers and ranges; anything else comes back as it is."""
    if not isinstance(text, str):
        return text
    if text.strip().isdecimal():
        return int(text)
    seeds: list[int] = []
    for part in text.split(","):
        if (found := re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)) is None:
            return text
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            return text
        require(last - first < MOST_SEEDS, f"seeds must be at most {MOST_SEEDS:,} in number, got {text}")
        seeds += range(first, last + 1)
    return seeds


def _confirm(name: str, content: Any, taken: Sequence[int]) -> Confirm:
    """A number of seeds means those after the largest that has a part in choosing."""
    where = f"{name}: confirm"
    settings = _mapping(where, content)
    require("seeds" in settings, f"{where} must say how many seeds, such as confirm: {{seeds: 5}}, got {content!r}")
    seeds = seeds_of(f"{where}.seeds", settings["seeds"])
    if whole(_seeds_in(settings["seeds"])):
        seeds = tuple(max(taken, default=-1) + 1 + seed for seed in seeds)
    return cast("Confirm", _section(where, Confirm, {**settings, "seeds": seeds}))


def _with_default_metric(study: Study, content: Mapping[str, Any]) -> Study:
    """Where the file is silent, settings are chosen on validation data, if every run has them; and `stop` follows."""
    if "metric" not in content:
        share = number(study.base.get("data.validation", 0))
        study = replace(study, metric=VALIDATION if share > 0 else GA)
    if study.stop is not None and "metric" not in content["stop"]:
        study = replace(study, stop=replace(study.stop, metric=study.metric))
    return study


def _section(where: str, cls: type[Any], content: Any) -> Any:
    settings = _mapping(where, content)
    known = [item.name for item in fields(cls)]
    for key in settings:
        if key not in known:
            raise unknown(where, key, known)
    return cls(**settings)


def _mapping(where: str, content: Any, flatten: bool = True) -> dict[str, Any]:
    require(isinstance(content, Mapping), f"{where} must be a mapping, got {content!r}")
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if flatten and isinstance(value, Mapping) and key != "space":
            flat |= {f"{key}.{inner}": v for inner, v in _mapping(where, value).items()}
        else:
            flat[str(key)] = value
    return flat


def _listed(where: str, content: Any) -> Sequence[Any]:
    require(isinstance(content, Sequence) and not isinstance(content, str), f"{where} must be a list, got {content!r}")
    listed: Sequence[Any] = content
    return listed


def _pin(study: Study, overrides: Mapping[str, Any]) -> Study:
    """The study with some settings fixed from outside, whatever it says about them."""
    if not overrides:
        return study

    def without(settings: Mapping[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in settings.items() if key not in overrides}

    cases = tuple(replace(case, settings=without(case.settings), space=without(case.space)) for case in study.cases)
    given = [replace(one, settings=without(one.settings)) for one in study.given]
    values = {item.name: getattr(study, item.name) for item in fields(Study)}
    values |= {
        "base": {**study.base, **overrides},
        "given": tuple(one for one in given if one.settings),
        "environments": without(study.environments),
        "space": without(study.space),
        "cases": cases,
    }
    return Study(**values)
