"""From studies to runs: every combination once, checked settings, draws that are the same for all."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.errors import UserError
from fl_lightning.metrics.early_stopping import Stop
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.identity import identity
from tune import study_file
from tune.grid import cells, draw, environments, points
from tune.study import Case, Given, Range, Search, Study
from tune.study_file import load

BASE = {"data": "digits", "model": "mlp", "model.hidden": [16], "engine": "functional", "federation.rounds": 1}


def make(**changes):
    return Study("mine", "", **{"base": BASE, "cases": (Case("FedAvg", {"method": "fedavg"}),), **changes})


def over(**space):
    return {key.replace("__", "."): Range("grid", tuple(values)) for key, values in space.items()}


def refused(**changes):
    with pytest.raises(UserError) as caught:
        cells(make(**changes))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_cells_are_the_product_and_equal_what_the_command_line_makes_of_it():
    mine = make(
        environments=over(data__alpha=[0.01, 1], data__clients=[5, 7]),
        space=over(training__lr=[1, "1e-1"], training__batch_size=[8, 16], model__hidden=[[8], [4, 4]]),
        cases=(
            Case("FedAvg", {"method": "fedavg"}),
            Case("FOLA", {"method": "fola", "method.damping": 0.5}, over(method__strength=[1, 10])),
        ),
        seeds=(3, 1),
    )
    expected = []
    for alpha, clients in itertools.product([0.01, 1], [5, 7]):
        for method in ({"method": "fedavg"}, {"method": "fola", "method.damping": 0.5}):
            strengths = [{"method.strength": v} for v in (1, 10)] if method["method"] == "fola" else [{}]
            for lr, batch, hidden, strength in itertools.product([1, 0.1], [8, 16], [[8], [4, 4]], strengths):
                varied = {"training.lr": lr, "training.batch_size": batch, "model.hidden": hidden, **strength}
                conditions = {"data.alpha": alpha, "data.clients": clients}
                expected += [configure({**BASE, **conditions, **method, **varied, "seed": seed}) for seed in (3, 1)]
    found = [config for cell in cells(mine) for config in cell.configs]
    assert [config.flat() for config in found] == [config.flat() for config in expected]
    assert [identity(config) for config in found] == [identity(config) for config in expected]
    assert len({identity(config) for config in found}) == len(found) == 4 * 2 * (8 + 16)


@settings(max_examples=8, deadline=None)
@given(
    st.lists(st.sampled_from([0.01, 0.1, 1, 10]), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from([1, 2, 5]), min_size=1, max_size=3, unique=True),
    st.integers(1, 3),
    st.integers(1, 3),
)
def test_the_number_of_cells(alphas, epochs, num_cases, num_seeds):
    cases = tuple(Case(f"c{i}", {"method": "fedprox", "method.mu": float(i)}) for i in range(num_cases))
    spaces = {"environments": over(data__alpha=alphas), "space": over(training__epochs=epochs)}
    made = cells(make(**spaces, cases=cases, seeds=tuple(range(num_seeds))))
    assert len(made) == len(alphas) * len(epochs) * num_cases
    assert len({cell.group for cell in made}) == len(alphas) * num_cases
    triples = {(cell.case, cell.environment["data.alpha"], cell.point["training.epochs"]) for cell in made}
    assert len(triples) == len(made)
    assert all(cell.config.training.epochs == cell.point["training.epochs"] for cell in made)
    assert all([config.seed for config in cell.configs] == list(range(num_seeds)) for cell in made)


def test_parts_can_be_varied_too():
    made = cells(make(base={"data": "digits"}, space=over(model=["mlp", "softmax"])))
    assert [cell.config.names["model"] for cell in made] == ["mlp", "softmax"]


def test_a_case_may_vary_what_the_space_varies_for_others():
    cases = (Case("a", {"method": "fedavg"}), Case("b", {"method": "fola"}, over(training__lr=[5])))
    made = cells(make(cases=cases, space=over(training__lr=[1, 2])))
    assert [(cell.case, cell.config.training.lr) for cell in made] == [("a", 1), ("a", 2), ("b", 5)]


def test_overrides_reach_every_run():
    pinned = load("mnist_first_round", "smoke", {"training.lr": "0.5", "data.alpha": "3", "method.damping": "0.25"})
    with pytest.raises(UserError, match=r"case FedAvg has no setting method\.damping.* put it into the case FOLA"):
        cells(pinned)
    pinned = load("mnist_first_round", "smoke", {"training.lr": "0.5", "data.alpha": "3"})
    made = cells(pinned)
    assert len(made) == 2 * 2  # epochs and cases are left
    assert {(cell.config.training.lr, cell.config.split.alpha) for cell in made} == {(0.5, 3.0)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"space": over(training__lrr=[1])}, "unknown setting 'training.lrr': did you mean 'training.lr'?"),
        ({"environments": over(data__alfa=[1])}, "unknown setting 'data.alfa': did you mean 'data.alpha'?"),
        ({"base": {"data": "digit"}}, "did you mean 'digits'?"),
        ({"cases": (Case("x", {"method": "fedavgg"}),)}, "study mine, case x: "),
        ({"cases": (Case("x", {"method": "fola"}, over(method__strenth=[1])),)}, "did you mean 'method.strength'?"),
        ({"space": over(training__lr=[0.1, "fast"])}, "training.lr must be a number, got"),
        ({"space": over(training__lr=[0.1, -1])}, "training.lr"),
        ({"space": over(training__epochs=[1.5])}, "training.epochs must be a whole number"),
        ({"base": {"training.epochs": 10**20}}, "training.epochs must be at most 1,000,000 in a study, got 1000"),
        ({"base": {"federation.rounds": 10**20}}, "federation.rounds must be at most 1,000,000 in a study, got 1000"),
        ({"cases": (Case("x", {"method": "fedavg"}),), "metric": "FOO"}, "unknown metric 'FOO': expected one of AE, "),
        (
            {"cases": (Case("x", {"method": "fedavg"}),), "stop": Stop("GA_valdation", 0.5)},
            "unknown stop.metric 'GA_valdation': did you mean 'GA_validation'?",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused_with_study_and_case(changes, message):
    text = refused(**changes)
    assert text.startswith("study mine, case ")
    assert message in text


@pytest.mark.parametrize(
    ("where", "value", "target"),
    [
        ("space", over(method__strength=[1, 2]), "the space of the case FOLA and of offline"),
        ("environments", over(method__strength=[1, 2]), "the case FOLA and of offline"),
        ("base", {"method.strength": 1}, "the case FOLA and of offline"),
    ],
)
def test_a_setting_that_only_some_cases_have_belongs_to_them(where, value, target):
    cases = (
        Case("FedAvg", {"method": "fedavg"}),
        Case("FOLA", {"method": "fola"}),
        Case("offline", {"method": "fola", "method.curvature": "offline"}),
    )
    assert refused(cases=cases, **{where: value}) == (
        f"study mine, case FedAvg has no setting method.strength, which stands in {where} for all cases; put it into "
        f"{target}"
    )


SIZES = {  # cells and runs at the paper's scale
    "ae_lf": (40, 200),
    "calibration": (5 * 12, 300),
    "finetune": (1080, 1080),
    "laplace": (7, 21),
    "ablation_online_offline": (3, 9),
    "ablation_prior": (8, 24),
    "cifar_epochs": (30 * 11, 990),
    "cifar_heterogeneity": (5 * 30 * 11, 4950),
    "cifar_table": (8 * 6, 144),
    "demo": (3, 30),
    "mnist_curves": (15, 75),
    "mnist_first_round": (25 * 125 * 2, 187_500),
    "one_shot": (8 * 10 * 12, 8 * 10 * 12 * 3),
    "personal": (4 * 4, 80),
    "structured": (6 * 6, 180),
    "rivals": (len(load("rivals").cases) * 5 * 20, len(load("rivals").cases) * 5 * 20 * 3),
}


@pytest.mark.parametrize("name", study_file.names())
@pytest.mark.parametrize("scale", ["smoke", *(pytest.param(s, marks=pytest.mark.slow) for s in ("small", "paper"))])
def test_every_shipped_study_at_every_scale_expands_to_valid_runs(name, scale):
    mine = load(name, scale)
    made = cells(mine)
    identities = {identity(cell.config) for cell in made}
    assert len(identities) == len(made), "some settings are tried twice"
    if scale == "paper":
        assert (len(made), len(made) * len(mine.seeds)) == SIZES[name]
    if scale == "smoke":
        assert {cell.config.names["data"] for cell in made} <= {"digits"}
        assert len(made) * len(mine.seeds) <= 40
    if mine.continue_to is not None:
        assert all(cell.config.federation.rounds < mine.continue_to for cell in made)


def test_the_papers_grid_is_the_papers():
    made = cells(load("mnist_first_round", "paper"))
    assert {cell.config.training.lr for cell in made} == {1, 0.1, 0.01, 0.001, 0.0001}
    assert {cell.config.training.epochs for cell in made} == {1, 5, 10, 15, 20}
    assert {cell.config.training.batch_size for cell in made} == {8, 32, 64, 128, 256}
    assert {cell.config.split.alpha for cell in made} == {0.01, 0.1, 1, 10, 100}
    assert {cell.config.split.clients for cell in made} == {5, 10, 20, 50, 100}
    assert all(cell.config.federation.rounds == 1 for cell in made)


DRAWN = {
    "training.lr": Range("loguniform", (0.001, 1.0)),
    "training.momentum": Range("uniform", (0.0, 0.9)),
    "training.batch_size": Range("choice", (8, 16, 32)),
    "training.epochs": Range("grid", (1, 2)),
}


def test_draws_are_reproducible_and_equal_for_every_case():
    cases = (Case("a", {"method": "fedavg"}), Case("b", {"method": "fola"}, {"method.strength": Range("choice", (1,))}))
    mine = make(cases=cases, space=DRAWN, search=Search("random", 5), environments=over(data__alpha=[0.1, 1]))
    made = cells(mine)
    assert len(made) == 2 * 2 * 5
    for environment in environments(mine):
        of = {
            label: [c.point for c in made if c.case == label and c.environment == environment] for label in ("a", "b")
        }
        assert of["a"] == [{key: point[key] for key in DRAWN} for point in of["b"]] == points(mine, cases[0])
    assert [identity(cell.config) for cell in cells(mine)] == [identity(cell.config) for cell in made]
    longer = cells(replace(mine, search=Search("random", 7)))
    assert [c.point for c in longer if c.case == "a"][:5] == [c.point for c in made if c.case == "a"][:5]


def test_draws_fill_their_ranges():
    drawn = [draw(DRAWN, index) for index in range(400)]
    rates = [point["training.lr"] for point in drawn]
    assert 0.001 <= min(rates) < 0.0012
    assert 0.85 < max(rates) <= 1
    below = sum(rate < math.sqrt(0.001) for rate in rates) / 400  # half of a loguniform is below its geometric middle
    assert abs(below - 0.5) < 0.1
    assert min(p["training.momentum"] for p in drawn) >= 0
    assert max(p["training.momentum"] for p in drawn) < 0.9
    for value in (8, 16, 32):
        assert abs(sum(p["training.batch_size"] == value for p in drawn) / 400 - 1 / 3) < 0.1
    ranks = [[point[key] for point in drawn] for key in ("training.lr", "training.momentum")]
    means = [sum(values) / 400 for values in ranks]
    covariance = sum((a - means[0]) * (b - means[1]) for a, b in zip(*ranks, strict=True)) / 400
    assert abs(covariance) < 0.01  # keys are drawn independently


def test_settings_go_with_a_condition():
    """Brute force: each cell is what the command line makes of the settings, written out one by one."""
    mine = make(
        base={"data": "digits", "engine": "functional", "federation.rounds": 1, "training.lr": 0.5},
        environments=over(data__alpha=[0.1, 1, 10], data__clients=[3, 4]),
        given=(
            Given({"data.alpha": (0.1, "1e0")}, {"model": "mlp", "model.hidden": [8]}),
            Given({"data.alpha": (10,)}, {"model": "softmax"}),
            Given({"data.clients": (4,), "data": ("digits",)}, {"training.lr": 0.25, "method.mu": 3.0}),
        ),
        cases=(Case("mine", {"method": "fedprox", "method.mu": 1.0}), Case("plain", {"method": "fedprox"})),
        space=over(training__epochs=[1, 2]),
    )
    expected = []
    for alpha, clients in itertools.product([0.1, 1, 10], [3, 4]):
        for mu in (1.0, 3.0 if clients == 4 else None):
            for epochs in (1, 2):
                settings = {"data": "digits", "engine": "functional", "federation.rounds": 1, "method": "fedprox"}
                settings |= {"data.alpha": alpha, "data.clients": clients, "training.epochs": epochs}
                settings |= {"training.lr": 0.25 if clients == 4 else 0.5} | ({"method.mu": mu} if mu else {})
                settings |= {"model": "softmax"} if alpha == 10 else {"model": "mlp", "model.hidden": [8]}
                expected.append(identity(configure(settings)))
    found = cells(mine)
    assert [identity(cell.config) for cell in found] == expected
    assert [sorted(cell.environment) for cell in found] == [["data.alpha", "data.clients"]] * len(found)


def test_conditions_of_given_settings_are_those_of_the_study():
    assert "got data.subset; name them there" in refused(given=(Given({"data.subset": (1,)}, {"model": "softmax"}),))
    assert "data.alpha, which is a condition itself" in refused(
        environments=over(data__alpha=[1]), given=(Given({"data": ("digits",)}, {"data.alpha": 2}),)
    )
