"""Two posteriors in the plane: the ridge on which the product lies, and the valley into which the average falls."""

import numpy as np
from matplotlib.colors import ListedColormap

from analysis import style
from analysis.style import Picture
from fl_lightning.gaussian.ridge import Landscape, demo_posteriors
from fl_lightning.gaussian.ridge import landscape as compute
from fl_lightning.runs.plotting import palette


def landscape(scene: Landscape | None = None) -> Picture:
    """Above, the mixture of two posteriors with its ridge; below, the posteriors seen along the first parameter.

    Args:
        scene: What is drawn; by default two posteriors that agree on a corner.
    """
    scene = scene or compute(*demo_posteriors())
    figure, (above, below) = style.picture(2, height=2.4, sharex=True)
    looks = palette.looks(["FedAvg", "FOLA"], {})
    one, two = palette.looks(["FedCurv", "SCAFFOLD"], {}).values()
    above.grid(visible=False)
    levels = np.linspace(0.03, 0.97, 9) * scene.mixture.max()
    shades = ListedColormap([style.faint()])
    above.contour(scene.x, scene.y, scene.mixture, levels=levels, cmap=shades, linewidths=0.5)
    above.plot(*scene.ridge.T, color=looks["FOLA"].colour, lw=1.1, linestyle=palette.DASHES[1])
    above.plot(*scene.line.T, color=looks["FedAvg"].colour, lw=0.9)
    marks = {"mode": "o", "saddle": "s", "antimode": "v"}
    above.plot(*scene.ridge[-1], "o", color=one.colour, ms=5)
    above.plot(*scene.ridge[0], "o", color=two.colour, ms=5)
    above.plot(*scene.average, looks["FedAvg"].marker, color=looks["FedAvg"].colour, ms=6, mec=style.paper(), mew=0.6)
    above.plot(*scene.product, looks["FOLA"].marker, color=looks["FOLA"].colour, ms=6, mec=style.paper(), mew=0.6)
    for point in scene.critical:  # rings, because the product may lie close to a saddle
        above.plot(*point.place, marks[point.kind], color=style.ink(), ms=9, mfc="none", mew=0.7)
    above.set_ylabel("$θ_2$")
    step = float(scene.y[1] - scene.y[0])
    for density, look in ((scene.first, one), (scene.second, two)):
        below.plot(scene.x, density.sum(0) * step, color=look.colour, lw=1.2)
    product = scene.first * scene.second
    width = float(scene.x[1] - scene.x[0])
    below.plot(scene.x, product.sum(0) / (product.sum() * width), color=looks["FOLA"].colour, lw=1.2)
    for place, look in ((scene.average, looks["FedAvg"]), (scene.product, looks["FOLA"])):
        below.axvline(place[0], color=look.colour, lw=0.8, linestyle=palette.DASHES[2])
    below.set(xlabel="$θ_1$", ylabel="marginal density of $θ_1$", ylim=(0, None))
    kinds = list(dict.fromkeys(point.kind for point in scene.critical))
    dots = {"linestyle": "none"}
    style.legend(
        figure,
        [
            ("client 1", {"color": one.colour, "marker": "o"}),
            ("client 2", {"color": two.colour, "marker": "o"}),
            ("line, average (FedAvg)", {"color": looks["FedAvg"].colour, "marker": looks["FedAvg"].marker}),
            (
                "ridge, product (FOLA)",
                {"color": looks["FOLA"].colour, "marker": looks["FOLA"].marker, "linestyle": palette.DASHES[1]},
            ),
            *(
                (
                    f"{kind} of the mixture",
                    {"marker": marks[kind], "color": style.ink(), "mfc": "none", "ms": 6, **dots},
                )
                for kind in kinds
            ),
        ],
        columns=2,
    )
    ratio = scene.product_density / max(scene.average_density, 1e-300)
    style.headline(figure, f"the mixture is {ratio:.1f} times as dense at the product as at the average")
    return figure
