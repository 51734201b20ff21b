"""Studies: what a file says, and what is refused in one line."""

import math

import pytest
import yaml

from fl_lightning import discovery
from fl_lightning.errors import UserError
from fl_lightning.metrics.early_stopping import Stop
from tune import study_file
from tune.grid import cells
from tune.study import Given, Range, Search
from tune.study_file import load

SMALL = {
    "about": "Two methods.",
    "base": {"data": "digits", "model": "mlp", "training": {"lr": 0.1, "epochs": 2}},
    "environments": {"data.alpha": [0.01, 1]},
    "space": {"training.batch_size": [8, 16]},
    "cases": ["fedavg", {"label": "FOLA", "method": "fola", "space": {"method.strength": [1, 10]}}],
    "seeds": 3,
}


def write(folder, content, name="mine.yaml"):
    path = folder / name
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


def refused(folder, *arguments, **changes):
    """The message with which a changed study is refused."""
    content = {key: value for key, value in {**SMALL, **changes}.items() if value is not None}
    with pytest.raises(UserError) as caught:
        load(write(folder, content), *arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_yaml_file_is_read(tmp_path):
    mine = load(write(tmp_path, SMALL))
    assert (mine.name, mine.scale, mine.about) == ("mine", "", "Two methods.")
    assert mine.base == {"data": "digits", "model": "mlp", "training.lr": 0.1, "training.epochs": 2}
    assert mine.environments == {"data.alpha": Range("grid", (0.01, 1))}
    assert mine.space == {"training.batch_size": Range("grid", (8, 16))}
    assert [case.label for case in mine.cases] == ["fedavg", "FOLA"]
    assert mine.cases[0].settings == {"method": "fedavg"}
    assert mine.cases[1].settings == {"method": "fola"}
    assert mine.cases[1].space == {"method.strength": Range("grid", (1, 10))}
    assert mine.seeds == (0, 1, 2)
    assert (mine.search, mine.stop, mine.metric) == (Search(), None, "GA")


def test_a_file_may_say_who_trains_the_clients_which_is_no_part_of_the_study(tmp_path):
    plain = load(write(tmp_path, SMALL))
    assert study_file.workers_of(write(tmp_path, SMALL)) is None
    path = write(tmp_path, {**SMALL, "workers": 4, "scales": {"small": {}, "paper": {"workers": "auto"}}})
    assert [study_file.workers_of(path, scale) for scale in (None, "small", "paper")] == [4, 4, "auto"]
    assert load(write(tmp_path, {**SMALL, "workers": 4})).identity == plain.identity


def test_a_python_file_says_the_same(tmp_path):
    code = f"rates = [8, 16]\nSTUDY = {SMALL!r}\nSTUDY['space'] = {{'training.batch_size': rates}}\n"
    same = load(write(tmp_path, code, "mine.py"))
    assert same == load(write(tmp_path, SMALL))
    assert same.identity == load(write(tmp_path, SMALL)).identity


def test_scales_change_what_they_name_and_leave_the_rest(tmp_path):
    scales = {
        "smoke": {"base": {"training.epochs": 1}, "seeds": [7], "cases": ["fedavg"], "thresholds": [0.5]},
        "small": {"space": {"training.lr": [1]}},
    }
    path = write(tmp_path, {**SMALL, "base": {"data": "digits", "training.epochs": 2}, "scales": scales})
    smoke, small = load(path, "smoke"), load(path)
    assert smoke.base == {"data": "digits", "training.epochs": 1}
    assert (smoke.seeds, [case.label for case in smoke.cases], smoke.thresholds) == ((7,), ["fedavg"], (0.5,))
    assert smoke.space == load(write(tmp_path, SMALL, "plain.yaml")).space
    assert small.scale == "small"  # the default
    assert small.space == {"training.batch_size": Range("grid", (8, 16)), "training.lr": Range("grid", (1,))}
    assert smoke.identity != small.identity


def test_a_scale_may_nest_what_the_study_writes_with_dots(tmp_path):
    content = {
        **SMALL,
        "base": {"data": "digits", "training.lr": 0.1, "training": {"epochs": 3}},
        "scales": {"smoke": {"base": {"training": {"lr": 1}}}},
    }
    assert load(write(tmp_path, content), "smoke").base == {"data": "digits", "training.lr": 1, "training.epochs": 3}


def test_overrides_pin_keys_wherever_they_are(tmp_path):
    content = {**SMALL, "cases": [{"label": "a", "method": "fola", "method.damping": 0.1, "space": {"seed": [1]}}]}
    pinned = load(
        write(tmp_path, content),
        None,
        {"data.alpha": "5", "training.batch_size": "4", "method.damping": "0.2", "training.lr": "1"},
    )
    assert pinned.environments == {}
    assert pinned.space == {}
    assert pinned.cases[0].settings == {"method": "fola"}
    assert pinned.base["data.alpha"] == "5"
    assert pinned.base["method.damping"] == "0.2"
    assert pinned.base["training.lr"] == "1"
    assert pinned.base["training.epochs"] == 2


def test_seeds_are_a_number_or_a_list(tmp_path):
    assert load(write(tmp_path, {**SMALL, "seeds": [5, 3, 5]})).seeds == (5, 3)
    for written, meant in ((2, (0, 1)), ("2", (0, 1)), ("0,4", (0, 4)), ("2-4", (2, 3, 4)), ("0-1, 7", (0, 1, 7))):
        assert load(write(tmp_path, {**SMALL, "seeds": written})).seeds == meant
    assert load(write(tmp_path, {**SMALL, "seeds": 2, "confirm": {"seeds": "2"}})).confirm.seeds == (2, 3)
    for bad in (0, -1, "three", "0", "-1", "4-", "4-2", [0.5], 2.5, True):
        assert "seeds must be a number of seeds such as 3" in refused(tmp_path, seeds=bad)
    assert "has no seeds" in refused(tmp_path, seeds=[])


def test_distributions(tmp_path):
    space = {
        "training.lr": {"loguniform": ["1e-3", 1]},  # YAML takes 1e-3 for text
        "training.momentum": {"uniform": [0, 0.9]},
        "training.batch_size": {"choice": [8, 16]},
        "model.hidden": [[8], [16, 8]],
    }
    mine = load(write(tmp_path, {**SMALL, "space": space, "search": {"algorithm": "random", "samples": 4}}))
    assert mine.space["training.lr"] == Range("loguniform", (0.001, 1.0))
    assert mine.space["training.momentum"] == Range("uniform", (0.0, 0.9))
    assert mine.space["model.hidden"] == Range("grid", ([8], [16, 8]))
    assert mine.search.samples == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"spaces": {}},
            "unknown keys in the file of study 'mine': 'spaces' (did you mean 'space'?); expected some of",
        ),
        ({"seeds": 10**9}, "mine: seeds must be at most 10,000 in number, got 1000000000"),
        ({"confirm": {"seeds": 10**9}}, "mine: confirm.seeds must be at most 10,000 in number, got 1000000000"),
        ({"continue_to": 10**20}, "continue_to must be a number of rounds, 1,000,000 at most"),
        (
            {"space": {f"model.{name}": list(range(50)) for name in "abc"}},
            "at most 10,000 settings and 200,000 runs, got 750,000 settings with 3 seeds; give fewer values",
        ),
        ({"search": {"algorithm": "optuna", "samples": 10**9}}, "got 4,000,000,000 settings with 3 seeds"),
        ({"search": {"algoritm": "grid"}}, "unknown mine: search 'algoritm': did you mean 'algorithm'?"),
        ({"search": {"algorithm": "optun", "samples": 3}}, "unknown search.algorithm 'optun': did you mean 'optuna'?"),
        ({"search": {"algorithm": "grid", "scheduler": "asya"}}, "did you mean 'asha'?"),
        ({"search": {"algorithm": "random"}}, "search.samples must say how many settings each case may try"),
        ({"search": {"algorithm": "random", "samples": 0}}, "search.samples must say how many"),
        ({"search": {"samples": 5}}, "a grid tries all settings"),
        ({"search": {"algorithm": "random", "samples": 5, "grace": 0}}, "search.grace must be a whole number"),
        ({"search": {"algorithm": "random", "samples": 5, "reduction": 1}}, "search.reduction must be a whole"),
        ({"search": {"scheduler": "asha"}}, "search.scheduler asha"),
        ({"search": "optuna"}, "mine: search must be a mapping, got 'optuna'"),
        ({"stop": {"patients": 3}}, "unknown mine: stop 'patients': did you mean 'patience'?"),
        ({"stop": {"patience": 0}}, "stop.patience must be a number of rounds >= 1, got 0"),
        ({"stop": {"at_least": "much"}}, "stop.at_least must be a number, got 'much'"),
        ({"stop": {"metric": 3}}, "stop.metric must be the name of a metric, got 3"),
        ({"space": {"training.lr": []}}, "training.lr must be a list with at least one value, got []"),
        ({"space": {"training.lr": 0.1}}, "training.lr must be a list with at least one value, got 0.1"),
        ({"space": {"training.lr": "0.1"}}, "training.lr must be a list with at least one value, got '0.1'"),
        ({"space": [1]}, "mine: space must be a mapping, got [1]"),
        ({"space": {"training.lr": {"loguniform": [0, 1]}}}, "loguniform: [low, high] with 0 < low < high, got [0, 1]"),
        ({"space": {"training.lr": {"uniform": [1, 1]}}}, "uniform: [low, high] with low < high, got [1, 1]"),
        ({"space": {"training.lr": {"uniform": [1]}}}, "uniform: [low, high] with low < high, got [1]"),
        ({"space": {"training.lr": {"uniform": ["a", "b"]}}}, "uniform: [low, high] with low < high"),
        ({"space": {"training.lr": {"lognormal": [0.1, 1]}}}, "unknown distribution of training.lr 'lognormal'"),
        ({"space": {"training.lr": {"choice": [1], "uniform": [0, 1]}}}, "must be a list or one of choice, uniform"),
        ({"space": {"training.lr": {"loguniform": [0.1, 1]}}}, "draws training.lr at random, which a grid cannot"),
        ({"environments": {"data.alpha": {"choice": [1]}}}, "environments.data.alpha must be a list of values"),
        ({"environments": {"data.alpha": []}}, "data.alpha must be a list with at least one value, got []"),
        ({"cases": ["fola", {"method": "fola"}]}, "has two cases called 'fola'; give each its own label"),
        ({"cases": []}, "has no cases"),
        ({"cases": None}, "has no cases"),
        ({"cases": {"method": "fola"}}, "mine: cases must be a list"),
        ({"cases": [{"method.strength": 1}]}, "a case must name its method"),
        ({"cases": [3]}, "mine: a case must be a mapping, got 3"),
        ({"base": "digits"}, "mine: base must be a mapping, got 'digits'"),
        ({"continue_to": 0}, "continue_to must be a number of rounds"),
        ({"continue_to": "many"}, "continue_to must be a number of rounds"),
        ({"thresholds": 0.5}, "mine: thresholds must be a list of numbers, got 0.5"),
        ({"thresholds": ["half"]}, "mine: thresholds must be a list of numbers, got ['half']"),
        ({"metric": 5}, "metric must be the name of a metric, got 5"),
        ({"keep_models": "no"}, "keep_models must be true or false, got 'no'"),
        ({"keep_checkpoints": "no"}, "keep_checkpoints must be true or false, got 'no'"),
        ({"scales": ["smoke"]}, "scales must be a mapping of names"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path, changes, message):
    assert message in refused(tmp_path, **changes)


def test_a_misspelt_key_lists_those_there_are(tmp_path):
    text = refused(tmp_path, enviroments={"data.alpha": [1]})
    hint = "unknown keys in the file of study 'mine': 'enviroments' (did you mean 'environments'?); "
    assert f"{hint}expected some of about, base," in text
    assert text.endswith("stop, thresholds, workers")


def test_all_unknown_keys_are_told_at_once_with_what_was_meant(tmp_path):
    text = refused(tmp_path, name="x", description="y", grid={}, qqq=1)
    assert text.startswith(
        "unknown keys in the file of study 'mine': 'description' (did you mean 'about'?), 'grid' (did you mean "
        "'space'?), 'name' (leave it out: the file names the study), 'qqq'; expected some of about, "
    )


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)


MERGES = "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}\n" for i in range(1, 12))


@pytest.mark.parametrize(
    "content", [BOMB, MERGES, "base: &b {data: digits, training: *b}\n", "base: " + 10_000 * "[", "base: &b [*b]\n"]
)
def test_a_file_that_unfolds_without_end_is_refused(tmp_path, content):
    with pytest.raises(UserError, match=r"must hold at most 100,000 values, nested at most 20 deep"):
        load(write(tmp_path, content))


def test_a_file_that_takes_long_to_read_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"must have at most 300,000 bytes, got 300,001; shorten it"):
        load(write(tmp_path, "#" * 300_001))


def test_an_empty_space_cannot_be_searched(tmp_path):
    cases = ["fedavg", "fola"]
    search = {"algorithm": "optuna", "samples": 3}
    assert "searches an empty space" in refused(tmp_path, space=None, cases=cases, search=search)


def test_scales_that_are_not_there(tmp_path):
    assert "has no scales, got --scale smoke; leave it out" in refused(tmp_path, "smoke")
    scales = {"smoke": {}, "paper": {}}
    assert "unknown scale 'smok': did you mean 'smoke'?" in refused(tmp_path, "smok", scales=scales)
    assert "scale smoke must be a mapping, got 3" in refused(tmp_path, "smoke", scales={"smoke": 3})


def test_studies_that_are_not_there(tmp_path):
    for name, message in {
        "mnist_first_rond": "unknown study 'mnist_first_rond': did you mean 'mnist_first_round'?",
        str(tmp_path / "none.yaml"): "no study at",
        str(tmp_path / "none.py"): "no study at",
    }.items():
        with pytest.raises(UserError, match=message):
            load(name)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("bad.yaml", "base: {data: [digits", "bad.yaml is not valid YAML"),
        ("bad.yaml", "- 1\n- 2\n", "must hold a mapping with base, cases, space"),
        ("bad.yaml", "", "must hold a mapping with base, cases, space"),
        ("bad.py", "x = 1 / 0", "bad.py cannot be run: ZeroDivisionError: division by zero"),
        ("bad.py", "STUDY = {", "bad.py cannot be run: SyntaxError"),
        ("bad.py", "OTHER = {}", "must define STUDY, a mapping"),
        ("bad.py", "STUDY = 3", "must hold a mapping with base, cases, space"),
        ("bad.py", "raise SystemExit(1)", "bad.py cannot be run: SystemExit: 1"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    with pytest.raises(UserError) as caught:
        load(write(tmp_path, content, name))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_folder_is_no_study(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(UserError, match="cannot read"):
        load(str(tmp_path / "folder.yaml"))


def test_settings_that_go_with_a_condition(tmp_path):
    given = [{"when": {"data.alpha": [0.01, 1]}, "training": {"lr": 0.3}}, {"when": {"data": "digits"}, "model": "cnn"}]
    mine = load(write(tmp_path, SMALL | {"given": given}))
    assert mine.given == (
        Given({"data.alpha": (0.01, 1)}, {"training.lr": 0.3}),
        Given({"data": ("digits",)}, {"model": "cnn"}),
    )
    assert mine.base_in({"data.alpha": 0.01})["training.lr"] == 0.3
    # What is given on the command line wins, and meets conditions or not.
    pinned = load(write(tmp_path, SMALL | {"given": given}), None, {"training.lr": 9, "data": "mnist"})
    assert pinned.base_in({"data.alpha": 0.01})["training.lr"] == 9
    assert pinned.base_in({"data.alpha": 0.01})["model"] == "mlp"
    assert load(write(tmp_path, SMALL | {"given": []})).identity == load(write(tmp_path, SMALL)).identity
    for wrong in ({"model": "cnn"}, {"when": {"data": "digits"}}, {"when": "digits", "model": "cnn"}):
        assert "must be a list of conditions with their settings" in refused(tmp_path, given=[wrong])


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_every_data_set_of_the_study_of_calibration_has_its_model(scale):
    models = {(cell.config.names["data"], cell.config.names["model"]) for cell in cells(load("calibration", scale))}
    assert models == {("mnist", "mlp"), ("fashion_mnist", "mlp"), ("cifar10", "cnn")}
    alone = cells(load("calibration", scale, {"data": "cifar10"}))
    assert {cell.config.names["model"] for cell in alone} == {"cnn"}


def test_every_shipped_study_says_what_it_is_about():
    assert set(study_file.names()) == {
        "ablation_online_offline",
        "ablation_prior",
        "ae_lf",
        "calibration",
        "cifar_epochs",
        "cifar_heterogeneity",
        "cifar_table",
        "demo",
        "finetune",
        "laplace",
        "mnist_curves",
        "mnist_first_round",
        "one_shot",
        "personal",
        "rivals",
        "structured",
    }
    for name in study_file.names():
        assert study_file.describe(name).endswith(".")
        assert study_file.load(name).scale == "small"


def test_the_rivals_are_all_methods():
    """A new method gets a line in rivals.yaml. FedOpt is there by its presets; FOLA's published code is left out."""
    compared = [case.settings["method"] for case in load("rivals").cases]
    assert sorted(compared) == sorted(set(discovery.names("methods")) - {"fedopt", "fola_code"})


@pytest.mark.parametrize("name", ["rivals", "one_shot"])
@pytest.mark.parametrize("scale", ["smoke", "small", "paper"])
def test_methods_are_compared_on_equal_terms(name, scale):
    mine = load(name, scale)
    assert (mine.metric, mine.search.algorithm) == ("GA_validation", "random")  # as many settings for everybody
    assert len(mine.confirm.seeds) == (2 if scale == "smoke" else 5)
    assert all("training.lr" in {**mine.space, **case.space} for case in mine.cases)


@pytest.mark.parametrize(
    ("stop", "values", "reached"),
    [
        (Stop(at_least=0.5), [0.1, 0.49], False),
        (Stop(at_least=0.5), [0.1, 0.5], True),
        (Stop(at_least=0.5), [0.6, 0.4], False),
        (Stop(patience=1), [0.1], False),
        (Stop(patience=1), [0.1, 0.1], True),
        (Stop(patience=2), [0.3, 0.1, 0.2], True),
        (Stop(patience=2), [0.3, 0.1, 0.4], False),
        (Stop(patience=2), [0.3, 0.3, 0.3], True),  # as good as before is no improvement
        (Stop(), [0.1] * 50, False),
        (Stop(patience=2), [0.3, math.nan, 0.1], True),
    ],
)
def test_the_stop_rule(stop, values, reached):
    assert stop.reached(values) is reached
