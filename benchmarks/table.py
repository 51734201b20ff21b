"""Rows of the result, printed and stored."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """One measured number.

    Attributes:
        work: What was run.
        what: What was measured.
        value: The number.
        unit: x (a ratio), %, s, MB, e (a small number).
        aim: Largest acceptable value, or None where there is no aim.
        note: How it came about.
    """

    work: str
    what: str
    value: float
    unit: str = "x"
    aim: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.aim is None:
            return ""
        return "met" if self.value <= self.aim else "MISSED"


def show(rows: list[Row]) -> None:
    """Print rows as a table with aim and verdict."""
    width = max(len(row.what) for row in rows)
    for row in rows:
        digits = {"x": 2, "s": 1}.get(row.unit, 0)
        value = f"{row.value:.0e}" if row.unit == "e" else f"{row.value:.{digits}f} {row.unit}"
        aim = "" if row.aim is None else f"<= {row.aim:g}{row.unit.strip('e')}"
        print(
            f"{row.work:<12} {row.what:<{width}} {value:>11} {aim:>9} {row.verdict:<7} {row.note}".rstrip(), flush=True
        )
