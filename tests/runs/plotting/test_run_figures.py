"""Pictures of single runs and of many have one palette, ticks at the first and last round, and nothing above 100 %."""

import itertools

import pytest

from analysis import figures, style
from analysis.runs import of_results
from fl_lightning.metrics.metric import Measurement
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.folder import Result
from fl_lightning.runs.plotting import palette, run_figures, strokes
from tests.support.synthetic import as_study, rounds_table

CURVE = [{"GA": 0.9, "LA": 0.5}, {"GA": 1.0, "LA": 0.6}, {"GA": 0.97, "LA": 0.7}]


def colours(figure):
    return {line.get_color() for panel in figure.axes for line in panel.lines}


def test_a_single_run_has_the_colour_of_its_method():
    many = figures.learning_curves(as_study(rounds_table(cases=("FedAvg", "FOLA"))))
    for method, shown in (("fedavg", "FedAvg"), ("fola", "FOLA")):
        (colour,) = colours(run_figures.learning_curves(method, CURVE))
        assert colour == palette.METHODS[shown][0]
        assert colour in colours(many)


def test_somebodys_own_method_has_the_same_colour_everywhere():
    alone = palette.looks(["median"], {})["median"]
    assert alone == palette.looks(["FOLA", "median", "FedAvg"], {})["median"]
    assert alone == palette.looks(["with a label"], {"with a label": "median"})["with a label"]
    names = ["median", "krum", "trimmed", "zeno"]
    for order in itertools.permutations(names):
        assert palette.looks(order, {}) == palette.looks(names, {})
    assert len({look.colour for look in palette.looks(names, {}).values()}) == len(names)
    assert alone.colour in colours(run_figures.learning_curves("median", CURVE))


def test_every_colour_stands_for_one_thing_on_light_and_on_dark_ground():
    lights = [*palette.LIGHT[1:], *(c[0] for c in (*palette.METHODS.values(), *palette.SPARE, *palette.SHADES))]
    lights += palette.SEQUENCE
    assert len(set(lights)) == len(lights) == len(palette.pairs())
    assert len(set(palette.pairs().values())) == len(lights)


def test_rounds_are_marked_from_the_first_to_the_last():
    for last in (*range(1, 60), 100, 137, 1000):
        ticks = strokes.round_ticks(last)
        assert ticks[0] == 1
        assert ticks[-1] == last
        assert len(ticks) <= 9
    figure = run_figures.learning_curves("fola", CURVE)
    assert list(figure.axes[0].get_xticks()) == [1, 2, 3]
    assert list(figures.learning_curves(as_study(rounds_table(rounds=12))).axes[-1].get_xticks()) == [
        1,
        2,
        4,
        6,
        8,
        10,
        12,
    ]


def test_no_axis_goes_above_100_percent():
    rounds = rounds_table()
    rounds["GA"] = rounds["GA"].clip(lower=0.98)
    rounds.loc[rounds["round"].eq(5), "GA"] = 1.0
    for figure in (run_figures.learning_curves("fola", CURVE), figures.learning_curves(as_study(rounds))):
        assert figure.axes[0].get_ylim()[1] == 100
        assert max(figure.axes[0].get_yticks()[figure.axes[0].get_yticks() <= 100]) <= 100
        assert figure.axes[1].get_ylim()[1] < 100
    lucky = rounds.groupby("run_id").tail(1).assign(GA=lambda t: 0.5 + t["LA"])
    lucky["GA"] = lucky["GA"].clip(upper=1.0)
    for line in figures.global_against_local(as_study(lucky)).axes[0].lines:
        assert max(line.get_ydata()) <= 100 + 1e-9


@pytest.fixture
def runs_of_two():
    def runs():
        for method in ("fedavg", "fola"):
            for seed in range(3):
                config = configure({"method": method, "seed": seed, "data": "digits", "federation.rounds": 2})
                history = [Measurement({"GA": 0.1 * (seed + r), "LA": 0.1 * seed}, {}) for r in (1, 2)]
                status = "diverged" if (method, seed) == ("fedavg", 2) else "finished"
                yield method, config, Result(status, "", f"{method}{seed}", None, history)

    return list(runs())


def test_runs_of_this_process_have_bands_over_their_seeds(runs_of_two):
    rounds = of_results(runs_of_two)
    figure = figures.learning_curves(rounds, wide=True)
    assert figure.get_size_inches()[0] == style.PAGE
    panel = figure.axes[0]
    assert len(panel.collections) == 2  # a band for each
    (fola,) = [line for line in panel.lines if line.get_color() == palette.METHODS["FOLA"][0]]
    assert fola.get_ydata() == pytest.approx([20, 30])
    ends = panel.collections[1].get_paths()[0].vertices[:, 1]
    assert (min(ends), max(ends)) == pytest.approx((10, 40))
    assert "1 diverged" in figure._suptitle.get_text()
