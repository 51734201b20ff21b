"""Figures and tables in a notebook: the picture, and below it what must be said about it."""

from typing import Any

import pandas as pd

from analysis import formats
from analysis.style import Picture


def show(*items: Any) -> None:
    """Display figures, tables and sentences one below the other; a figure without content is a line of text."""
    from IPython.display import display  # comes with whatever runs notebooks

    for item in items:
        if isinstance(item, Picture):
            if not item.empty:
                display(item)  # type: ignore[no-untyped-call]
            for remark in dict.fromkeys(item.remarks):
                print(f"{'Nothing to show: ' if item.empty else 'Note: '}{remark}")
        elif isinstance(item, pd.DataFrame):
            display(formats.readable(item)) if len(item) else print("No table: too few runs have ended.")  # type: ignore[no-untyped-call]
        elif isinstance(item, list):
            print("\n".join(map(str, item)))
        else:
            print(f"\n{item}\n")
