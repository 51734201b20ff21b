"""Who holds which classes."""

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.ticker import MaxNLocator, StrMethodFormatter
from numpy.typing import ArrayLike

from analysis import style
from analysis.style import COLUMN, Picture
from fl_lightning.runs.pictures import BLUES

# Under the cells in every theme: the colours of many samples would vanish on a dark ground.
GROUND = "#fafafa"
# More panels than this cannot be read in one column.
MOST = 6


def partitions(counts: Mapping[str, ArrayLike]) -> Picture:
    """Clients by classes, one panel per partition; the colour is the number of samples, on one scale for all.

    Args:
        counts: For every title the samples per client (row) and class (column), as `Runs.partitions` gives them.
    """
    if not counts:
        return style.empty("the data of these runs are not on this machine, so their partitions cannot be drawn")
    tables = {title: np.asarray(table) for title, table in list(counts.items())[:MOST]}
    columns = min(len(tables), 2)
    rows = -(-len(tables) // columns)
    figure, (first,) = style.picture(height=0.25 + rows * (1.5 if columns == 2 else 2.0), width=COLUMN)
    figure.delaxes(first)
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    largest = max(2, *(int(table.max()) for table in tables.values()))
    for panel, (title, table) in zip(panels, tables.items(), strict=False):
        style.dress(panel)
        panel.grid(visible=False)
        panel.set_facecolor(GROUND)
        cells = panel.imshow(
            np.ma.masked_equal(table.T, 0),
            cmap=BLUES,
            norm=LogNorm(1, largest),
            aspect="auto",
            origin="lower",
            interpolation="nearest",
        )
        held = int((table.sum(1) > 0).sum())
        note = f"\n{len(table) - held} of {len(table)} without samples" if held < len(table) else ""
        panel.set_title(f"{title}{note}", fontsize=6.5, color=style.ink())
        panel.tick_params(labelsize=6)
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=6, integer=True))
    for position, panel in enumerate(panels):
        panel.set_visible(position < len(tables))
        if position % columns == 0:
            panel.set_ylabel("class")
        if position + columns >= len(tables):
            panel.set_xlabel("client")
    bar = figure.colorbar(cells, ax=panels, label="samples", format=StrMethodFormatter("{x:,.0f}"))
    bar.ax.tick_params(labelsize=6, colors=style.faint(), labelcolor=style.ink(), which="both")
    bar.ax.yaxis.label.set(color=style.ink(), fontsize=7)
    bar.outline.set_visible(False)
    if len(counts) > MOST:
        figure.remarks.append(f"{len(counts) - MOST} more partitions are not drawn")
    return figure
