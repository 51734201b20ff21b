"""Every figure of the paper is drawn from tables, also from partial ones, and says what it rests on."""

import io
import re

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from analysis import figures, style
from analysis.figures.correlation import in_words
from analysis.statistics import correlation
from fl_lightning.runs.plotting import palette
from tests.support.synthetic import METHODS, as_study, last_rounds, rounds_table, runs_table, with_failures

ALPHAS = (0.01, 0.1, 1)


def curvature_table():
    parts = []
    kinds = [("full", "online"), ("full", "offline"), ("diagonal", "online"), (None, None)]
    for i, (form, way) in enumerate(kinds):
        columns = {"method.curvature_form": form, "method.curvature": way}
        part = rounds_table(cases=("FOLA",) if form else ("FedAvg",), clients=(2,), rounds=4, **columns)
        part["run_id"] = f"{i}-" + part["run_id"]
        part["precision_cosine"], part["precision_cosine_minmax"] = (0.1 * i, 0.9) if form else (np.nan, np.nan)
        parts.append(part)
    return pd.concat(parts, ignore_index=True)


def ridge_table():
    rounds = curvature_table()
    rows = []
    for _, run in rounds.loc[rounds["round"].isin([1, 4])].iterrows():
        for path in ("ridge", "line"):
            for share in np.linspace(0, 1, 5):
                rows.append({**run.to_dict(), "path": path, "share": share, "accuracy": 0.5 + share * (1 - share)})
    return pd.DataFrame(rows)


def error_table():
    table = runs_table(alphas=ALPHAS, seeds=5, rounds=3)
    return table.assign(AE=np.exp(-9 * table["GA"]), LF=np.exp(-9 * table["LA"]))


def personal_table():
    table = rounds_table()
    return table.assign(PA_before=table["GA"], PA_after=0.5 + table["LA"] / 2)


def trust_table():
    table = runs_table(alphas=ALPHAS, rounds=2)
    confidence, coverage = np.linspace(0.3, 0.97, 15), np.linspace(0, 1, 21)
    arrays = {
        "coverage": coverage,
        "entropy_edges": np.linspace(0, 2.3, 11),
        "probit/samples": np.full(15, 40),
        "probit/confidence": 40 * confidence,
        "probit/hits": 40 * confidence**1.5,
        "probit/risk": 0.2 * coverage,
        "probit/entropy": np.arange(10, 0, -1),
        "probit/entropy/noise": np.arange(10),
    }
    return table.assign(arrays=[arrays] * len(table))


DRAWN = {
    "reliability": lambda: figures.reliability(as_study(trust_table())),
    "risk_coverage": lambda: figures.risk_coverage(as_study(trust_table())),
    "entropies": lambda: figures.entropies(as_study(trust_table())),
    "best_for_alpha_and_clients": lambda: figures.best_for_alpha_and_clients(
        as_study(runs_table(alphas=ALPHAS, clients=(5, 10), rounds=1))
    ),
    "over_hyperparameters": lambda: figures.over_hyperparameters(
        as_study(runs_table(lrs=(1, 0.1), epochs=(1, 5), batches=(8, 32), alphas=(0.01, 1), rounds=1))
    ),
    "curves_by_clients": lambda: figures.curves_by_clients(as_study(rounds_table(clients=(5, 10, 20)))),
    "curves_by_alpha": lambda: figures.curves_by_alpha(as_study(rounds_table(alphas=ALPHAS, lrs=(0.1, 0.01)))),
    "over_epochs": lambda: figures.over_epochs(as_study(runs_table(epochs=(1, 10, 20), strengths=(1, 10), rounds=2))),
    "best_for_alpha": lambda: figures.best_for_alpha(as_study(runs_table(alphas=ALPHAS, rounds=2))),
    "winners": lambda: figures.winners(as_study(runs_table(cases=tuple(METHODS), alphas=ALPHAS, rounds=2))),
    "global_against_local": lambda: figures.global_against_local(as_study(runs_table(lrs=(1, 0.1, 0.01), rounds=2))),
    "online_against_offline": lambda: figures.online_against_offline(as_study(rounds_table())),
    "prior_and_product": lambda: figures.prior_and_product(as_study(rounds_table(strengths=(0, 10)))),
    "curvatures": lambda: figures.curvatures(as_study(curvature_table())),
    "cosine_of_precisions": lambda: figures.cosine_of_precisions(as_study(curvature_table())),
    "ridge_curves": lambda: figures.ridge_curves(as_study(curvature_table()).of(ridge_table())),
    "precision_matrix": lambda: figures.precision_matrix(np.eye(20) + 0.1, "full, client 1"),
    "errors_behind_accuracies": lambda: figures.errors_behind_accuracies(as_study(error_table())),
    "landscape": figures.landscape,
    "partitions": lambda: figures.partitions(
        {"alpha 1": np.arange(30).reshape(6, 5), "alpha 2": np.zeros((6, 5), int)}
    ),
    "learning_curves": lambda: figures.learning_curves(as_study(rounds_table())),
    "personal_curves": lambda: figures.personal_curves(as_study(personal_table())),
    "against_bytes": lambda: figures.against_bytes(as_study(rounds_table())),
    "against_seconds": lambda: figures.against_seconds(as_study(rounds_table())),
}


def test_every_item_is_drawn_here():
    assert set(DRAWN) == set(figures.__all__) - {"FIGURES"}


def texts(figure):
    found = [figure._suptitle] if figure._suptitle else []
    found += [text for legend in figure.legends for text in legend.get_texts()]
    for panel in figure.axes:
        found += [panel.xaxis.label, panel.yaxis.label, panel.title, panel._left_title, *panel.texts]
    return [text for text in found if text.get_text() and text.get_visible()]


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_is_legible_in_one_column(name, theme):
    """As wide as a column, nothing outside, no text over another, no text below 6 points, visible ink."""
    with style.theme(theme):
        figure = DRAWN[name]()
    assert not figure.empty
    assert figure.get_size_inches()[0] == style.COLUMN
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    boxes = []
    for text in texts(figure):
        box = text.get_window_extent(renderer)
        assert box.x0 >= -1, text
        assert box.y0 >= -1, text
        assert box.x1 <= figure.bbox.x1 + 1, text
        assert box.y1 <= figure.bbox.y1 + 1, text
        assert text.get_fontsize() >= 6, text
        assert contrast(text.get_color(), palette.THEMES[theme].paper) > 4.5, text
        boxes.append((text, box))
    for i, (text, box) in enumerate(boxes):
        for other, another in boxes[i + 1 :]:
            overlap = box.overlaps(another) and min(box.x1, another.x1) - max(box.x0, another.x0) > 1
            assert not (overlap and min(box.y1, another.y1) - max(box.y0, another.y0) > 1), (text, other)


def contrast(one, other):
    """WCAG's ratio of luminances."""
    from matplotlib.colors import to_rgb

    def luminance(colour):
        parts = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
        return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), parts, strict=True))

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_axes_have_names_and_units():
    figure = figures.learning_curves(as_study(rounds_table()))
    assert [panel.get_ylabel() for panel in figure.axes] == ["global accuracy (GA, %)", "local accuracy (LA, %)"]
    assert figure.axes[-1].get_xlabel() == "communication round"
    assert "MB" in figures.against_bytes(as_study(rounds_table())).axes[0].get_xlabel()
    assert "(s)" in figures.against_seconds(as_study(rounds_table())).axes[0].get_xlabel()


def test_lines_are_means_and_bands_their_intervals():
    rounds = rounds_table(cases=("FOLA",), seeds=6)
    panel = figures.learning_curves(as_study(rounds)).axes[0]
    means = rounds.groupby("round")["GA"].mean()
    assert panel.lines[0].get_ydata() == pytest.approx(100 * means.to_numpy())
    outline = panel.collections[0].get_paths()[0].vertices
    middle = outline[np.isclose(outline[:, 0], 5), 1]
    assert middle.min() < 100 * means[5] < middle.max()
    assert middle.max() - middle.min() > 0.5


def test_many_lines_are_divided_by_their_condition_and_have_no_bands_where_more_than_four_share_a_panel():
    """Nine lines: a panel for each N, with three lines and bands; five lines in one panel have none, and say so."""
    divided = figures.curves_by_clients(
        as_study(rounds_table(cases=("FedAvg", "FOLA", "SCAFFOLD"), clients=(5, 10, 20)))
    )
    assert [panel.get_title(loc="left") for panel in divided.axes] == ["N = 5", "N = 10", "N = 20"]
    assert [(len(panel.lines), len(panel.collections)) for panel in divided.axes] == [(3, 3)] * 3
    assert {line.get_linestyle() for panel in divided.axes for line in panel.lines} == {"-"}
    many = figures.learning_curves(as_study(rounds_table(cases=("FedAvg", "FOLA", "SCAFFOLD", "FedCurv", "FedBE"))))
    assert [(len(panel.lines), len(panel.collections)) for panel in many.axes] == [(5, 0)] * 2
    assert "band" not in many._suptitle.get_text()


def test_bytes_are_cumulative_and_of_both_directions():
    panel = figures.against_bytes(as_study(rounds_table(cases=("FOLA",), rounds=3))).axes[0]
    assert panel.lines[0].get_xdata() == pytest.approx([4, 8, 12])  # 2 MB down and 2 MB up in every round


def test_traffic_of_another_order_has_a_logarithmic_axis():
    rounds = rounds_table()
    assert figures.against_bytes(as_study(rounds)).axes[0].get_xscale() == "linear"
    rounds.loc[rounds["case"].eq("FOLA"), "bytes_up"] *= 1000
    assert figures.against_bytes(as_study(rounds)).axes[0].get_xscale() == "log"


def test_who_sends_nothing_is_left_out_of_bytes_and_named():
    rounds = rounds_table()
    rounds.loc[rounds["case"].eq("FedAvg"), ["bytes_down", "bytes_up"]] = 0.0
    figure = figures.against_bytes(as_study(rounds))
    assert len(figure.axes[0].lines) == 1
    assert "FedAvg sends nothing" in " ".join(figure.remarks)


def _headline(**options):
    return figures.learning_curves(as_study(rounds_table(**options)))._suptitle.get_text()


def test_n_is_shown():
    assert "n = 3 seeds, band: their range" in figures.learning_curves(as_study(rounds_table()))._suptitle.get_text()
    assert "n = 6 seeds, band: 95 % interval" in _headline(seeds=6)
    assert "n = 1 seed" in _headline(seeds=1)


def test_diverged_and_running_runs_are_shown_as_such():
    figure = figures.learning_curves(as_study(with_failures(rounds_table())))
    panel = figure.axes[0]
    ends = [line for line in panel.lines if len(line.get_xdata()) == 1]
    assert sorted(line.get_marker() for line in ends) == ["X", "o"]
    assert all(line.get_xdata()[0] == 3 for line in ends)
    headline = figure._suptitle.get_text().replace("\n", " ")
    assert "1 diverged" in headline
    assert "1 not ended" in headline


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw",
    [
        figures.learning_curves,
        figures.against_bytes,
        figures.curves_by_alpha,
        figures.curvatures,
        figures.cosine_of_precisions,
    ],
)
def test_rounds_of_all_kinds_of_failures_never_crash(draw):
    rounds = with_failures(rounds_table(alphas=(0.01, 1)))
    for table in (rounds.iloc[:0], rounds.iloc[:1], rounds.loc[~rounds["ended"]], rounds.assign(GA=np.nan), rounds):
        figure = draw(as_study(table.copy()))
        figure.savefig(io.BytesIO(), format="svg")
        assert figure.remarks or not figure.empty


@pytest.mark.slow
@pytest.mark.parametrize(
    "draw",
    [
        figures.best_for_alpha_and_clients,
        figures.best_for_alpha,
        figures.winners,
        figures.over_hyperparameters,
        figures.over_epochs,
        figures.global_against_local,
        figures.errors_behind_accuracies,
    ],
)
def test_runs_of_all_kinds_of_failures_never_crash(draw):
    rounds = with_failures(rounds_table(alphas=(0.01, 1), epochs=(1, 5), strengths=(1, 10), rounds=4))
    table = last_rounds(rounds).assign(AE=0.1, LF=0.2)
    diverged = table.assign(status="diverged", ended=False)
    for part in (table.iloc[:0], table.iloc[:1], diverged, table, table.drop(columns=["method.strength"])):
        figure = draw(as_study(part.copy()))
        figure.savefig(io.BytesIO(), format="svg")
        assert figure.remarks or not figure.empty


def test_an_all_diverged_setting_is_a_cross():
    table = runs_table(cases=("FOLA",), alphas=ALPHAS, rounds=2)
    table.loc[table["data.alpha"].eq(0.01), ["status", "ended"]] = ["diverged", False]
    panel = figures.best_for_alpha(as_study(table)).axes[0]
    assert [line.get_marker() for line in panel.lines] == ["s", "x"]
    assert np.isnan(panel.lines[0].get_ydata()[0])


def test_nothing_says_why():
    figure = figures.errors_behind_accuracies(as_study(runs_table(rounds=1)))
    assert figure.empty
    assert "probe.reference" in figure.remarks[0]


def test_the_correlation_is_that_of_the_points():
    table = runs_table(lrs=(1, 0.1, 0.01), rounds=2)
    labels = [text.get_text() for text in figures.global_against_local(as_study(table)).legends[0].get_texts()]
    for case, mine in table.groupby("case"):
        assert f"{case}: {in_words(correlation(mine['LA'], mine['GA'], mine['training.lr']))}" in labels
    slope = np.polyfit(table["LA"], table["GA"], 1)[0]
    line = figures.global_against_local(as_study(table)).axes[0].lines[-1]
    (x0, x1), (y0, y1) = line.get_xdata(), line.get_ydata()
    assert (y1 - y0) / (x1 - x0) == pytest.approx(slope)


def test_best_per_alpha_and_clients_has_fedavg_solid_and_fola_dashed():
    figure = figures.best_for_alpha_and_clients(as_study(runs_table(alphas=ALPHAS, clients=(5, 10), rounds=1)))
    legend = figure.legends[0]
    handles = {t.get_text(): h for t, h in zip(legend.get_texts(), legend.legend_handles, strict=True)}
    assert handles["FedAvg"].get_linestyle() == "-"
    assert handles["FOLA"].get_linestyle() == "--"
    assert handles["N = 5"].get_color() != handles["N = 10"].get_color()


def test_the_winner_and_cases_level_with_it_are_filled():
    table = runs_table(cases=("FedAvg", "FOLA", "FedCurv"), alphas=(0.01, 1), rounds=1)
    # By seed: FOLA 0.70, 0.80, 0.90; FedCurv overlaps with it, FedAvg ends below; at alpha 1 only FedAvg has ended.
    points = {"FOLA": (0.7, 0.8, 0.9), "FedCurv": (0.6, 0.65, 0.75), "FedAvg": (0.5, 0.6, 0.69)}
    table["GA"] = [points[case][seed] for case, seed in zip(table["case"], table["seed"], strict=True)]
    gone = table["data.alpha"].eq(1) & table["case"].ne("FedAvg")
    table.loc[gone, ["status", "ended", "GA"]] = "diverged", False, np.nan
    figure = figures.winners(as_study(table))
    (panel,) = figure.axes
    assert [t.get_text() for t in figure.legends[0].get_texts() if t.get_text()] == [
        "α = 0.01 (best: FOLA)",
        "α = 1 (best: FedAvg)",
    ]
    names = [label.get_text() for label in panel.get_yticklabels()]
    small, large = palette.sequence(2)
    filled = {
        names[round(float(line.get_ydata()[0]))]: line.get_markerfacecolor() == small
        for line in panel.lines
        if line.get_marker() == "o" and line.get_color() == small
    }
    assert filled == {"FOLA": True, "FedCurv": True, "FedAvg": False}
    assert names.index("FOLA") > names.index("FedCurv") > names.index("FedAvg")  # the best on top
    crosses = [line for line in panel.lines if line.get_marker() == "x"]
    assert [line.get_color() for line in crosses] == [large, large]  # two that have diverged


def test_centralised_training_wins_nothing():
    table = runs_table(cases=("FedAvg", "FOLA"), alphas=(0.01, 1), rounds=1)
    table.loc[table["case"].eq("FedAvg"), ["case", "method"]] = "centralised"
    table.loc[table["case"].eq("centralised"), "GA"] = 0.99
    figure = figures.winners(as_study(table))
    assert [t.get_text() for t in figure.legends[0].get_texts() if t.get_text()] == [
        "α = 0.01 (best: FOLA)",
        "α = 1 (best: FOLA)",
    ]
    reference = [line for line in figure.axes[0].lines if line.get_marker() == "o" and line.get_xdata()[0] > 98]
    assert [line.get_markerfacecolor() for line in reference] == [palette.LIGHT.paper] * 2


def test_a_method_has_one_colour_in_all_figures():
    one = palette.looks(["FedAvg", "FOLA"], {})
    other = palette.looks(["FOLA offline", "FOLA", "SCAFFOLD"], {"FOLA offline": "FOLA"})
    assert one["FOLA"] == other["FOLA"]
    assert len({look.colour for look in other.values()}) == 3


# Machado, Oliveira, Fernandes 2009, severity 1: protanopia, deuteranopia, tritanopia.
BLINDNESS = [
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
]


def lab(colour):
    """CIE Lab of linear RGB."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ colour
    f = np.cbrt(np.clip(xyz / np.array([0.9505, 1, 1.089]), 1e-6, None))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("place", [0, 1])
def test_the_methods_of_the_paper_differ_for_every_kind_of_colour_vision(place):
    from matplotlib.colors import to_rgb

    names = ["FedAvg", "FOLA", "FedCurv", "SCAFFOLD", "FedNova"]
    linear = {name: np.array(to_rgb(palette.METHODS[name][place])) ** 2.2 for name in names}
    for matrix in [np.eye(3), *map(np.array, BLINDNESS)]:
        seen = {name: lab(np.clip(matrix @ colour, 0, 1)) for name, colour in linear.items()}
        for first in names:
            for second in names:
                # Where colours come close, markers tell them apart; FOLA and its rivals must differ by colour.
                least = 18 if "FOLA" in (first, second) else 9
                assert first == second or np.linalg.norm(seen[first] - seen[second]) > least, (first, second)
    assert len({palette.METHODS[name][2] for name in palette.METHODS}) == len(palette.METHODS)


def test_files_in_all_formats_and_a_dark_one(tmp_path):
    paths = style.save(figures.learning_curves(as_study(rounds_table())), tmp_path / "curves")
    assert [path.name for path in paths] == ["curves.svg", "curves.pdf", "curves.png", "curves-dark.svg"]
    assert paths[1].read_bytes().startswith(b"%PDF")
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    light, dark = paths[0].read_text(), paths[3].read_text()
    assert palette.LIGHT.ink in light
    assert palette.LIGHT.ink not in dark
    assert palette.DARK.paper in dark
    again = style.as_svg(figures.learning_curves(as_study(rounds_table())), "curves")
    assert again == light  # the same every time
    ids = re.findall(r'id="([^"]+)"', light)
    assert all(name.startswith("curves-") for name in ids)


def test_notebooks_get_a_picture():
    assert figures.learning_curves(as_study(rounds_table()))._repr_png_().startswith(b"\x89PNG")
