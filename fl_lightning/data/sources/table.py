"""Your own table: one row per sample, a column with the label, perhaps one with the client."""

import gzip
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.readers import assemble, fingerprint, targets
from fl_lightning.data.readers.bounds import Bounded, half_of_memory, require_memory
from fl_lightning.data.readers.mapped import Array, mapped
from fl_lightning.errors import UserError, require
from fl_lightning.likelihoods.names import Name as Task

if TYPE_CHECKING:
    import pandas as pd

VERSION = 1
SEPARATORS = {".csv": ",", ".csv.gz": ",", ".tsv": "\t", ".tsv.gz": "\t"}
MOST_CATEGORIES = 50


@dataclass(frozen=True)
class Table(Source):
    """Your own table, Parquet or CSV: one row per sample, a label column, if you like a client column.

    Attributes:
        path: The file, .parquet, .csv or .tsv (the latter two also as .gz).
        label: Column of the label; its values, numbers or text, are the classes. Several columns with commas, such as
            height,weight, are the targets of a regression or the labels of a multilabel task.
        client: Column that names whom a row belongs to, for --data.partition natural; null if there is none.
        split: Column that says train or test for each row; null takes a test share.
        drop: Columns that are no features, such as [patient_id].
        test_share: Share of every class that becomes the test set, where no column says; the same for every seed.
        task: What the label is: classification, binary, multilabel (several columns of 0 and 1) or regression. auto
            takes a column of fractions for a regression, several columns of 0 and 1 for labels, all else for classes.
            Targets of a regression are standardised by the training rows, as features are: RMSE and noise are in units
            of their standard deviation.
        noise: Standard deviation of the targets of a regression around the model.
    """

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
            settings |= {"reader": "table", "version": VERSION, **assemble.told(self.task)}
            arrays = mapped({"": self._file}, self._read, settings)
            return assemble.dataset(arrays, task=self._task(arrays["train_y"]), noise=self.noise)

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
                f"without it, or leave it out by --data.drop ['{column}']",
            )
            _refuse_gaps(column, table[column])
        task, values = self._targets(table, labels)
        arrays = {"train_x": np.arange(len(table))[:, None], "train_y": values}
        if self.client is not None:
            arrays["owners"] = _numbered(table[self.client])[1]
        if self.split is None:
            arrays = assemble.split_off_test(arrays, self.test_share, task)
        else:
            arrays = self._split_by_column(arrays, table, task)
        if "owners" in arrays:  # clients whose rows are all for testing are no clients
            arrays["owners"] = np.unique(arrays["owners"], return_inverse=True)[1]
        train, test = arrays["train_x"][:, 0], arrays["test_x"][:, 0]
        features = [_features(column, table[column], train) for column in table.columns if column not in named.values()]
        require(len(features) > 0, "no column is left for the features")
        x = np.concatenate(features, axis=1)
        arrays |= {"train_x": x[train], "test_x": x[test]}
        if task == "regression":
            scaled = np.stack([_standardised(column, train) for column in values.reshape(len(table), -1).T], axis=1)
            scaled = scaled[:, 0] if values.ndim == 1 else scaled
            arrays |= {"train_y": scaled[train], "test_y": scaled[test]}
        return assemble.complete(arrays, self.test_share, task)

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
            limit, refusal = half_of_memory(), "it unpacks to more text than the free memory holds; use Parquet"
            with (gzip.open if ending.endswith(".gz") else open)(file, "rb") as raw:
                table = pd.read_csv(Bounded(raw, limit, refusal), sep=SEPARATORS[ending], low_memory=False)
        else:
            look = parquet.read_metadata(file)
            require_memory(f"{look.num_rows:,} rows of {look.num_columns}", 8 * look.num_rows * look.num_columns)
            table = pd.read_parquet(file)
    except UserError:
        raise
    # pandas and Arrow have some dozen exceptions for files that are not what their name says.
    except Exception as error:
        raise UserError(f"not a readable {ending} table ({' '.join(str(error).split())[:200]})") from None
    table.columns = table.columns.map(str)
    require(table.columns.is_unique, f"columns must have different names, got {', '.join(table.columns)}")
    return table


def _no_column(name: str, known: list[str]) -> UserError:
    near = get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    more = f" and {len(known) - 40} more" if len(known) > 40 else ""
    return UserError(f"no column {name!r}: {hint}there are {', '.join(known[:40])}{more}")


def _refuse_gaps(name: str, column: "pd.Series[Any]") -> None:
    """Refuse missing values and infinities: what stands for them is the user's decision."""
    missing = column.isna().to_numpy()
    if missing.any():
        row = int(missing.argmax())
        raise UserError(
            f"column {name!r} has no value in row {row + 1} of {len(column)} ({int(missing.sum())} in all); fill or "
            f"remove such rows, or leave the column out by --data.drop [{name}]"
        )
    if column.dtype.kind == "f":
        infinite = ~np.isfinite(column.to_numpy(np.float64))
        require(not infinite.any(), f"column {name!r} is infinite in row {int(infinite.argmax()) + 1}; correct it")


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


def _standardised(values: Array, train: Array) -> Array:
    """With mean 0 and standard deviation 1 in the training rows."""
    spread = values[train].std()
    scaled: Array = (values - values[train].mean()) / (spread if spread > 0 else 1.0)
    return scaled.astype(np.float32)


def _features(name: str, column: "pd.Series[Any]", train: Array) -> Array:
    """Numbers standardised by the training rows, text as one column of 0 and 1 for each value."""
    if column.dtype.kind in "biuf":
        return _standardised(column.to_numpy(np.float64), train)[:, None]
    require(
        column.dtype.kind not in "mMc",
        f"column {name!r} holds {column.dtype}; turn it into numbers, or leave it out by --data.drop [{name}]",
    )
    categories, numbers = _numbered(column)
    require(
        len(categories) <= MOST_CATEGORIES,
        f"column {name!r} holds text with {len(categories):,} different values, more than {MOST_CATEGORIES}; turn it "
        f"into numbers, or leave it out by --data.drop [{name}]",
    )
    indicators: Array = numbers[:, None] == np.arange(len(categories))
    return indicators.astype(np.float32)
