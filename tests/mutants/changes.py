"""The small mistakes of `changes.txt`."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LIST = Path(__file__).with_suffix(".txt")


class Change(NamedTuple):
    """A mistake.

    Attributes:
        file: Where.
        tests: That notice it; the examples in the file itself are run, too.
        why: What is wrong then.
        old: What stands there, once.
        new: What the mistake puts in its place.
        noticed: Whether a test can notice it.
    """

    file: str
    tests: tuple[str, ...]
    why: str
    old: str
    new: str
    noticed: bool

    def applied(self, text: str) -> str:
        """The file with the mistake."""
        if (found := text.count(self.old)) != 1:
            raise ValueError(f"{self.file} must hold {self.old!r} once, and holds it {found} times: follow the code")
        return text.replace(self.old, self.new)

    def __str__(self) -> str:
        return f"{self.file}: {self.why}"


def changes(text: str | None = None) -> Iterator[Change]:
    """The changes of a list, by default of ours."""
    for line in (LIST.read_text() if text is None else text).splitlines():
        mark, rest = line[:1], line[2:]
        if mark == "@":
            file, by = rest.split(" : ")
            tests = (file, *(f"tests/{path}" for path in by.split()))
        elif mark in ("#", "?"):
            why, noticed = rest, mark == "#"
        elif mark == "-":
            old = rest
        elif mark == "+":
            yield Change(file, tests, why, old, rest, noticed)
