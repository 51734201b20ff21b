"""CSV that a spreadsheet shows and does not carry out.

A cell that begins with =, +, - or @ is a formula to a spreadsheet, and a formula may start programs. Text that would be
one gets an apostrophe in front, as OWASP advises ("CSV Injection"); numbers stay as they are, negative ones included.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fl_lightning.system.atomic import write_atomically

if TYPE_CHECKING:
    import pandas as pd

# The last four are as wide as Chinese letters, and taken for the same.
FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


def harmless(value: Any) -> Any:
    """A cell that is no formula.

    >>> harmless("=cmd|' /C calc'!A0"), harmless("-1.5"), harmless(-1.5), harmless("-x"), harmless("FOLA")
    ("'=cmd|' /C calc'!A0", '-1.5', -1.5, "'-x", 'FOLA')
    """
    if not isinstance(value, str) or not value.lstrip("'").startswith(FORMULA):
        return value
    try:
        float(value)
        return value
    except ValueError:
        return f"'{value}"


def original(cell: str) -> str:
    """The text of a cell before it was made harmless.

    >>> [original(harmless(text)) for text in ("=a", "'=a", "'a", "a")]
    ['=a', "'=a", "'a", 'a']
    """
    return cell[1:] if cell.startswith("'") and cell.lstrip("'").startswith(FORMULA) else cell


def lines(rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """Rows as CSV."""
    text = io.StringIO()
    writer = csv.writer(text)  # its lines end with \r\n, so that it puts a cell with either of them in quotes
    writer.writerow([harmless(column) for column in columns])
    writer.writerows([harmless(row.get(column, "")) for column in columns] for row in rows)
    return text.getvalue()


def text(table: "pd.DataFrame") -> str:
    """A table as CSV with all its digits."""
    safe = table.rename(columns=harmless)
    for place in range(safe.shape[1]):
        if safe.dtypes.iloc[place].kind in "OTU":
            safe.isetitem(place, safe.iloc[:, place].map(harmless).array)
    return str(safe.to_csv(index=False, lineterminator="\r\n"))


def save(table: "pd.DataFrame", path: Path) -> None:
    """A table as a CSV file with all its digits."""
    write_atomically(path, text(table).encode())
