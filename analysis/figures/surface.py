"""The mixture of two posteriors as a surface, and its height along the ridge and along the straight line."""

import numpy as np

from analysis import style
from analysis.style import Picture
from fl_lightning.gaussian.ridge import Landscape, demo_posteriors
from fl_lightning.gaussian.ridge import landscape as compute

MARKS = {"mode": "o", "saddle": "s", "antimode": "v"}


def surface(scene: Landscape | None = None) -> Picture:
    """Left, the mixture in three dimensions with its ridge; right, its height on the ridge and on the straight line.

    Args:
        scene: What is drawn; by default two posteriors that agree on a corner.
    """
    scene = scene or compute(*demo_posteriors())
    looks = style.looks(["FedAvg", "FOLA"], {})
    average, product = looks["FedAvg"], looks["FOLA"]
    figure = Picture(figsize=(7.0, 3.2), layout="constrained")
    hill = figure.add_subplot(1, 2, 1, projection="3d")
    x, y = np.meshgrid(scene.x, scene.y)
    hill.plot_surface(x, y, scene.mixture, cmap="Greys", alpha=0.55, linewidth=0, rstride=2, cstride=2)
    hill.plot(*scene.ridge.T, scene.ridge_density, color=product.colour, lw=1.4, linestyle=style.DASHES[1], zorder=5)
    hill.plot(*scene.line.T, scene.line_density, color=average.colour, lw=1.2, zorder=5)
    for place, height, look in (
        (scene.average, scene.average_density, average),
        (scene.product, scene.product_density, product),
    ):
        hill.plot(*[[value] for value in (*place, height)], look.marker, color=look.colour, ms=6, zorder=6)
    hill.set(xlabel="$θ_1$", ylabel="$θ_2$")
    hill.set_title("density of the mixture", fontsize=9)
    hill.view_init(elev=38, azim=-60)
    cut = figure.add_subplot(1, 2, 2)
    cut.plot(scene.shares, scene.ridge_density, color=product.colour, linestyle=style.DASHES[1], label="on the ridge")
    cut.plot(scene.shares, scene.line_density, color=average.colour, label="on the straight line")
    for point in scene.critical:
        nearest = int(np.argmin(((scene.ridge - np.asarray(point.place)) ** 2).sum(1)))
        cut.plot(
            scene.shares[nearest], scene.ridge_density[nearest], MARKS[point.kind], color=style.ink(), ms=9, mfc="none"
        )
        cut.annotate(
            point.kind,
            (scene.shares[nearest], scene.ridge_density[nearest]),
            xytext=(0, 9),
            textcoords="offset points",
            ha="center",
            fontsize=7,
        )
    cut.plot(0.5, scene.average_density, average.marker, color=average.colour, ms=6, label="mean of the means (FedAvg)")
    cut.plot(0.5, scene.product_density, product.marker, color=product.colour, ms=6, label="mode of the product (FOLA)")
    cut.set(xlabel="$π_1$, share of the first posterior", ylabel="mixture density")
    cut.margins(y=0.15)
    cut.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, fontsize=7, frameon=False)
    return figure
