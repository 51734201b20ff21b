"""Classes of the clients."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from analysis import style
from analysis.style import Picture
from fl_lightning.runs.plotting import strokes

# More panels than this cannot be read in one column.
MOST = 6


def partitions(counts: Mapping[str, ArrayLike]) -> Picture:
    """How many samples of each class each client has. An empty cell has none; a cross marks a client without samples.

    Args:
        counts: For every title the samples per client (row) and class (column), as `Runs.partitions` gives them.
    """
    if not counts:
        return style.empty("the data of these runs are not on this machine, so their partitions cannot be drawn")
    tables = {title: np.asarray(table) for title, table in list(counts.items())[:MOST]}
    columns = min(len(tables), 2)
    rows = -(-len(tables) // columns)
    figure, (first,) = style.picture(height=0.25 + rows * (1.5 if columns == 2 else 2.0))
    figure.delaxes(first)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    scale = strokes.samples_scale(max(int(table.max()) for table in tables.values()))
    for panel, (title, table) in zip(panels, tables.items(), strict=False):
        strokes.dress(panel)
        strokes.cells(panel, table, scale, ticks=20 // columns)
        empty = int((table.sum(1) == 0).sum())
        note = f"\n{empty} without samples" if empty else ""
        panel.set_title(f"{title}{note}", fontsize=6.5, color=style.ink())
        panel.tick_params(labelsize=6)
    for position, panel in enumerate(panels):
        panel.set_visible(position < len(tables))
        if position % columns == 0:
            panel.set_ylabel("class")
        if position + columns >= len(tables):
            panel.set_xlabel("client")
    strokes.samples_bar(figure, panels, scale)
    if len(counts) > MOST:
        figure.remarks.append(f"{len(counts) - MOST} more partitions are not drawn")
    return figure
