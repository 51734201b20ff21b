"""Data of the LEAF benchmark, as its scripts write them: natural clients.

Caldas et al., *LEAF: A Benchmark for Federated Settings*, 2018. A file holds `users`, `num_samples`, `user_data` by
user with lists `x` and `y`, and perhaps `hierarchies`, which is skipped. LEAF's split by samples leaves users in
`user_data` that have no samples and are not among `users`; they are skipped, too.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fl_lightning.data.dataset import Dataset, Source
from fl_lightning.data.readers import assemble, fingerprint, text
from fl_lightning.data.readers.memory_map import Array, mapped
from fl_lightning.errors import UserError, require

# The 80 characters of LEAF's Shakespeare, in its order.
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
# LEAF's own order: what was filtered before what was sampled before everything.
WHOLE = ("rem_user_data", "sampled_data", "all_data")
FEMNIST_PIXELS, FEMNIST_CLASSES = 784, 62
MOST_CLASSES = 2**31
# Where the text stands in the fields of a tweet.
TWEET = 4


class Kind(NamedTuple):
    """What the samples of a folder are.

    Attributes:
        name: numbers, characters or tweets.
        length: Of an input, in numbers or characters; 0 of tweets.
    """

    name: str
    length: int = 0


class Samples(NamedTuple):
    """The samples of a half: inputs as they are in the file, labels, and the user of each."""

    x: list[Any]
    y: list[Any]
    users: list[str]


def files_of(root: Path) -> dict[str, dict[str, Path]]:
    """The files of train and test, or of train alone, by their names; the folder is LEAF's `data`, or above it."""
    require(root.is_dir(), f"data.root must be a folder that LEAF's scripts have filled, not a folder: {root}")
    for place in (root, root / "data"):
        train, test = _json_files(place / "train", "train"), _json_files(place / "test", "test")
        if train:
            require(bool(test), f"expected json files in {place / 'test'} beside those in {place / 'train'}, got none")
            return {"train": train, "test": test}
        for folder in (*(place / name for name in WHOLE), place):
            if whole := _json_files(folder, "all"):
                return {"train": whole}
    raise UserError(
        f"expected LEAF's json files in {root}/train and {root}/test, or in {root}/all_data, got none; run its "
        "preprocess.sh, or name another folder by --data.root"
    )


def _json_files(folder: Path, half: str) -> dict[str, Path]:
    """By names that do not depend on where they lie."""
    found = sorted(folder.glob("*.json")) if folder.is_dir() else []
    return {f"{half}/{path.name}": path for path in found}


def read(halves: Mapping[str, Mapping[str, Path]], test_share: float, vocabulary: int, length: int) -> dict[str, Array]:
    """All samples as arrays; a test share is split off where there is no test set.

    Args:
        halves: The files of train, and perhaps of test.
        test_share: Of every class.
        vocabulary: Numbers of different words, for tweets.
        length: Words of a tweet.

    Returns:
        The arrays of `assemble`, and beside them `classes` and `tokens`, the numbers of either (tokens 0 without any).
    """
    kind: Kind | None = None
    names: dict[str, list[str]] = {}
    inputs: dict[str, list[Any]] = {}
    labels: dict[str, list[Array]] = {}
    for half, files in halves.items():
        names[half], inputs[half], labels[half] = [], [], []
        for path in files.values():
            with assemble.blaming(path):
                for x, y, users in _parts(path):
                    kind = kind or _kind(x[0], y[0])
                    inputs[half].append(_inputs(kind, x))
                    labels[half].append(_labels(kind, y))
                    names[half] += users
        require(bool(names[half]), f"the files of {half} hold no samples")
    assert kind is not None
    arrays = _joined(kind, inputs, vocabulary, length)
    arrays |= {f"{half}_y": np.concatenate(parts) for half, parts in labels.items()}
    arrays["owners"] = np.unique(np.array(names["train"]), return_inverse=True)[1].astype(np.int64)
    if "test_x" not in arrays:
        arrays = assemble.split_off_test(arrays, test_share)
    largest = 1 + max(int(arrays[name].max()) for name in ("train_y", "test_y"))
    known = {"characters": len(ALPHABET), "tweets": 2}.get(kind.name)
    classes = known or (max(largest, FEMNIST_CLASSES) if kind.length == FEMNIST_PIXELS else max(largest, 2))
    tokens = {"characters": len(ALPHABET), "tweets": vocabulary}.get(kind.name, 0)
    return arrays | {"classes": np.array([classes]), "tokens": np.array([tokens])}


def _joined(kind: Kind, inputs: Mapping[str, Sequence[Any]], vocabulary: int, length: int) -> dict[str, Array]:
    """The inputs of all files in one array for each half."""
    if kind.name == "tweets":
        texts = {half: [one for part in parts for one in part] for half, parts in inputs.items()}
        known = text.vocabulary_of(texts["train"], vocabulary)
        return {f"{half}_x": text.encoded(listed, known, length) for half, listed in texts.items()}
    if kind.name == "characters":
        return {f"{half}_x": np.concatenate(parts) for half, parts in inputs.items()}
    bytes_alone = all(part.dtype == np.uint8 for parts in inputs.values() for part in parts)
    shape = (1, 28, 28) if kind.length == FEMNIST_PIXELS else (kind.length,)
    joined = {}
    for half, parts in inputs.items():
        same = parts if bytes_alone else [_unscaled(part) for part in parts]
        joined[f"{half}_x"] = np.concatenate(same).reshape(-1, *shape)
    return joined


def _parts(path: Path) -> Iterator[Samples]:
    """The samples of each user of a file."""
    content = _content(path)
    users, numbers, data = content["users"], content["num_samples"], content["user_data"]
    require(
        len(users) == len(numbers),
        f"users and num_samples must be lists of one length, got {len(users)} and {len(numbers)}",
    )
    strange = next((user for user in users if not isinstance(user, str | int)), None)
    require(strange is None, f"users must be names, got {str(strange)[:60]}; name the user otherwise")
    require(len(set(users)) == len(users), "a user is named twice in users; merge the two")
    for user in data.keys() - set(users):
        require(
            not (isinstance(data[user], Mapping) and data[user].get("y")),
            f"user {user!r} has samples in user_data but is missing in users; add the name, or remove the samples",
        )
    for user, number in zip(users, numbers, strict=True):
        require(user in data, f"user {user!r} is in users but not in user_data; remove the name, or add the samples")
        own = data[user]
        require(
            isinstance(own, Mapping) and all(isinstance(own.get(name), list) for name in ("x", "y")),
            f"user_data of {user!r} must hold lists x and y",
        )
        x, y = own["x"], own["y"]
        require(
            len(x) == len(y) == number,
            f"user {user!r} must have as many x and y as num_samples says, {number}, got {len(x)} and {len(y)}",
        )
        if x:
            yield Samples(x, y, [str(user)] * len(x))


def _content(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # of json, and of text in another encoding than UTF-8
        raise UserError(f"not a whole json file ({' '.join(str(error).split())[:200]}); make it again") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; make it readable") from None
    expected = {"users": list, "num_samples": list, "user_data": dict}
    for name, kind in expected.items():
        good = isinstance(content, dict) and isinstance(content.get(name), kind)
        require(good, f"expected users, num_samples and user_data, as LEAF writes them, got no {name}")
    found: dict[str, Any] = content
    return found


def _kind(x: Any, y: Any) -> Kind:
    """What the first sample shows of all."""
    if isinstance(x, str) and isinstance(y, str):
        return Kind("characters", len(x))
    if isinstance(x, list) and len(x) > TWEET and all(isinstance(field, str) for field in x):
        return Kind("tweets")
    if isinstance(x, list) and x and all(isinstance(number, int | float) for number in x):
        return Kind("numbers", len(x))
    raise UserError(
        "expected images or vectors of numbers (FEMNIST, synthetic), texts with their next character (Shakespeare) or "
        f"tweets (Sent140), got x = {str(x)[:60]!r} and y = {str(y)[:20]!r}; for others use --data function"
    )


def _inputs(kind: Kind, x: list[Any]) -> Any:
    if kind.name == "characters":
        good = all(isinstance(one, str) and len(one) == kind.length for one in x)
        require(good, f"expected a text of {kind.length} characters in every x, as in the first")
        return text.letters(x, ALPHABET)
    if kind.name == "tweets":
        good = all(isinstance(one, list) and len(one) > TWEET and isinstance(one[TWEET], str) for one in x)
        require(good, f"expected the fields of a tweet in every x, its text the field {TWEET + 1}, as in the first")
        return [one[TWEET] for one in x]
    try:
        numbers = np.array(x, np.float64)
    except (TypeError, ValueError):
        numbers = np.empty(0)
    require(numbers.shape == (len(x), kind.length), f"expected {kind.length} numbers in every x, as in the first")
    # LEAF divides bytes by 255; they take a quarter of the memory, and are divided again where they are used.
    scaled = 255 * numbers
    whole = np.rint(scaled)
    are_bytes = (np.abs(scaled - whole) < 1e-6) & (whole >= 0) & (whole <= 255)
    if kind.length == FEMNIST_PIXELS and are_bytes.all():
        return whole.astype(np.uint8)
    return numbers.astype(np.float32)


def _unscaled(part: Array) -> Array:
    return (part / 255.0).astype(np.float32) if part.dtype == np.uint8 else part


def _labels(kind: Kind, y: list[Any]) -> Array:
    if kind.name == "characters":
        require(all(isinstance(one, str) and len(one) == 1 for one in y), "expected one character in every y")
        return text.letters(y, ALPHABET)[:, 0]
    good = all(isinstance(one, int | float) and 0 <= one < MOST_CLASSES and one == int(one) for one in y)
    require(good, "expected a class 0, 1, 2, ... in every y")
    return np.array(y, np.int64)


VERSION = 1


@dataclass(frozen=True)
class Leaf(Source):
    """LEAF's json files: FEMNIST, Shakespeare, Sent140 and synthetic data; their users are natural clients.

    Attributes:
        root: Folder that LEAF's preprocess.sh has filled, with train and test, or with all_data. Images of 28x28 pixels
            have 62 classes; texts are 80 characters and the class is the next one; tweets become words.
        test_share: Share of every class that becomes the test set, where LEAF has split off none; the same for every
            seed.
        words: Words of a tweet: longer ones are cut off, shorter ones padded with 0.
        vocabulary: How many different words of tweets there are, the most frequent ones of the training data; 0 stands
            for no word and 1 for any other.
    """

    root: str | None = None
    test_share: float = 0.2
    words: int = 25
    vocabulary: int = 10_000

    def __post_init__(self) -> None:
        assemble.check_share(self.test_share)
        text.check_words(self.vocabulary, self.words)

    def load(self) -> Dataset:
        halves = files_of(self._root)
        settings = {"reader": "leaf", "version": VERSION, "test_share": self.test_share}
        settings |= {"words": self.words, "vocabulary": self.vocabulary}
        files = {name: path for listed in halves.values() for name, path in listed.items()}
        with assemble.blaming(self._root):
            arrays = mapped(files, lambda: read(halves, self.test_share, self.vocabulary, self.words), settings)
            return assemble.stored(arrays)

    def fingerprint(self) -> str:
        halves = files_of(self._root)
        return fingerprint.of_files({name: path for listed in halves.values() for name, path in listed.items()})

    @property
    def _root(self) -> Path:
        require(self.root is not None, "data.root is missing: name the folder that LEAF's preprocess.sh has filled")
        return Path(str(self.root)).expanduser()
