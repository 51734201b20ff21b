"""--data table: Parquet and CSV."""

import re
import shlex

import numpy as np
import pandas as pd
import pytest
import torch

from analysis.commands import run_command
from fl_lightning.cli.flags import flags_to_settings
from fl_lightning.data.sources.table import Table
from fl_lightning.errors import UserError
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.identity import identity


def patients(**changes):
    rng = np.random.default_rng(0)
    number = 60
    columns = {
        "age": rng.integers(20, 90, number),
        "pressure": rng.normal(120, 15, number),
        "smoker": rng.integers(2, size=number).astype(bool),
        "sex": np.array(["f", "m"])[np.arange(number) % 2],
        "hospital": np.array(["north", "south", "east"])[rng.integers(3, size=number)],
        "outcome": np.array(["well", "ill", "dead"])[np.arange(number) % 3],
    }
    return pd.DataFrame(columns | changes)


SETTINGS = {"label": "outcome", "client": "hospital"}


def store(table, path):
    match "".join(path.suffixes):
        case ".parquet" | ".pq":
            table.to_parquet(path)
        case ".tsv":
            table.to_csv(path, index=False, sep="\t")
        case _:
            table.to_csv(path, index=False)
    return str(path)


@pytest.fixture
def load(tmp_path):
    def load(table, ending=".parquet", **settings):
        return Table(path=store(table, tmp_path / f"patients{ending}"), **(SETTINGS | settings)).load()

    return load


@pytest.mark.parametrize("ending", [".parquet", ".pq", ".csv", ".tsv", ".csv.gz"])
def test_rows_become_samples(load, ending):
    table = patients()
    data = load(table, ending)
    assert data.shape == (5,), "age, pressure, smoker, and two for sex"
    assert (len(data.train_x), len(data.test_x), data.num_classes) == (48, 12, 3)
    assert data.train_x.dtype == torch.float32
    assert data.test_y.bincount().tolist() == [4, 4, 4]
    assert data.owners.unique().tolist() == [0, 1, 2]
    reference = load(patients(), ".parquet")
    assert torch.equal(data.train_x, reference.train_x)
    assert torch.equal(data.test_y, reference.test_y)


def test_numbers_are_standardised_by_the_training_rows_alone(load):
    data = load(patients())
    numbers = data.train_x[:, :3].double()
    torch.testing.assert_close(numbers.mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-6, rtol=0)
    torch.testing.assert_close(numbers.std(0, correction=0), torch.ones(3, dtype=torch.float64), atol=1e-6, rtol=0)
    assert data.test_x[:, :3].mean(0).abs().max() > 1e-3
    assert data.train_x[:, 3:].sum(1).eq(1).all(), "one of f and m"


def test_a_column_says_what_is_for_testing(load):
    words = np.array([" Train", "test", "TRAIN"])[np.arange(60) // 20]
    table = patients(part=words)
    data = load(table, split="part", client=None)
    assert (len(data.train_y), len(data.test_y)) == (40, 20)
    classes = ["dead", "ill", "well"]
    assert data.test_y.tolist() == [classes.index(value) for value in table["outcome"][20:40]]
    assert data.owners is None
    mean, std = table["age"][words != "test"].mean(), table["age"][words != "test"].std(ddof=0)
    torch.testing.assert_close(
        data.test_x[:, 0].double(), torch.tensor(((table["age"][20:40] - mean) / std).to_numpy()), atol=1e-5, rtol=0
    )


def test_clients_with_test_rows_alone_are_no_clients(load):
    hospitals = np.array(["b", "a", "c"])[np.arange(60) // 20]
    words = np.array(["train", "test", "train"])[np.arange(60) // 20]
    data = load(patients(hospital=hospitals, part=words), split="part")
    assert data.owners.tolist() == [0] * 20 + [1] * 20


@pytest.mark.parametrize(
    "labels",
    [
        np.arange(60) % 3 + 5,
        (np.arange(60) % 3).astype(float),
        np.arange(60) % 2 == 1,
        pd.Categorical(list("abc") * 20),
    ],
    ids=["numbers", "whole floats", "booleans", "categories"],
)
def test_labels_of_every_kind(load, labels):
    data = load(patients(outcome=labels))
    assert data.num_classes == len(set(labels))
    assert data.train_y.unique().tolist() == list(range(data.num_classes))


def test_numbers_with_pandas_own_types(load):
    table = patients().astype({"age": "Int64", "pressure": "Float64", "smoker": "boolean", "sex": "category"})
    assert torch.equal(load(table).train_x, load(patients()).train_x)


def test_a_constant_column_is_zero(load):
    assert load(patients(age=7)).train_x[:, 0].eq(0).all()


FLAWED = np.arange(60.0)
FLAWED[[6, 9]] = np.nan
ENDLESS = np.arange(60.0)
ENDLESS[9] = np.inf
HUGE, FAR = np.arange(60.0) / 7, np.arange(60.0) * 1e-9
HUGE[9], FAR[9] = 1e39, 1e38


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {"label": "outcom"}, "no column 'outcom': did you mean 'outcome'\\? there are age, pressure, smoker"),
        ({}, {"client": "clinic"}, "no column 'clinic': there are age"),
        ({}, {"split": "part"}, "no column 'part'"),
        ({}, {"drop": ("agee",)}, "no column 'agee': did you mean 'age'"),
        ({}, {"client": "outcome"}, "must be different columns"),
        ({"age": FLAWED}, {}, r"column 'age' has no value in row 7 of 60 \(2 in all\); .*--data.drop '\[\"age\"\]'"),
        ({"sex": [None] + ["f"] * 59}, {}, "column 'sex' has no value in row 1"),
        ({"outcome": ["a", None] + ["b"] * 58}, {}, "column 'outcome' has no value in row 2"),
        ({"hospital": ["a", None] + ["b"] * 58}, {}, "column 'hospital' has no value in row 2"),
        ({"age": ENDLESS}, {}, r"column 'age' must hold numbers of at most 3.4e\+38, got inf in row 10; correct it"),
        (
            {"outcome": np.arange(60) / 7},
            {"task": "classification"},
            "column 'outcome' must hold classes, got the fraction 0.142857",
        ),
        ({"outcome": "ill"}, {}, "at least two classes, got 'ill' alone"),
        ({"name": [f"p{i}" for i in range(60)]}, {}, r"'name' holds text with 60 different values.*--data hf"),
        ({"day": pd.Timestamp("2020-01-01")}, {}, r"column 'day' holds datetime64.*drop '\[\"day\"\]'"),
        ({"part": "train"}, {"split": "part"}, "rows of both train and test"),
        ({"part": ["train", "val"] * 30}, {"split": "part"}, "must say train or test, got 'val'"),
        (
            {"part": np.where(np.arange(60) % 3 == 2, "test", "train")},
            {"split": "part"},
            "class 'dead' of column 'outcome' has test rows but no training rows",
        ),
        ({"Unnamed: 0": np.arange(60)}, {}, "'Unnamed: 0' is a column without a name"),
        ({"age": HUGE}, {}, r"column 'age' must hold numbers of at most 3.4e\+38, got 1e\+39 in row 10; correct it"),
        ({"outcome": HUGE}, {}, r"column 'outcome' must hold numbers of at most 3.4e\+38, got 1e\+39 in row 10"),
        (
            {"age": FAR, "part": ["test"] * 20 + ["train"] * 40},
            {"split": "part"},
            r"column 'age' must hold numbers of one scale, got 1e\+38 in row 10",
        ),
    ],
)
def test_tables_that_do_not_fit_are_refused(load, tmp_path, changes, settings, message):
    with pytest.raises(UserError, match=message) as caught:
        load(patients(**changes), **settings)
    assert str(caught.value).startswith(str(tmp_path / "patients.parquet"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Unnamed: 0", "a b", "it's", 'say "x"', "$HOME", "[x]", "größe", "-x", "null"])
@pytest.mark.parametrize("column", [FLAWED, pd.Timestamp("2020-01-01"), [f"p{i}" for i in range(60)], ENDLESS])
def test_the_hint_to_leave_a_column_out_works_as_it_is_printed(tmp_path, name, column):
    path = store(patients(**{name: column}), tmp_path / "patients.parquet")
    settings = {"data": "table", "data.path": path, "data.label": "outcome", "data.drop": ["age"]}
    with pytest.raises(UserError) as caught:
        configure(settings).source.load()
    hint = re.search(r"--data\.drop .*?(?=, or save|$)", str(caught.value))[0]
    pasted = flags_to_settings(shlex.split(hint))
    assert configure(settings | pasted).source.load().shape == (7,), "without age, too"


@pytest.mark.parametrize("ending", [".csv", ".csv.gz", ".tsv"])
def test_two_columns_of_one_name_are_refused(tmp_path, ending):
    table = patients()
    table.columns = ["age", "outcome", "smoker", "sex", "hospital", "outcome"]
    with pytest.raises(UserError, match=r"columns must have different names, got 'outcome' in columns 2, 6; rename"):
        Table(path=store(table, tmp_path / f"patients{ending}"), label="outcome").load()


def test_columns_that_are_no_features_are_left_out(load):
    table = patients(name=[f"p{i}" for i in range(60)], age=FLAWED)
    assert load(table, drop=("name", "age")).shape == (4,)
    with pytest.raises(UserError, match="no column is left for the features"):
        load(table[["hospital", "outcome"]])
    with pytest.raises(UserError, match="no rows"):
        load(patients()[:0])


def test_files_that_are_something_else_are_named(tmp_path):
    for name, content in (
        ("a.parquet", b"not parquet"),
        ("b.csv", b""),
        ("c.csv", b"a,b\n1,2,3\n4\n5,6,7,8\n"),
        ("d.csv", b"a,b\n\xff\xfe\x00"),
        ("e.csv.gz", b"not gzip"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UserError, match="not a readable") as caught:
            Table(path=str(tmp_path / name), label="a").load()
        assert "\n" not in str(caught.value)
    (tmp_path / "table.xlsx").write_bytes(b"")
    with pytest.raises(UserError, match=r"expected a table that ends with .parquet"):
        Table(path=str(tmp_path / "table.xlsx"), label="a").load()
    with pytest.raises(UserError, match="No such file"):
        Table(path=str(tmp_path / "none.csv"), label="a").load()


def test_settings_that_are_missing():
    with pytest.raises(UserError, match=r"data.path is missing"):
        Table(label="y")
    with pytest.raises(UserError, match=r"data.label is missing"):
        Table(path="x.csv")


def test_a_changed_table_is_another_run(tmp_path):
    def known_by(table):
        path = store(table, tmp_path / "patients.parquet")
        return identity(configure({"data": "table", "data.path": path, "data.label": "outcome"}))

    assert known_by(patients()) == known_by(patients())
    assert known_by(patients()) != known_by(patients(age=3))


def test_a_client_column_divides_the_rows_unless_another_partition_is_given(tmp_path):
    path = store(patients(), tmp_path / "patients.csv")
    settings = {"data": "table", "data.path": path, "data.label": "outcome"}
    assert configure(settings).split.partition == "dirichlet"
    assert configure(settings | {"data.client": None}).split.partition == "dirichlet"
    by_hospital = configure(settings | {"data.client": "hospital"})
    assert by_hospital.split.partition == "natural"
    explicit = configure(settings | {"data.client": "hospital", "data.partition": "iid"})
    assert explicit.split.partition == "iid"
    for config in (by_hospital, explicit, configure({**explicit.flat(), "data.partition": "dirichlet"})):
        assert configure(config.flat()) == config
        words = shlex.split(run_command(config.flat(), "runs"))[2:]
        assert configure(flags_to_settings(words[: words.index("--runs")])) == config
