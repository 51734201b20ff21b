"""Your own table: one row per sample, a column with the label, perhaps one with the client."""

import gzip
import json
import shlex
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch

from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.preparation import Column, column_of
from fl_lightning.data.readers import assemble, fingerprint, targets
from fl_lightning.data.readers.memory_map import Array, mapped
from fl_lightning.errors import UserError, require
from fl_lightning.models.likelihoods import TaskName as Task
from fl_lightning.system import memory

if TYPE_CHECKING:
    import pandas as pd

VERSION = 2  # of prepared copies
SEPARATORS = {".csv": ",", ".csv.gz": ",", ".tsv": "\t", ".tsv.gz": "\t"}
MOST_CATEGORIES = 50
# Of float32, which holds the features.
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Table(Source):
    """Your own table, Parquet or CSV: one row per sample, a label column, if you like a client column.

    Attributes:
        path: The file, .parquet, .csv or .tsv (the latter two also as .gz).
        label: Column of the label; its values, numbers or text, are the classes. Several columns with commas, such as
            height,weight, are the targets of a regression or the labels of a multilabel task.
        client: Column that names the owner of each row, or null. With it data.partition is natural,
            unless another one is given.
        split: Column with train or test in each row; null takes a test share.
        drop: Columns to leave out, such as [patient_id].
        test_share: Share of every class that becomes the test set, where no column names it; the same for every seed.
        task: What the label is: classification, binary, multilabel (several columns of 0 and 1) or regression. auto
            takes a column of fractions for a regression, several columns of 0 and 1 for labels, all else for classes.
            Targets of a regression are standardised by the training rows, as features are: RMSE and noise are in units
            of their standard deviation.
        noise: Standard deviation of the targets of a regression around the model.
    """

    owners_by: ClassVar[str | None] = "client"

    path: str = ""
    label: str = ""
    client: str | None = None
    split: str | None = None
    drop: tuple[str, ...] = ()
    test_share: float = 0.2
    task: Task = "auto"
    noise: float = 1.0

    def __post_init__(self) -> None:
        assemble.given_path(self.path, "my.parquet")
        require(self.label != "", "data.label is missing: name the column of the label, for example --data.label y")
        assemble.check_share(self.test_share)

    def load(self) -> Dataset:
        settings = {name: getattr(self, name) for name in ("label", "client", "split", "drop", "test_share")}
        with assemble.blaming(self._file):
            settings |= {"reader": "table", "version": VERSION, **assemble.task_setting(self.task)}
            arrays = mapped({"": self._file}, self._read, settings)
            found = assemble.dataset(arrays, task=self._task(arrays["train_y"]), noise=self.noise)
            columns, targets = (tuple(map(column_of, one)) for one in json.loads(arrays["columns"].tobytes()))
            return replace(found, columns=columns, target_columns=targets)

    def fingerprint(self) -> str:
        return fingerprint.of_files({"": self._file})

    @property
    def _file(self) -> Path:
        return assemble.given_path(self.path, "my.parquet")

    def _read(self) -> dict[str, Array]:
        table = _frame(self._file)
        labels = [self.label] if self.label in table.columns else [name.strip() for name in self.label.split(",")]
        roles = {"client": self.client, "split": self.split}
        named = {"label": labels[0], **{f"label {n}": name for n, name in enumerate(labels) if n}}
        named |= {role: column for role, column in roles.items() if column is not None}
        for column in (*named.values(), *self.drop):
            if column not in table.columns:
                raise _no_column(column, list(table.columns))
        require(len(set(named.values())) == len(named), f"label, client and split must be different columns: {named}")
        table = table.drop(columns=[column for column in self.drop if column not in named.values()])
        require(len(table) > 0, "the table has no rows")
        for column in table.columns:
            require(
                not column.startswith("Unnamed:"),
                f"{column!r} is a column without a name, often an index that was saved by accident; write the table "
                f"without it, or {self._without(column)}",
            )
            _refuse_gaps(column, table[column], self._without(column))
        task, values = self._targets(table, labels)
        arrays = {"train_x": np.arange(len(table))[:, None], "train_y": values}
        if self.client is not None:
            arrays["owners"] = _numbered(table[self.client])[1]
        if self.split is None:
            arrays = assemble.split_off_test(arrays, self.test_share, task)
        else:
            arrays = self._split_by_column(arrays, table, task)
        if "owners" in arrays:  # clients whose rows are all for testing do not count as clients
            arrays["owners"] = np.unique(arrays["owners"], return_inverse=True)[1]
        train, test = arrays["train_x"][:, 0], arrays["test_x"][:, 0]
        features = [
            _features(column, table[column], train, self._without(column))
            for column in table.columns
            if column not in named.values()
        ]
        require(len(features) > 0, "no column is left for the features")
        x = np.concatenate(features, axis=1)
        arrays |= {"train_x": x[train], "test_x": x[test]}
        features_of = [str(column) for column in table if column not in named.values()]
        described = [[_described(column, table[column], train) for column in features_of]]
        described += [[_described(label, table[label], train) for label in labels if task == "regression"]]
        if task == "regression":
            columns = zip(labels, values.reshape(len(table), -1).T, strict=True)
            scaled = np.stack([_standardised(name, column, train) for name, column in columns], axis=1)
            scaled = scaled[:, 0] if values.ndim == 1 else scaled
            arrays |= {"train_y": scaled[train], "test_y": scaled[test]}
        text = np.frombuffer(json.dumps(described).encode(), np.uint8)
        return assemble.complete(arrays, self.test_share, task) | {"columns": text}

    def _without(self, column: str) -> str:
        """How to leave a column out, besides those that are left out already."""
        columns = json.dumps([*self.drop, column], ensure_ascii=False)
        return f"leave the column out by {shlex.join(['--data.drop', columns])}"

    def _task(self, targets: Array) -> Task:
        """Of prepared targets."""
        kinds: dict[str, Task] = {"f": "regression", "b": "multilabel"}
        return self.task if self.task != "auto" else kinds.get(targets.dtype.kind, "classification")

    def _targets(self, table: "pd.DataFrame", labels: list[str]) -> tuple[Task, Array]:
        """What the targets are, and their values."""
        columns = [table[label] for label in labels]
        numeric = all(column.dtype.kind in "biuf" for column in columns)
        task = self.task
        if task == "auto":
            yes_no = numeric and all(column.isin([0, 1]).all() for column in columns)
            fractions = any(column.dtype.kind == "f" and bool((column % 1 != 0).any()) for column in columns)
            task = "multilabel" if len(labels) > 1 and yes_no else "regression" if fractions else "classification"
        require(task != "tokens", "data.task tokens needs sequences; use --data arrays or --data function")
        if task in ("classification", "binary"):
            require(len(labels) == 1, f"data.task {task} needs one label, got columns {', '.join(labels)}")
            return task, _classes(labels[0], columns[0])
        require(numeric, f"data.task {task} needs columns of numbers, got text in {', '.join(labels)}")
        values = np.stack([column.to_numpy(np.float64) for column in columns], axis=1)
        single = len(labels) == 1 and task == "regression"
        return task, targets.converted("label", values[:, 0] if single else values, task)

    def _split_by_column(self, arrays: dict[str, Array], table: "pd.DataFrame", task: Task) -> dict[str, Array]:
        words = table[self.split].astype(str).str.strip().str.lower().to_numpy()
        for word in np.unique(words):
            require(word in ("train", "test"), f"column {self.split!r} must say train or test, got {word!r}")
        is_test = words == "test"
        require(0 < is_test.sum() < len(words), f"column {self.split!r} must have rows of both train and test")
        unseen = np.setdiff1d(arrays["train_y"][is_test], arrays["train_y"][~is_test])
        if len(unseen) and task == "classification":
            name = _numbered(table[self.label])[0][unseen[0]]
            raise UserError(f"class {name!r} of column {self.label!r} has test rows but no training rows")
        halves = {name: array[~is_test] for name, array in arrays.items()}
        return halves | {"test_x": arrays["train_x"][is_test], "test_y": arrays["train_y"][is_test]}


def _frame(file: Path) -> "pd.DataFrame":
    """The file as a table."""
    import pandas as pd
    from pyarrow import parquet

    ending = "".join(file.suffixes[-2:]).lower() if file.suffix == ".gz" else file.suffix.lower()
    require(
        ending in (".parquet", ".pq", *SEPARATORS),
        f"expected a table that ends with .parquet, .pq or {', '.join(SEPARATORS)}, got {file.name}",
    )
    try:
        if ending in SEPARATORS:
            _refuse_more_than_memory(file)
            head = pd.read_csv(file, sep=SEPARATORS[ending], header=None, nrows=1, dtype=str)
            _refuse_twice(head.iloc[0].dropna().tolist())  # pandas would call the second y.1
            table = pd.read_csv(file, sep=SEPARATORS[ending], low_memory=False)
        else:
            look = parquet.read_metadata(file)
            memory.require_room_for_data(
                f"{look.num_rows:,} rows of {look.num_columns}", 8 * look.num_rows * look.num_columns
            )
            table = pd.read_parquet(file)
    except UserError:
        raise
    # pandas and Arrow have some dozen exceptions for files that are not what their name says.
    except Exception as error:
        raise UserError(f"not a readable {ending} table ({' '.join(str(error).split())[:200]})") from None
    table.columns = table.columns.map(str)
    _refuse_twice(list(table.columns))
    return table


def _refuse_more_than_memory(file: Path) -> None:
    """Refuse a text that unpacks to more than half of the free memory: a few kilobytes of gzip can hold terabytes."""
    free = memory.available(torch.device("cpu"))
    with (gzip.open if file.suffix.lower() == ".gz" else open)(file, "rb") as content:
        while free is not None and content.read(2**20):
            require(content.tell() <= free // 2, "it unpacks to more text than the free memory holds; use Parquet")


def _refuse_twice(names: list[str]) -> None:
    """Refuse two columns of one name: which of them is meant is the user's decision."""
    twice = next((name for name in names if names.count(name) > 1), None)
    places = ", ".join(str(place) for place, name in enumerate(names, start=1) if name == twice)
    require(
        twice is None, f"columns must have different names, got {twice!r} in columns {places}; rename or remove one"
    )


def _no_column(name: str, known: list[str]) -> UserError:
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    more = f" and {len(known) - 40} more" if len(known) > 40 else ""
    return UserError(f"no column {name!r}: {hint}there are {', '.join(known[:40])}{more}")


def _refuse_gaps(name: str, column: "pd.Series[Any]", without: str) -> None:
    """Refuse missing values and infinities: what stands for them is the user's decision."""
    missing = column.isna().to_numpy()
    if missing.any():
        row = int(missing.argmax())
        raise UserError(
            f"column {name!r} has no value in row {row + 1} of {len(column)} ({int(missing.sum())} in all); fill or "
            f"remove such rows, or {without}"
        )
    if column.dtype.kind == "f":
        values = column.to_numpy(np.float64)
        large = ~(np.abs(values) <= LARGEST)
        row = int(large.argmax())
        require(
            not large.any(),
            f"column {name!r} must hold numbers of at most {LARGEST:.2g}, got {values[row]:g} in row {row + 1}; "
            f"correct it, remove the row, or {without}",
        )


def _classes(name: str, column: "pd.Series[Any]") -> Array:
    """Labels 0 .. K - 1 in the order of the column's values."""
    if column.dtype.kind == "f":
        values = column.to_numpy(np.float64)
        broken = values != np.floor(values)
        require(not broken.any(), f"column {name!r} must hold classes, got the fraction {values[broken.argmax()]:g}")
    classes, labels = _numbered(column)
    require(len(classes) > 1, f"column {name!r} must hold at least two classes, got {classes[0]!r} alone")
    return labels


def _numbered(column: "pd.Series[Any]") -> tuple[list[Any], Array]:
    """The different values in order, and for each row which it is."""
    plain = column.to_numpy() if column.dtype.kind in "biufM" else column.astype(str).to_numpy(str)
    values, numbers = np.unique(plain, return_inverse=True)
    return values.tolist(), numbers.astype(np.int64)


def _standardised(name: str, values: Array, train: Array) -> Array:
    """With mean 0 and standard deviation 1 in the training rows."""
    spread = values[train].std()
    scaled: Array = (values - values[train].mean()) / (spread if spread > 0 else 1.0)
    row = int(np.abs(scaled).argmax())
    require(
        abs(scaled[row]) <= LARGEST,
        f"column {name!r} must hold numbers of one scale, got {values[row]:g} in row {row + 1}, too far from the "
        "training rows; correct it or remove the row",
    )
    return scaled.astype(np.float32)


def _features(name: str, column: "pd.Series[Any]", train: Array, without: str) -> Array:
    """Numbers standardised by the training rows, text as one column of 0 and 1 for each value."""
    if column.dtype.kind in "biuf":
        return _standardised(name, column.to_numpy(np.float64), train)[:, None]
    require(
        column.dtype.kind not in "mMc",
        f"column {name!r} holds {column.dtype}; turn it into numbers, or {without}",
    )
    categories, numbers = _numbered(column)
    require(
        len(categories) <= MOST_CATEGORIES,
        f"column {name!r} holds text with {len(categories):,} different values, more than {MOST_CATEGORIES}; turn it "
        f"into numbers, {without}, or save it by `datasets` and train on the text by --data hf (docs/data.md)",
    )
    indicators: Array = numbers[:, None] == np.arange(len(categories))
    return indicators.astype(np.float32)


def _described(name: str, column: "pd.Series[Any]", train: Array) -> Column:
    """How a column becomes features, for use on other rows."""
    if column.dtype.kind not in "biuf":
        return Column(name, values=tuple(_numbered(column)[0]))
    values = column.to_numpy(np.float64)[train]
    return Column(name, float(values.mean()), float(values.std()) or 1.0)
