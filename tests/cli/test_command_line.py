"""The command line as a user meets it. Errors are one line and exit code 2."""

import json
import re
import socket
import subprocess
import sys

import pytest
import yaml

from analysis import runs
from analysis.tables import TABLES
from fl_lightning import discovery
from fl_lightning.__main__ import COMMANDS, main
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.config.schema import schema_of
from tests.support.servers import free_port, serving, wait_for

pytestmark = pytest.mark.system


QUICK = [
    *("--data", "digits", "--data.subset", "0.2", "--data.clients", "4", "--model", "softmax"),
    *("--engine", "functional", "--federation.rounds", "2", "--training.lr", "0.1", "--quiet"),
]


def call(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("method", ["fedavg", "fola"])
def test_a_rule_for_an_unknown_metric_is_refused_before_anything_is_trained(out, capsys, method):
    code, _, error = call(
        capsys, "run", "--method", method, *QUICK, "--runs", out, "--stop.metric", "foo", "--stop.patience", 2
    )
    assert code == 2
    assert error.startswith("fl-lightning: unknown stop.metric 'foo': expected one of AE")
    assert len(error.splitlines()) == 1
    assert not list(out.glob(f"{method}-*"))


def test_run_prints_json_in_its_last_line(out, capsys):
    code, text, _ = call(capsys, "run", "--method", "fola", *QUICK, "--runs", out, "--json")
    summary = json.loads(text.splitlines()[-1])
    assert code == 0
    assert {"GA", "LA", "round", "run_id"} <= summary.keys()
    assert summary["round"] == 2
    again = json.loads(call(capsys, "run", "--method", "fola", *QUICK, "--runs", out, "--json")[1].splitlines()[-1])
    assert again == summary


def test_the_module_runs_too(out):
    done = subprocess.run(
        [sys.executable, "-m", "fl_lightning", "run", *QUICK, "--method", "fedavg", "--runs", str(out), "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1])["round"] == 2
    assert done.stderr == ""


def test_a_setting_called_on_is_no_truth_value(tmp_path, capsys):
    path = tmp_path / "x.yaml"
    path.write_text("method: {name: centralised, on: holdout}\ndata.holdout: 0.1\n")
    code, text, _ = call(capsys, "run", "--config", path, "--print_config")
    assert (code, "on: holdout" in text) == (0, True)


def test_yaml_and_flags_give_the_same_run_and_flags_win(tmp_path, capsys):
    path = tmp_path / "x.yaml"
    path.write_text(
        "method: {name: fola, strength: 10}\ndata: mnist\ndata.alpha: 0.01\ntraining:\n  batch_size: null\n  lr: 1e-2\n"
    )
    _, text, _ = call(capsys, "run", "--config", path, "--training.lr", "0.5", "--print_config")
    content = yaml.safe_load(text)
    assert content["method"]["strength"] == 10
    assert content["data"] | {"name": "mnist", "alpha": 0.01} == content["data"]
    assert content["training"]["batch_size"] is None
    assert content["training"]["lr"] == 0.5


@pytest.mark.parametrize("method", discovery.discover("methods"))
def test_the_printed_configuration_is_complete_and_reads_back(method, tmp_path, capsys):
    _, text, _ = call(capsys, "run", "--method", method, "--data", "mnist", "--data.alpha", "0.3", "--print_config")
    path = tmp_path / "all.yaml"
    path.write_text(text)
    _, again, _ = call(capsys, "run", "--config", path, "--print_config")
    assert again == text
    assert configure({"method": method, "data": "mnist", "data.alpha": "0.3"}).yaml() == text


@pytest.mark.parametrize("method", discovery.discover("methods"))
def test_help_explains_every_setting(method, capsys):
    code, text, _ = call(capsys, "run", "--method", method, "--help")
    assert code == 0
    names = {"method": method, "data": "digits", "model": "mlp", "engine": "lightning"}
    for key, item in schema_of(names).items():
        assert f"--{key} " in text
        assert item.help
    for symbol in ("(alpha)", "(N)", "(lr, eta)", "(E)", "(B)", "(R)", "(participation, C)"):
        assert symbol in text
    listed = text.partition("Settings for")[2].splitlines()
    headings = [line.split()[0] for line in listed if line[:1].islower()]
    assert len(set(headings)) == len(headings), "a part's settings under two headings"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_on_every_level(command, capsys):
    try:
        code = main([command, "--help"])
    except SystemExit as exit:
        code = exit.code
    assert code == 0
    assert "usage" in capsys.readouterr().out
    assert call(capsys, "--help")[0] == 0


def test_the_help_of_table_names_every_table(capsys):
    with pytest.raises(SystemExit):
        main(["table", "--help"])
    listed = " ".join(capsys.readouterr().out.split())
    assert f"{', '.join(entry.key for entry in TABLES[:-1])} or {TABLES[-1].key} [accuracy]" in listed


@pytest.mark.parametrize("kind", discovery.KINDS)
def test_list(kind, capsys):
    code, text, _ = call(capsys, "list", kind)
    assert code == 0
    found = json.loads(call(capsys, "list", kind, "--json")[1])
    assert [line.split()[0] for line in text.splitlines()] == list(found)
    assert all(description.endswith(".") for description in found.values())


BAD_INPUT = [
    (["run", "--method", "folla"], "unknown method 'folla': did you mean 'fola'?"),
    (["run", "--model", "mpl"], "unknown model 'mpl': did you mean 'mlp'?"),
    (["run", "--data", "mnits"], "unknown dataset 'mnits': did you mean 'mnist'?"),
    (["run", "--engine", "lighning"], "unknown engine 'lighning': did you mean 'lightning'?"),
    (["run", "--lr", "3"], "unknown setting 'lr': did you mean 'training.lr'?"),
    (["run", "--method.strenght", "3"], "did you mean 'method.strength'?"),
    (["run", "--method", "fedavg", "--method.strength", "3"], "unknown setting 'method.strength'"),
    (["run", "--method.aggregation", "sum"], "method.aggregation must be one of product, average, got sum"),
    (["run", "--data.alpha", "0"], "data.alpha must be > 0"),
    (["run", "--data.alpha", "-1"], "data.alpha must be > 0"),
    (["run", "--data.clients", "0"], "data.clients must be >= 1"),
    (["run", "--data.clients", "100000"], "data.clients must be at most the number of training samples, 1438"),
    (["run", "--data.subset", "0"], "data.subset must be > 0"),
    (["run", "--federation.rounds", "0"], "federation.rounds must be at least 1"),
    (["run", "--federation.cohort", "11"], "only 10 of the 10 clients have data"),
    (["run", "--federation.fraction", "1.5"], "federation.fraction must lie in (0, 1]"),
    (["run", "--training.epochs", "0"], "training.epochs must be at least 1"),
    (["run", "--training.batch_size", "0"], "training.batch_size must be at least 1"),
    (["run", "--training.lr", "inf"], "training.lr must be a"),
    (["run", "--training.lr", "nan"], "training.lr must be a"),
    (["run", "--training.lr", "fast"], "training.lr must be a number, got fast"),
    (["run", "--training.lr"], "--training.lr needs a value"),
    (["run", "--lr", "--quiet"], "unknown setting 'lr': did you mean 'training.lr'?"),
    (["run", "--training.momentum", "1"], "training.momentum must lie in [0, 1)"),
    (["run", "--compute.device", "quantum"], "compute.device must be auto, cpu, cuda"),
    (["run", "--config", "nowhere.yaml"], "cannot read the configuration nowhere.yaml"),
    (["run", "stray"], "expected a setting as --key value, got 'stray'"),
    (["run", "--seeds", "3"], "a run has one, --seed 3; for several, fl-lightning compare takes --seeds 3"),
    (["compare", "--methods", "fedavg", "fola"], "got 'fola'; a list is written a,b"),
    (["rum"], "unknown command 'rum': did you mean 'run'?"),
    (["list"], "list needs a kind"),
    (["list", "metods"], "unknown kind 'metods': did you mean 'methods'?"),
    (["run", "--method", "fola+strength=3"], "give the method fola and the setting method.strength=3 apart"),
    (["compare", "--methods", "fola+strength"], "a method's option is written name=value"),
    (["compare", "--methods", "fola", "--seeds", "a"], "--seeds must be a number of seeds such as 3, or name them"),
    (["compare", "--methods", "fola", "--seed", "1"], "use --seeds"),
    (["compare", "--methods", "fola", "--threshold", "80"], "--threshold must lie in (0, 1]"),
    (["compare", "--methods", "fola,fola"], "the method 'fola' is named twice"),
    (["compare", "--methods", "fola", "--seeds", "1,1"], "the seed '1' is named twice"),
    (["compare", "--methods", "fola", "--name", "a/b"], "--name takes letters"),
    (["compare", "--methods", "fola", "--max-concurrent", "-1"], "--max-concurrent must be >= 0, got -1"),
    (["compare", "--methods", "fola", "--picture", "x.foo"], "--picture must end in .png"),
    (["compare", "--methods", "fedavg,fedbe", "--federation.rounds", "1"], "expected data.holdout > 0"),
    (["run", "--model.hidden", "[0]"], "model.hidden must hold widths of at least 1"),
    (["run", "--model.dropout", "1"], "model.dropout must lie in [0, 1)"),
    (["run", "--method", "fedpa"], "method.burn_in must be less than training.epochs"),
    (["run", "--method", "scaffold", "--training.momentum", "0.9"], "expected training.momentum 0"),
    (["run", "--method", "fednova", "--method.mu", "1", "--training.momentum", "0.9"], "--training.momentum 0"),
    (["run", "--method", "data_sharing", "--method.warmup_epochs", "1"], "data.holdout"),
    (["ui", "--port", "99999"], "--port must lie between"),
    (["ui", "--runs", "nowhere"], "no runs in nowhere yet"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=[" ".join(arguments) for arguments, _ in BAD_INPUT])
def test_bad_input_is_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, text, error = call(capsys, *arguments, *(["--quiet"] if arguments[0] == "run" else []))
    assert code == 2
    assert message in error
    assert len(error.splitlines()) == 1
    assert text == ""
    assert not any((tmp_path / "runs").glob("*")), "a refused run leaves nothing behind"


def test_a_broken_yaml_is_one_line(tmp_path, capsys):
    (tmp_path / "x.yaml").write_text("method: {")
    code, _, error = call(capsys, "run", "--config", tmp_path / "x.yaml")
    assert code == 2
    assert len(error.splitlines()) == 1
    (tmp_path / "x.yaml").write_text("- 1")
    assert "must hold settings" in call(capsys, "run", "--config", tmp_path / "x.yaml")[2]


def test_missing_data_say_where_they_were_expected(tmp_path, capsys):
    code, _, error = call(
        capsys, "run", "--data", "mnist", "--data.root", tmp_path / "empty", "--quiet", "--runs", tmp_path
    )
    assert code == 2
    assert str(tmp_path / "empty") in error
    assert "--data digits" in error
    assert len(error.splitlines()) == 1


def test_divergence_is_named_and_exits_with_3(out, capsys):
    code, text, error = call(capsys, "run", *QUICK, "--training.lr", "1e30", "--model", "mlp", "--runs", out, "--json")
    assert code == 3
    assert "not finite in round 1" in error
    assert len(error.splitlines()) == 1
    assert json.loads(text)["status"] == "diverged"


def test_an_unreachable_server_is_named_and_stops_nothing(out, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    code, _, error = call(capsys, "run", *QUICK, "--runs", out)
    assert code == 0
    first, last = (line for line in error.splitlines() if "http://127.0.0.1:9" in line)
    assert "does not answer; the computation goes on" in first
    assert "the same command sends the rest" in last


def test_compare_prints_a_table_and_saves_a_picture(out, capsys):
    flags = [flag for flag in QUICK if flag != "--quiet"]
    code, text, error = call(
        capsys,
        "compare",
        "--methods",
        "fedavg,product only:fola+strength=0",
        "--seeds",
        "0,1",
        *flags,
        "--runs",
        out,
        "--markdown",
    )
    assert code == 0
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert rows[0].split("|")[1].strip() == "method"
    assert [row.split("|")[1].strip() for row in rows[2:]] == ["fedavg", "product only"]
    assert all("±" in row for row in rows[2:])
    assert "GA is the test accuracy of the aggregated model" in text
    study = re.search(r"report --study (\S+) --runs (.*)", text)
    assert len(runs.load(study[2], study=study[1]).runs) == 4
    assert "4/4" in error
    (picture,) = out.glob("*.png")
    assert picture.name.startswith("comparison-fedavg-product_only-")  # what it compares
    assert picture.stat().st_size > 1000


def test_ctrl_c_is_quiet(monkeypatch, capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr("fl_lightning.cli.list.main", interrupted)
    code, _, error = call(capsys, "list", "methods")
    assert code == 130
    assert "the same command goes on" in error


def test_the_ui_serves_the_runs_on_loopback(out, capsys):
    call(capsys, "run", *QUICK, "--runs", out)
    port = free_port()
    with serving("fl_lightning", "ui", "--runs", str(out), "--port", str(port)):
        assert "MLflow" in wait_for(f"http://127.0.0.1:{port}")
        with pytest.raises(OSError, match="refused"):  # any other address of this machine
            socket.create_connection(("127.0.0.2", port), timeout=5)


def test_with_a_tracking_server_its_address_is_the_place_to_look(out, capsys, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{out / 'mlflow.db'}")
    monkeypatch.setattr("fl_lightning.cli.hints.store_uri", lambda out: "http://tracking:5000")
    flags = [flag for flag in QUICK if flag != "--quiet"]
    for command in (["run"], ["compare", "--methods", "fedavg"]):
        _, text, _ = call(capsys, *command, *flags, "--runs", out)
        assert text.splitlines()[-1] == "mlflow   http://tracking:5000"


def test_the_former_name_of_the_folder_of_runs_is_taken_with_advice(out, capsys):
    code, text, error = call(capsys, "runs", "--out", out)
    assert (code, text, error.count("\n")) == (2, "", 2)
    assert "the folder of the runs is --runs now; runs takes --out as that, too" in error
    assert str(out) in error.splitlines()[1]
    assert "--runs now" in call(capsys, "runs", f"--out={out}")[2]
    assert "--runs now" not in call(capsys, "runs", "--runs", out)[2]
    assert str(out) in call(capsys, "runs", "--runs", out)[2]


def test_a_number_of_seeds_is_a_number_of_seeds(out, capsys):
    flags = ["--methods", "fedavg", *QUICK, "--federation.rounds", "1", "--runs", out]
    _, text, _ = call(capsys, "compare", *flags, "--seeds", 2)
    assert "seeds    0 and 1" in text
    _, text, _ = call(capsys, "compare", *flags, "--seeds", "3-3")
    assert "seeds    3" in text


def test_verbose_shows_all_metrics(out, capsys):
    flags = [flag for flag in QUICK if flag != "--quiet"]
    _, _, error = call(capsys, "run", "--method", "fola", *flags, "--runs", out, "--verbose")
    assert "round 2: GA" in error
    assert "weight_shift" in error


def test_compare_prints_a_table_for_a_paper_and_nothing_else(out, capsys):
    loud = [flag for flag in QUICK if flag != "--quiet"]
    flags = ["--methods", "fedavg,fola", "--seeds", "0,1", *loud, "--runs", out]
    code, text, error = call(capsys, "compare", *flags, "--name", "two", "--threshold", 0.1, "--latex")
    assert code == 0
    assert text.startswith("% \\usepackage{booktabs}\n\\begin{table}")
    assert text.endswith("\\end{table}\n")
    assert "\\label{tab:two}" in text
    assert text.count("$\\pm$") >= 4
    assert str(out / "comparison-two.png") in error
    code, text, _ = call(capsys, "compare", *flags, "--name", "two", "--threshold", 0.1, "--csv")
    first, *rows = text.splitlines()
    assert first.startswith("case,")
    assert "rounds to 10%" in first
    assert [row.partition(",")[0] for row in rows] == ["FedAvg", "FOLA"]
