"""Tables as text, and names of metrics as every store takes them."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


# What begins a formula in a spreadsheet. The last four are as wide as Chinese letters, and taken for the same.
FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")


def render(rows: Sequence[Mapping[str, str]], markdown: bool = False) -> str:
    """Rows as aligned text, or as a Markdown table."""
    head = list(rows[0])
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in head]
    lines = [head, *([row[name] for name in head] for row in rows)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    if markdown:
        padded.insert(1, ["-" * width for width in widths])
        return "\n".join(f"| {' | '.join(line)} |" for line in padded)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def as_csv(table: "pd.DataFrame") -> str:
    """A table as CSV with all its digits, in which no text is a formula: a spreadsheet would carry it out."""
    safe = table.rename(columns=harmless)
    for place in range(safe.shape[1]):
        if safe.dtypes.iloc[place].kind in "OTU":
            safe.isetitem(place, safe.iloc[:, place].map(harmless).array)
    return str(safe.to_csv(index=False, lineterminator="\r\n"))  # so that a cell with either of them is quoted


def harmless(value: Any) -> Any:
    """A cell without a formula: with an apostrophe in front, as OWASP advises ("CSV Injection"). Numbers stay.

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


# MLflow takes these, and slashes, for which see below; a colon is refused on some systems.
STRANGE = re.compile(r"[^\w.\- ]+")
LONGEST = 200


def metric_name(given: str) -> str:
    """A user's name for a metric as every store takes it: a character that any store refuses becomes an underscore.

    >>> metric_name("val/loss (mean)"), metric_name("odd (1)"), metric_name("/acc@5/"), metric_name("val/my loss")
    ('val/loss_mean', 'odd_1', 'acc_5', 'val/my loss')
    """
    parts = [_cleaned(part) for part in given.split("/")]
    found = "/".join(part for part in parts if part not in ("", ".", ".."))[:LONGEST].rstrip("/ ")
    return found or "unnamed"


def _cleaned(part: str) -> str:
    if not STRANGE.search(part):
        return part.strip()
    return re.sub(r"[ _]*_[ _]*", "_", STRANGE.sub("_", part)).strip("_ ")
