"""Datasets of Hugging Face that lie on disk, read by pyarrow alone: no code of theirs is executed.

`datasets.save_to_disk` writes a folder with `state.json`, which names files in Arrow's stream format, and
`dataset_info.json` with the meaning of the columns; of several splits one such folder each, beside `dataset_dict.json`.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from fl_lightning.data.augment import Name
from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.readers import assemble, fingerprint, text
from fl_lightning.data.readers.image_files import decode
from fl_lightning.data.readers.memory_map import Array, mapped
from fl_lightning.errors import UserError, require

DICTIONARY, STATE, INFO = "dataset_dict.json", "state.json", "dataset_info.json"
# What an input may be, the likelier first.
INPUTS = ("image", "text", "numbers")


class Split(NamedTuple):
    """One split on disk.

    Attributes:
        folder: Where it is.
        files: Of its rows, in order.
        features: What `datasets` says of each column.
    """

    folder: Path
    files: tuple[Path, ...]
    features: Mapping[str, Any]


class Columns(NamedTuple):
    """Which columns are used, and what the input is: image, text or numbers."""

    input: str
    label: str
    client: str | None
    kind: str


def splits_of(folder: Path, train: str, test: str) -> dict[str, Split]:
    """Train and test, or train alone where there is no split of the usual name for the other."""
    require(folder.is_dir(), f"data.path must be a folder that save_to_disk has written, not a folder: {folder}")
    if not (folder / DICTIONARY).exists():
        return {"train": _split(folder)}
    listed = _json(folder / DICTIONARY).get("splits")
    require(isinstance(listed, list), f"{folder / DICTIONARY} must hold a list of splits; save the dataset again")
    names = list(map(str, listed or ()))
    found = {}
    for half, name in (("train", train), ("test", test)):
        if name in names:
            found[half] = _split(folder / name)
        elif half == "train" or name != "test":
            raise UserError(
                f"no split {name!r} in {folder}: there are {', '.join(names)}; name one by --data.{half}_split"
            )
    return found


def _split(folder: Path) -> Split:
    require(
        (folder / STATE).exists(),
        f"expected {STATE} in {folder}, as `datasets` writes it; save the dataset by save_to_disk",
    )
    listed = _json(folder / STATE).get("_data_files")
    good = isinstance(listed, list) and listed and all(isinstance(one, dict) and "filename" in one for one in listed)
    require(bool(good), f"{folder / STATE} must name the files of the dataset; save it again by save_to_disk")
    files = tuple(folder / Path(one["filename"]).name for one in listed or ())
    for file in files:
        require(file.exists(), f"{file} is missing, which {folder / STATE} names; save the dataset again")
    features = _json(folder / INFO).get("features") if (folder / INFO).exists() else None
    return Split(folder, files, features if isinstance(features, dict) else {})


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({' '.join(str(error).split())[:200]}); save the dataset again") from None
    require(isinstance(content, dict), f"{path} must hold a json object; save the dataset again")
    found: dict[str, Any] = content
    return found


def read(
    splits: Mapping[str, Split], wanted: Sequence[str | None], words: int, vocabulary: int, size: int | None
) -> dict[str, Array]:
    """All samples as arrays: train, and test where there is one.

    Args:
        splits: Train, and perhaps test.
        wanted: The columns of input, label and client, None where the settings name none.
        words: Of a text.
        vocabulary: Different words.
        size: Of images, None as they are.

    Returns:
        `train_x`, `train_y` and so on, `owners` with a client column, `classes` and `tokens`, the numbers of either.
    """
    tables = {half: _table(split) for half, split in splits.items()}
    train = splits["train"]
    columns = _columns(tables["train"], train.features, wanted)
    for half, table in tables.items():
        for name in (columns.input, columns.label):
            require(name in table.column_names, f"the {half} split has no column {name!r}, which train has")
        require(table.num_rows > 0, f"the {half} split has no rows")
    labels = {half: _values(table, columns.label) for half, table in tables.items()}
    arrays, classes = _classes(columns.label, labels, train.features)
    inputs = {half: _values(table, columns.input) for half, table in tables.items()}
    tokens = 0
    if columns.kind == "text":
        known = text.vocabulary_of(inputs["train"], vocabulary)
        tokens = vocabulary
        arrays |= {f"{half}_x": text.encoded(texts, known, words) for half, texts in inputs.items()}
    elif columns.kind == "image":
        arrays |= _images(inputs, splits, columns.input, size)
    else:
        arrays |= {f"{half}_x": _numbers(columns.input, values) for half, values in inputs.items()}
    if columns.client is not None:
        owners = list(map(str, _values(tables["train"], columns.client)))
        arrays["owners"] = np.unique(np.array(owners), return_inverse=True)[1].astype(np.int64)
    return arrays | {"classes": np.array([classes]), "tokens": np.array([tokens])}


def _table(split: Split) -> Any:
    import pyarrow as pa

    parts = []
    for file in split.files:
        try:
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as reader:
                parts.append(reader.read_all())
        except (pa.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{file} is not a whole Arrow file ({reason}); save the dataset again") from None
    return pa.concat_tables(parts)


def _columns(table: Any, features: Mapping[str, Any], wanted: Sequence[str | None]) -> Columns:
    given, label, client = wanted
    names = list(table.column_names)
    for name in (given, label, client):
        if name is not None and name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"no column {name!r}: {hint}there are {', '.join(names)}")
    if label is None:
        marked = [name for name in names if _marked(features, name) == "ClassLabel"] or [
            name for name in ("label", "labels") if name in names
        ]
        require(len(marked) == 1, f"name the column of the label by --data.label: there are {', '.join(names)}")
        label = marked[0]
    kinds = {name: _kind(table.schema.field(name).type, _marked(features, name)) for name in names}
    if given is None:
        free = [name for name in names if name not in (label, client)]
        found = next((mine for kind in INPUTS if (mine := [name for name in free if kinds[name] == kind])), [])
        require(len(found) == 1, f"name the column of the input by --data.input: there are {', '.join(free) or 'none'}")
        given = found[0]
    chosen = [name for name in (given, label, client) if name is not None]
    require(len(set(chosen)) == len(chosen), f"input, label and client must be different columns, got {chosen}")
    require(
        kinds[given] != "",
        f"column {given!r} must hold images, text or lists of numbers, got {table.schema.field(given).type}",
    )
    return Columns(given, label, client, kinds[given])


def _marked(features: Mapping[str, Any], name: str) -> str:
    feature = features.get(name)
    return str(feature.get("_type", "")) if isinstance(feature, Mapping) else ""


def _kind(kind: Any, marked: str) -> str:
    """What a column of this type may be as an input; empty if nothing."""
    import pyarrow as pa

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    names = {kind.field(i).name for i in range(kind.num_fields)} if pa.types.is_struct(kind) else set()
    if marked == "Image" or names == {"bytes", "path"}:
        return "image"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return "text"
    depth = 0
    while pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        kind, depth = kind.value_type, depth + 1
    return "numbers" if depth and (pa.types.is_floating(kind) or pa.types.is_integer(kind)) else ""


def _values(table: Any, name: str) -> list[Any]:
    column = table.column(name)
    missing = column.null_count
    require(missing == 0, f"column {name!r} has no value in {missing} of {table.num_rows} rows; fill or remove them")
    values: list[Any] = column.to_pylist()
    return values


def _classes(name: str, labels: Mapping[str, list[Any]], features: Mapping[str, Any]) -> tuple[dict[str, Array], int]:
    """Labels 0 .. K - 1: as they are where the dataset names the classes, else in the order of the training values."""
    feature = features.get(name)
    listed = feature.get("names") if isinstance(feature, Mapping) else None
    plain = all(isinstance(value, int | str) for values in labels.values() for value in values)
    require(plain, f"column {name!r} must hold classes, whole numbers or text, got {type(labels['train'][0]).__name__}")
    if isinstance(listed, list) and listed:
        for half, values in labels.items():
            low, high = min(values), max(values)
            require(
                0 <= low <= high < len(listed),
                f"column {name!r} of {half} must hold classes 0 to {len(listed) - 1}, got {low} to {high}; -1 stands "
                "for a missing label: remove such rows",
            )
        return {f"{half}_y": np.array(values, np.int64) for half, values in labels.items()}, len(listed)
    classes, numbers = np.unique(np.array(labels["train"]), return_inverse=True)
    require(len(classes) > 1, f"column {name!r} must hold at least two classes, got {classes[0]!r} alone")
    arrays = {"train_y": numbers.astype(np.int64)}
    if "test" in labels:
        place = {value: number for number, value in enumerate(classes.tolist())}
        unseen = [value for value in labels["test"] if value not in place]
        require(not unseen, f"class {unseen[:1]} of column {name!r} is in the test split but not in train")
        arrays["test_y"] = np.array([place[value] for value in labels["test"]], np.int64)
    return arrays, len(classes)


def _images(
    inputs: Mapping[str, list[Any]], splits: Mapping[str, Split], name: str, size: int | None
) -> dict[str, Array]:
    pictures: dict[str, Path | bytes] = {}
    for half, values in inputs.items():
        for row, value in enumerate(values):
            content = value.get("bytes") or (splits[half].folder / value["path"] if value.get("path") else b"")
            require(bool(content), f"column {name!r} of {half} has no image in row {row + 1}; remove the row")
            pictures[f"{splits[half].folder}, column {name}, row {row + 1}"] = content
    pixels = decode(pictures, size)
    middle = len(inputs["train"])
    return {"train_x": pixels[:middle]} | ({"test_x": pixels[middle:]} if "test" in inputs else {})


def _numbers(name: str, values: list[Any]) -> Array:
    try:
        found = np.array(values)
    except ValueError:
        found = np.empty(0, object)
    require(
        found.dtype.kind in "fiu" and found.ndim >= 2,
        f"column {name!r} must hold lists of one length with numbers in every row; pad or cut them",
    )
    large = (np.abs(found) > np.finfo(np.float32).max).reshape(len(found), -1).any(1)
    require(
        not large.any(),
        f"column {name!r} holds a number beyond {np.finfo(np.float32).max:.2g} in row {int(large.argmax()) + 1}; "
        "correct or remove it",
    )
    return found.astype(np.float32)


VERSION = 1


@dataclass(frozen=True)
class Hf(Source):
    """A dataset that Hugging Face's `datasets` has saved by save_to_disk: images, text or lists of numbers.

    Attributes:
        path: The folder, of a Dataset or of a DatasetDict; `datasets` itself is not needed to read it.
        input: Column of the input: images, text or lists of numbers; null takes the only one there is, images first.
        label: Column of the label; null takes the ClassLabel, or the column called label.
        client_column: Column that names the owner of each sample, or null. With it data.partition is
            natural, unless another one is given.
        train_split: The split that is trained on.
        test_split: The split that is the test set; without one called test, a share of the training samples is.
        test_share: Share of every class that becomes the test set, without a split for it; the same for every
            seed.
        size: Height and width to which every image is scaled; null leaves them as they are.
        words: Words of a text: longer ones are cut off, shorter ones padded with 0.
        vocabulary: How many different words there are, the most frequent ones of the training data; 0 stands for no
            word and 1 for any other.
        augment: Augmentation of training images. none; standard: random crop and flip; paper: crop, flip, AutoAugment
            and Cutout.
    """

    owners_by: ClassVar[str | None] = "client_column"

    path: str = ""
    input: str | None = None
    label: str | None = None
    client_column: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    test_share: float = 0.2
    size: int | None = None
    words: int = 100
    vocabulary: int = 10_000
    augment: Name = "none"

    def __post_init__(self) -> None:
        assemble.given_path(self.path, "my_dataset")
        assemble.check_share(self.test_share)
        text.check_words(self.vocabulary, self.words)
        require(self.size is None or self.size >= 1, f"data.size must be at least 1 or null, got {self.size}")

    def load(self) -> Dataset:
        splits = self._splits()
        read = ("input", "label", "client_column", "test_share", "size", "words", "vocabulary")
        settings = {"reader": "hf", "version": VERSION} | {name: getattr(self, name) for name in read}
        with assemble.blaming(self._folder):
            arrays = mapped(_files(splits), lambda: self._read(splits), settings)
            return assemble.stored(arrays, mean=assemble.CENTRE, std=assemble.SCALE, augment=self.augment)

    def fingerprint(self) -> str:
        return fingerprint.of_files(_files(self._splits()))

    @property
    def _folder(self) -> Path:
        return assemble.given_path(self.path, "my_dataset")

    def _splits(self) -> dict[str, Split]:
        return splits_of(self._folder, self.train_split, self.test_split)

    def _read(self, splits: dict[str, Split]) -> dict[str, Array]:
        wanted = (self.input, self.label, self.client_column)
        arrays = read(splits, wanted, self.words, self.vocabulary, self.size)
        if "test_x" not in arrays:
            numbers = {name: arrays[name] for name in ("classes", "tokens")}
            arrays = assemble.split_off_test(arrays, self.test_share) | numbers
        if "owners" in arrays:
            arrays["owners"] = np.unique(arrays["owners"], return_inverse=True)[1].astype(np.int64)
        return arrays


def _files(splits: dict[str, Split]) -> dict[str, Path]:
    """All that is read, by names that do not depend on where it lies."""
    files: dict[str, Path] = {}
    for half, split in splits.items():
        described = [split.folder / INFO] if (split.folder / INFO).exists() else []
        files |= {f"{half}/{path.name}": path for path in (*split.files, *described)}
    return files
