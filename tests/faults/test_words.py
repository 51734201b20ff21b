"""A user's words in tables, pictures and files, whatever they are."""

import csv
import io
import random
import re
from pathlib import Path

import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure

from analysis import style
from fl_lightning.errors import UserError
from fl_lightning.runs.config import run_config
from fl_lightning.runs.plotting import run_figures
from fl_lightning.system.text import as_csv, harmless, original
from tune import study_file

ROOT = Path(__file__).parents[2]
BROKEN = [r"$\frac{$", "$", "$$", "a $ b $ c", r"$\nothing$", "$x^$", r"\$5 and $6", "$a$ $b", "$\n$"]
FORMULAS = ["=cmd|' /C calc'!A0", "@SUM(1)", "+1+1", "-2+3", "\t=1", "\r=1", "\uff1d1", "-x", "=", "'=1", "''=1"]
NUMBERS = [-1.5, "-1.5", "+3", "-inf", "1e-3", 0, True, None, "", "FOLA", "'a", "a=b", "–"]


@pytest.mark.system
@pytest.mark.parametrize("label", BROKEN)
def test_a_label_that_is_no_mathematics_is_drawn_as_it_is(tmp_path, label):
    drawn = run_figures.learning_curves(label, [{"GA": 0.5, "LA": 0.4}] * 3, title=label)
    assert run_figures.save(drawn, tmp_path / "a.png").stat().st_size > 1000
    figure = style.Picture()
    panel = figure.subplots()
    panel.set(xlabel=label, title=label, xticks=[0, 1], xticklabels=[label, r"$\lambda$"])
    panel.plot([0, 1], label=label)
    panel.legend()
    for path in style.save(figure, tmp_path / "b"):
        assert path.stat().st_size > 500


def test_mathematics_stays_mathematics(tmp_path):
    figure = Figure()
    title = figure.suptitle(r"$\frac{1}{2}$")
    run_figures.save(figure, tmp_path / "a.png")
    assert title.get_parse_math()


@pytest.mark.parametrize("text", FORMULAS)
@pytest.mark.parametrize("dtype", [None, object])
def test_no_cell_of_a_table_is_a_formula(text, dtype):
    table = pd.DataFrame([{text: text, "n": -1.5}, {text: "a", "n": 2.0}], dtype=dtype)
    written = [*csv.reader(io.StringIO(as_csv(table), newline=""))]
    assert written[0][0] == written[1][0] == "'" + text
    assert written[1][1] == "-1.5"
    assert original(written[1][0]) == text


@pytest.mark.parametrize("value", NUMBERS)
def test_other_cells_stay_as_they_are(value):
    assert harmless(value) is value


def test_cells_are_read_back_as_they_were():
    rng = random.Random(0)
    for _ in range(2000):
        text = "".join(rng.choices("=+-@'a1.\t,\"", k=rng.randint(0, 5)))
        cell = harmless(text)
        assert original(cell) == text or cell == text


def test_everybody_writes_tables_by_the_one_writer():
    for folder in ("fl_lightning", "tune", "analysis"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "text.py":
                assert not re.search(r"to_csv\(|csv\.(Dict)?[wW]riter", path.read_text(encoding="utf-8")), path


def test_files_have_an_encoding_whatever_the_locale():
    """What ruff's PLW1514 sees only where it knows that something is a path."""
    for folder in ("fl_lightning", "tune", "analysis"):
        for path in (ROOT / folder).rglob("*.py"):
            for line in path.read_text(encoding="utf-8").splitlines():
                assert not re.search(r"\.(read|write)_text\(", line) or "encoding=" in line, (path, line)


@pytest.mark.parametrize("content", ["about: größer".encode("latin-1"), b"\xff\xfea\x00", b"\x80", b"a: \x00"])
def test_files_that_are_not_utf_8(tmp_path, content):
    path = tmp_path / "mine.yaml"
    path.write_bytes(content)
    for read in (study_file.load, run_config.read_yaml):
        with pytest.raises(UserError, match=re.escape(str(path))) as caught:
            read(str(path))
        assert "\n" not in str(caught.value)


def test_utf_8_is_read(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_bytes(yaml.safe_dump({"about": "größer", "cases": ["fedavg"]}, allow_unicode=True).encode())
    assert study_file.load(str(path)).about == "größer"
