"""A run that stops early: by which rule, what it leaves, and how it goes on without one."""

import json
import math

import pytest

from fl_lightning import experiment, load_model
from fl_lightning.cli.flags import split_off_stop
from fl_lightning.errors import UserError
from fl_lightning.metrics.early_stopping import Stop, stop_of
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.folder import latest

SETTINGS = {
    **{"method": "fedavg", "data": "digits", "data.subset": 0.1, "data.clients": 3, "model": "softmax"},
    **{"training.lr": 0.1, "federation.rounds": 6, "engine": "functional", "engine.chunk": 1},
}
NAN = math.nan


def config(**changes):
    return configure({**SETTINGS, **{key.replace("__", "."): value for key, value in changes.items()}})


def timeless(result):
    return [{k: v for k, v in found.metrics.items() if not k.startswith("seconds")} for found in result.history]


@pytest.mark.parametrize(
    ("stop", "values", "enough"),
    [
        (Stop(patience=2), [NAN, 0.3, NAN, 0.2], 4),  # two rounds after the best, and measured
        (Stop(patience=2), [NAN, 0.3, NAN, NAN], None),  # nobody has looked since
        (Stop(patience=3), [NAN, 0.3, NAN, 0.2, NAN, 0.1], 6),
        (Stop(at_least=0.5), [NAN, NAN, 0.6], 3),
        (Stop(at_least=0.5), [NAN, NAN], None),
        (Stop(patience=1), [], None),
    ],
)
def test_rounds_that_were_not_measured_decide_nothing(stop, values, enough):
    assert stop.enough(values) == enough


def test_values_of_rounds():
    rounds = [{"train_loss": 1.0}, {"GA": 0.5, "train_loss": 0.5}]
    assert str(Stop().values(rounds)) == str([NAN, 0.5])
    assert Stop("train_loss").values(rounds) == [1.0, 0.5]
    with pytest.raises(UserError, match="unknown metric 'GAA': did you mean 'GA'"):
        Stop("GAA").values(rounds)


def level(full, number):
    """A value that GA has first reached after this round."""
    values = [found["GA"] for found in full.history]
    assert values[number - 1] > max(values[: number - 1])
    return values[number - 1]


@pytest.mark.slow
def test_a_run_stops_says_so_and_goes_on_without_the_rule(out, tmp_path):
    full = experiment.run(config(), tmp_path / "full")
    stop = Stop(at_least=level(full, 2))
    seen = []
    result = experiment.run(config(), out, watch=lambda number, _: seen.append(number), stop=stop)
    assert seen == [1, 2]
    assert result.status == "stopped"
    assert result.message.startswith("stopped after round 2, because GA has reached")
    assert timeless(result) == timeless(full)[:2]
    assert {"rounds.parquet", "model.safetensors", "curves.png"} <= {path.name for path in result.folder.iterdir()}
    assert load_model(result) is not None

    again = experiment.run(config(), out, stop=stop)
    assert (again.reused, again.status, again.run_id) == (True, "stopped", result.run_id)
    assert again.history == result.history

    whole = experiment.run(config(), out)
    assert (whole.status, whole.run_id) == ("finished", result.run_id)
    assert timeless(whole) == timeless(full)
    assert whole.history[:2] == result.history  # not computed again

    cut = experiment.run(config(), out, stop=stop)
    assert (cut.status, len(cut.history)) == ("stopped", 2)
    assert len(latest(config(), out).history) == 6  # nothing is lost
    with pytest.raises(UserError, match="has gone on to round 6, and its model after round 2 is gone"):
        load_model(cut)


@pytest.mark.slow
def test_what_was_interrupted_is_judged_by_the_rule_too(out, tmp_path):
    full = experiment.run(config(), tmp_path / "full")
    progress = experiment.rounds(config(), out)
    for _ in range(3):
        next(progress)
    with pytest.raises(KeyboardInterrupt):
        progress.throw(KeyboardInterrupt())
    result = experiment.run(config(), out, stop=Stop(at_least=level(full, 2)))
    assert (result.status, len(result.history)) == ("stopped", 2)
    assert timeless(experiment.run(config(), out)) == timeless(full)


@pytest.mark.slow
def test_a_model_is_never_that_of_another_round(out):
    settings = {"training__lr": 0.0}
    result = experiment.run(config(**settings), out, stop=Stop(patience=1))
    load_model(result.folder)
    progress = experiment.rounds(config(**settings), out)
    for _ in range(3):
        next(progress)
    with pytest.raises(KeyboardInterrupt):
        progress.throw(KeyboardInterrupt())
    for run in (result, result.folder):
        with pytest.raises(UserError, match="has gone on to round 3, and its model after round 2 is gone"):
            load_model(run)


@pytest.mark.slow
def test_a_rule_that_is_never_met_changes_nothing(out):
    result = experiment.run(config(federation__rounds=2), out, stop=Stop(at_least=1.1, patience=50))
    assert (result.status, result.message, len(result.history)) == ("finished", "", 2)


@pytest.mark.slow
def test_patience_counts_rounds_that_are_not_measured(out):
    result = experiment.run(config(evaluation__every=2, training__lr=0.0), out, stop=Stop(patience=2))
    assert len(result.history) == 4  # measured after rounds 2 and 4, and no better
    assert result.message == "stopped after round 4, because GA has not improved since round 2 (stop.patience 2)"


@pytest.mark.slow
def test_the_posterior_is_that_of_the_round_it_stops_after(out):
    settings = {"uncertainty__final_round": True, "training__lr": 0.0}
    result = experiment.run(config(**settings), out, stop=Stop(patience=1))
    assert len(result.history) == 2
    assert "map/NLL" in result.final
    whole = experiment.run(config(**settings), out)
    assert ["map/NLL" in found.metrics for found in whole.history] == [False] * 5 + [True]


@pytest.mark.slow
def test_a_table_of_runs_counts_it_as_ended_until_it_goes_on(out):
    from analysis import runs

    settings = {"training__lr": 0.0, "federation__rounds": 4}
    experiment.run(config(**settings), out, stop=Stop(patience=1))
    row = runs.load(out).runs.iloc[0]
    assert (row["status"], row["ended"], row["rounds"]) == ("stopped", True, 2)
    progress = experiment.rounds(config(**settings), out)
    for _ in range(3):
        next(progress)
    progress.close()  # as a scheduler does
    row = runs.load(out).runs.iloc[0]
    assert (row["status"], row["ended"], row["rounds"]) == ("stopped", False, 3)


def test_flags():
    assert split_off_stop({"seed": "1"}) == (None, {"seed": "1"})
    stop, rest = split_off_stop({"stop.at_least": "0.9", "seed": "1", "stop.metric": "LA", "stop.patience": "null"})
    assert (stop, rest) == (Stop("LA", 0.9), {"seed": "1"})
    for name, value, message in (
        ("patience", "x", r"stop.patience must be a number of rounds >= 1, got 'x'"),
        ("patience", "0", r"stop.patience must be a number of rounds >= 1, got 0"),
        ("at_least", "nan", r"stop.at_least must be a number, got 'nan'"),
        ("metric", "GA", r"stop.metric GA alone stops nothing"),
    ):
        with pytest.raises(UserError, match=message):
            split_off_stop({f"stop.{name}": value})
    assert stop_of({}) is None


@pytest.mark.slow
def test_the_command_says_that_it_has_stopped(out, tmp_path, capsys):
    from fl_lightning.cli import run

    file = tmp_path / "stop.yaml"
    file.write_text("stop: {patience: 1}\ntraining: {lr: 0.0}\n")
    flags = [f"--{key}={value}" for key, value in SETTINGS.items()]
    arguments = ["--config", str(file), *flags, "--training.lr=0.0", "--runs", str(out)]
    assert run.main(arguments) == 0
    said = capsys.readouterr().out
    assert "after round 2\nstopped after round 2, because GA has not improved since round 1 (stop.patience 1)" in said
    assert run.main([*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["status"], summary["round"]) == ("stopped", 2)
    assert run.main([*arguments, "--print_config"]) == 0
    assert capsys.readouterr().out.endswith("stop:\n  metric: GA\n  patience: 1\n")


@pytest.mark.parametrize(
    "metric",
    [
        *("NLL", "own_NLL", "RMSE", "AE", "LF", "loss", "val_loss", "test_loss", "val/loss", "train_loss", "bytes_up"),
        *("probit/FPR95/noise", "probit/E_AURC", "map/adaptive_ECE", "PA_after_std", "workers_idle", "seconds_local"),
        *("gradient_evaluations", "val/NLL", "valLoss", "posterior/train_loss", "own_val/loss mean"),
    ],
)
def test_less_of_it_is_better(metric):
    assert Stop(metric, at_least=0.5).enough([0.9, 0.4]) == 2
    assert Stop(metric, patience=2).enough([0.9, 0.7, 0.8, 0.8]) == 4


@pytest.mark.parametrize(
    "metric",
    [
        *("GA", "LA", "LA_min", "GA_validation", "PA_after", "PA_before_worst", "F1", "own_GA", "val_acc", "val/f1"),
        *("probit/accuracy", "probit/AUROC/noise", "nn/AUROC_information/my_loss", "map/AUPR/std", "something"),
        "posterior/log_marginal_likelihood",
    ],
)
def test_more_of_it_is_better(metric):
    assert Stop(metric, at_least=0.5).enough([0.1, 0.6]) == 2
    assert Stop(metric, patience=2).enough([0.1, 0.3, 0.2, 0.2]) == 4
