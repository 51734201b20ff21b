"""Names from a study become folders and tags: those that lead elsewhere are refused before anything is written."""

import random

import pytest
import yaml

from fl_lightning.errors import UserError
from tune.study_file import load

BASE = {"base": {"data": "digits"}, "cases": ["fedavg"]}
BAD = [
    "x/../../../ESCAPED",
    "../x",
    "/etc/x",
    "a\\b",
    "..",
    ".",
    ".hidden",
    "",
    " ",
    "a\nb",
    "a\0b",
    "-rf",
    "a*",
    "x" * 300,
]


@pytest.mark.parametrize("name", [*BAD, 3, None, True])
def test_scales(tmp_path, name):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**BASE, "scales": {name: {"seeds": 1}, "good": {}}}))
    for scale in (None, "good", name):
        with pytest.raises(UserError, match="the name of a scale"):
            load(str(path), scale)


@pytest.mark.parametrize("name", [".hidden", "-rf", "a*", "a\nb", "a?b", "x" * 130])
def test_studies(tmp_path, name):
    path = tmp_path / f"{name}.yaml"
    path.write_text(yaml.safe_dump(BASE))
    with pytest.raises(UserError, match="name of a study") as caught:
        load(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("label", ["a\nb", "a\x1b[0m", "a\0b", "x" * 130, "a\u2028b"])
def test_labels(tmp_path, label):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({**BASE, "cases": [{"label": label, "method": "fedavg"}]}))
    with pytest.raises(UserError, match="label of a case"):
        load(str(path))


def test_usual_names_stay(tmp_path):
    path = tmp_path / "my study-2.v1_é.yaml"
    path.write_text(yaml.safe_dump({**BASE, "scales": {"small": {}, "groß 2.0": {}}}))
    assert load(str(path)).name == "my study-2.v1_é"
    assert load(str(path), "groß 2.0").scale == "groß 2.0"


def test_whatever_is_accepted_stays_inside(tmp_path):
    rng, accepted = random.Random(0), 0
    for _ in range(400):
        name = "".join(rng.choices("ab. /\\-_~\0\n$é", k=rng.randint(1, 6)))
        path = tmp_path / "mine.yaml"
        path.write_text(yaml.safe_dump({**BASE, "scales": {name: {}}}))
        try:
            study = load(str(path), name)
        except UserError:
            continue
        accepted += 1
        place = (tmp_path / "out" / f"{study.name}-{study.scale}").resolve()
        assert place.parent == tmp_path / "out"
    assert accepted > 20
