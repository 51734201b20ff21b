"""The commands that make runs again."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from analysis.study_records import Sweep
from fl_lightning.errors import UserError
from fl_lightning.runs.config.run_config import by_owners
from fl_lightning.runs.config.schema import PARTS, schema_of
from tune import study_file


def sweep_command(sweep: Sweep, place: str) -> str:
    """The command of a sweep, with the settings that were given beside its name.

    Args:
        sweep: From `Runs.sweeps`.
        place: Folder of runs.
    """
    parts = ["fl-lightning", "sweep", sweep.study]
    if sweep.scale != "all":
        parts += ["--scale", sweep.scale]
    try:
        usual = dict(study_file.load(sweep.study, sweep.scale if sweep.scale != "all" else None).base)
    except UserError:  # a comparison, or a user's file
        if (variants := _variants(sweep.content)) is not None:
            return _compare_command(sweep, variants, place)
        parts[2] = f"{sweep.study}.yaml"
        usual = dict(sweep.content.get("base") or {})
    given = sweep.content.get("base") or {}
    labels = [case["label"] for case in sweep.content.get("cases") or ()]
    if set(sweep.content.get("among") or ()) - set(labels):
        parts += ["--cases", ",".join(labels)]
    parts += [f"--{key}={_flag(value)}" for key, value in given.items() if usual.get(key, _MISSING) != value]
    return shlex.join([*parts, "--runs", place])


def _variants(content: Mapping[str, Any]) -> list[str] | None:
    """The cases of a study as `compare` takes them; None if it varies more than the method."""
    cases = content.get("cases") or []
    if content.get("environments") or content.get("space") or content.get("confirm") or content.get("reference"):
        return None
    if any(case.get("space") or not all(key.startswith("method") for key in case["settings"]) for case in cases):
        return None
    return [
        "+".join(
            [f"{case['label']}:{case['settings']['method']}"]
            + [f"{key.removeprefix('method.')}={_flag(v)}" for key, v in case["settings"].items() if key != "method"]
        )
        for case in cases
    ]


def _compare_command(sweep: Sweep, variants: Sequence[str], place: str) -> str:
    seeds = ",".join(map(str, sweep.content["seeds"]))
    settings = [f"--{key}={_flag(value)}" for key, value in (sweep.content.get("base") or {}).items()]
    parts = ["fl-lightning", "compare", "--methods", ",".join(variants), "--seeds", seeds, *settings]
    return shlex.join([*parts, "--name", sweep.study, "--runs", place])


def run_command(run: "Mapping[str, Any] | pd.Series[Any]", place: str) -> str:
    """The command of one run: every setting that is not as by default.

    Args:
        run: A row of `Study.runs`.
        place: Folder of runs.
    """
    names = {part: str(run[part]) for part in PARTS if part in run}
    try:
        names = {**{part: default for part, (_, default, _) in PARTS.items()}, **names}
        schema, owned = schema_of(names), by_owners(names, dict(run))
    except UserError:  # a plugin that is not here
        schema, owned = {}, {}
    flags = []
    for key, item in schema.items():
        value = run.get(key)
        if value is None or (isinstance(value, float) and pd.isna(value)):
            continue
        if _flag(value) != _flag(owned.get(key, item.default)) and key != "data.root":
            flags += [f"--{key}", _flag(value)]
    return shlex.join(["fl-lightning", "run", *flags, "--runs", place])


_MISSING = object()


def _flag(value: Any) -> str:
    if isinstance(value, str):
        return value
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return json.dumps(value)
