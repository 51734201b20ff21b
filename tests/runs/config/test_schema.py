"""Settings: text and values become values of their types once, and are read back from a run's folder."""

import json
import math
from typing import Any, Literal

import pytest

from fl_lightning import discovery, experiment
from fl_lightning.cli.flags import flags_to_settings
from fl_lightning.errors import UserError
from fl_lightning.runs.config.run_config import configure, read_settings
from fl_lightning.runs.config.schema import PARTS, typed

SMALL = {"method": "fedavg", "model": "softmax", "data.subset": 0.1, "federation.rounds": 1, "engine": "functional"}
Either = float | Literal["auto", "holdout"]


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        (int, "1", 1),
        (int, "010", 10),
        (int, "0x10", 16),
        (float, "1", 1.0),
        (float, "1e-3", 0.001),
        (float, "5.", 5.0),
        (float, ".inf", math.inf),
        (float, 2, 2.0),
        (bool, "true", True),
        (bool, "off", False),
        (str, "1e-3", "1e-3"),
        (str, "'a'", "'a'"),
        (str, "null", "null"),
        (str, 0.1, "0.1"),
        (str, True, "true"),
        (str | None, "null", None),
        (str | None, None, None),
        (str | None, "None", "None"),
        (str | None, 3, "3"),
        (int | None, "~", None),
        (Either, "auto", "auto"),
        (Either, "0.5", 0.5),
        (Literal["mean", "min"] | float, 1, 1.0),
        (Literal[True, "x"], "true", True),
        (tuple[int, ...], "[1, 2]", (1, 2)),
        (tuple[int, ...], [1, 2], (1, 2)),
        (tuple[float, ...], "[1e-3, 2]", (0.001, 2.0)),
        (tuple[str, ...], "[a, b]", ("a", "b")),
        (tuple[int, float], [1, 2], (1, 2.0)),
        (tuple[Literal["map", "probit"], ...], "map,probit", ("map", "probit")),
        (tuple[int, ...], "1, 2", (1, 2)),
        (tuple[tuple[int, ...], ...], "[[1], [2, 3]]", ((1,), (2, 3))),
        (Any, "a: b", {"a": "b"}),
        (Any, "2020-01-01", "2020-01-01"),
        (Any, "*a", "*a"),
    ],
)
def test_what_fits(kind, given, expected):
    found = typed("section.key", kind, given)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        (int, "1.0", "a whole number, got 1.0"),
        (int, 1.0, "a whole number, got 1.0"),
        (int, True, "a whole number, got true"),
        (int | None, "1e-3", "a whole number or null, got 1e-3"),
        (float, "fast", "a number, got fast"),
        (float, "nan", "a number, got nan"),
        (float, math.nan, "a number, got NaN"),
        (float, "", "a number, got ''"),
        (float, "9" * 400, "a number, got 9"),
        (float, "two\nlines", "a number, got two lines"),
        (bool, 1, "true or false, got 1"),
        (Either, "best", "a number or one of auto, holdout, got best"),
        (tuple[int, ...], "3", "a list of whole numbers, such as [1, 2], got 3"),
        (tuple[int, ...], "[x]", "a list of whole numbers, such as [1, 2], got [x]"),
        (tuple[str, ...], [1], "a list of texts, such as [a, b], got [1]"),
        (tuple[int, float], [1], "a list of whole numbers, such as [1, 2], got [1]"),
    ],
)
def test_what_does_not_fit_is_refused_as_it_was_given(kind, given, words):
    with pytest.raises(UserError) as caught:
        typed("section.key", kind, given)
    assert str(caught.value).startswith(f"section.key must be {words}")
    assert "\n" not in str(caught.value)


def test_flags_that_lack_a_value():
    assert flags_to_settings(["--seed", "-1", "--data.path=--x"]) == {"seed": "-1", "data.path": "--x"}
    for flags, words in (
        (["--training.lr"], "--training.lr needs a value"),
        (["--training.lr", "--seed", "1"], "--training.lr needs a value"),
        (["--method", "fedavg", "--strength"], r"\(method.strength here\): the method fedavg does not have it"),
        (["--stop.patience"], "--stop.patience needs a value"),
        (["stray"], "expected a setting as --key value, got 'stray'"),
    ):
        with pytest.raises(UserError, match=words):
            flags_to_settings(flags)


@pytest.mark.parametrize("part", ["method", "model", "engine"])
def test_settings_survive_text_and_json(part):
    """What `--print_config`, MLflow's params and a run's folder hold gives the same configuration again."""
    for name in discovery.names(PARTS[part][0]):
        flat = configure({part: name}).flat()
        assert configure(json.loads(json.dumps(flat))).flat() == flat
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat.items()}
        assert configure(texts).flat() == flat


@pytest.mark.slow
def test_a_folder_holds_its_settings_for_people_and_for_programs(out):
    config = configure(SMALL)
    folder = experiment.run(config, out).folder
    assert read_settings(folder) == json.loads(json.dumps(config.flat()))
    (folder / "settings.json").write_text("{")  # damaged: the other file has them, too
    assert configure(read_settings(folder)) == config
    (folder / "settings.json").unlink()  # as of an older run
    assert configure(read_settings(folder)) == config
    (folder / "config.yaml").unlink()
    with pytest.raises(UserError, match="cannot read the configuration"):
        read_settings(folder)
