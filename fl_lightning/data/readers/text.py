"""Text as whole numbers: characters of a fixed alphabet, or the most frequent words of the training texts."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from fl_lightning.data.readers.memory_map import Array
from fl_lightning.errors import UserError, require

# What stands before the beginning of a short text, and for words that the vocabulary lacks.
PADDING, UNKNOWN = 0, 1
WORD = re.compile(r"\w+(?:'\w+)*|[^\w\s]")


def words(text: str) -> list[str]:
    """The words of a text in small letters; a punctuation mark is a word.

    >>> words("Don't stop, NOW!")
    ["don't", 'stop', ',', 'now', '!']
    """
    return WORD.findall(text.lower())


def vocabulary_of(texts: Iterable[str], size: int) -> dict[str, int]:
    """The numbers of the most frequent words, of equally frequent ones the first in the alphabet.

    Args:
        texts: Those of the training set.
        size: Numbers in all, those for padding and for unknown words included.

    >>> vocabulary_of(["b a c", "b c", "c"], 4)
    {'c': 2, 'b': 3}
    """
    counts = Counter(word for text in texts for word in words(text))
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return {word: number for number, word in enumerate(ranked[: size - 2], start=2)}


def encoded(texts: Sequence[str], vocabulary: Mapping[str, int], length: int) -> Array:
    """The first words of each text as numbers; padding goes before them, so that a reader ends with the words.

    >>> encoded(["b zzz", "c c c c"], {"c": 2, "b": 3}, 3).tolist()
    [[0, 3, 1], [2, 2, 2]]
    """
    tokens = np.full((len(texts), length), PADDING, np.int64)
    for row, text in zip(tokens, texts, strict=True):
        found = [vocabulary.get(word, UNKNOWN) for word in words(text)[:length]]
        row[length - len(found) :] = found
    return tokens


def check_words(vocabulary: int, length: int) -> None:
    """Refuse settings that leave no word."""
    require(vocabulary >= 3, f"data.vocabulary must be at least 3 (padding, unknown, one word), got {vocabulary}")
    require(length >= 1, f"data.words must be at least 1, got {length}; 25 is LEAF's choice")


def letters(texts: Sequence[str], alphabet: str) -> Array:
    """Texts of one length, at least one, as the places of their characters in an alphabet.

    >>> letters(["ab", "ba"], "abc").tolist()
    [[0, 1], [1, 0]]
    """
    points = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
    known = np.array(sorted(map(ord, alphabet)), np.uint32)
    places = np.array([alphabet.index(chr(point)) for point in known], np.int64)
    found = np.minimum(np.searchsorted(known, points), len(known) - 1)
    strange = np.flatnonzero(known[found] != points)
    if len(strange):
        raise UserError(f"expected characters among {alphabet!r}, got {chr(int(points[strange[0]]))!r}; remove it")
    return places[found].reshape(len(texts), -1)
