"""fl-lightning partition, as a user meets it."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from fl_lightning.__main__ import main
from fl_lightning.cli.partition import MOST_EXAMPLES, MOST_SPLITS, preview, side_by_side
from fl_lightning.data.shares import class_counts, content_hash
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import problem_of


@pytest.fixture
def call(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = main(["partition", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_the_preview_is_the_partition_of_the_run(call):
    settings = {"data": "digits", "data.alpha": 0.01, "data.clients": 20, "data.holdout": 0.1, "seed": 4}
    code, text, _ = call(*(word for key, value in settings.items() for word in (f"--{key}", value)), "--json")
    problem = problem_of(configure(settings))
    (shown,) = json.loads(text)["partitions"]
    assert code == 0
    assert shown["hash"] == content_hash(problem.clients)
    assert shown["counts"] == class_counts(problem.dataset.train_y, problem.clients, 10).tolist()
    assert shown["clients"]["samples"] == [len(client) for client in problem.clients]
    assert shown["settings"]["data.alpha"] == 0.01
    assert shown["settings"]["seed"] == 4
    empty = [n for n, client in enumerate(problem.clients) if len(client) == 0]
    assert shown["summary"]["empty"] == len(empty) > 0
    assert [n for n, distance in enumerate(shown["clients"]["emd"]) if distance is None] == empty


def test_one_partition_is_a_table_of_clients(call):
    code, text, error = call("--data.alpha", "0.01", "--data.clients", "20")
    lines = text.splitlines()
    assert (code, error) == (0, "")
    assert lines[0] == "digits, clients 20, partition dirichlet, alpha 0.01, seed 0; 10 classes"
    assert lines[2].split() == ["client", "samples", "classes", "entropy", "EMD", "largest", "class"]
    rows = [line.split() for line in lines[3:23]]
    assert [row[0] for row in rows] == [str(n) for n in range(20)]
    assert sum(int(row[1]) for row in rows) == 1438
    assert all(("no samples" in line) == (line.split()[1] == "0") for line in lines[3:23])
    assert lines[24].split()[:3] == ["clients", "empty", "samples"]
    assert lines[25].split()[:3] == ["20", str(text.count("no samples")), "1438"]
    assert lines[-1] == "picture  runs/partition.png"
    assert Path("runs/partition.png").stat().st_size > 1000


@pytest.mark.slow
def test_several_values_stand_side_by_side(call):
    code, text, _ = call(
        "--data.alpha=0.01,0.1,1", "--data.clients", "5, 7", "--seed", 3, "--picture", "here/alphas.png"
    )
    assert code == 0
    rows = [line.split() for line in text.splitlines()]
    assert rows[0] == ["digits,", "partition", "dirichlet,", "seed", "3;", "10", "classes"]
    assert rows[2][:4] == ["alpha", "clients", "empty", "samples"]
    assert [row[:2] for row in rows[3:9]] == [[a, n] for a in ("0.01", "0.1", "1") for n in ("5", "7")]
    assert len({row[-1] for row in rows[3:9]}) == 6
    distances = [float(row[-2]) for row in rows[3:9]]
    assert distances[0] > distances[2] > distances[4]
    assert "picture  here/alphas.png" in text
    assert Path("here/alphas.png").stat().st_size > 1000
    shown = json.loads(call("--data.alpha=0.01,0.1,1", "--data.clients", "5,7", "--seed", 3, "--json")[1])["partitions"]
    assert [one["hash"] for one in shown] == [row[-1] for row in rows[3:9]]


@pytest.mark.slow
def test_seeds_and_kinds_can_be_varied_too(call):
    shown = json.loads(call("--seed", "0,1", "--data.partition", "iid,shards,iid", "--json")[1])["partitions"]
    assert [(one["settings"]["seed"], one["settings"]["data.partition"]) for one in shown] == [
        (0, "iid"),
        (0, "shards"),
        (1, "iid"),
        (1, "shards"),
    ]


def test_the_flags_and_files_of_a_run_can_be_pasted(call, tmp_path):
    (tmp_path / "x.yaml").write_text(yaml.safe_dump({"data": {"name": "digits", "clients": 3}, "method": "fedavg"}))
    code, text, _ = call("--config", "x.yaml", "--training.lr", "0.1", "--data.alpha", "1", "--json")
    assert code == 0
    assert json.loads(text)["partitions"][0]["summary"]["clients"] == 3


def test_many_clients_end_with_a_word(call):
    _, text, _ = call("--data.clients", "150", "--data.partition", "iid")
    assert "the first 100 of 150 clients; --json prints all" in text
    assert len(json.loads(call("--data.clients", "150", "--json")[1])["partitions"][0]["clients"]["samples"]) == 150


@pytest.mark.slow
def test_feature_skew_is_shown(call):
    _, text, _ = call("--data.clients", 3, "--data.feature_skew", "rotation", "--data.skew_strength", 45)
    lines = text.splitlines()
    assert lines[2].endswith("rotation")
    assert [line.split()[-1] for line in lines[3:6]] == ["-45", "0", "45"]
    _, text, _ = call("--data.clients", 2, "--data.feature_skew", "noise", "--data.skew_strength", 0.1, "--json")
    assert json.loads(text)["partitions"][0]["clients"]["noise"] == [0.05, 0.1]


def test_skewed_images_of_the_first_and_the_last_client_are_drawn():
    skewed = {"data.feature_skew": "rotation", "data.skew_strength": 90}
    config = configure({"data": "digits", "data.partition": "iid", "data.clients": 40, **skewed})
    dataset = config.source.load()
    one = preview({}, config, dataset)
    assert len(one.examples) <= MOST_EXAMPLES
    first, *_, last = one.examples
    assert (first.split("\n")[1], last.split("\n")[1]) == ("-90", "90")
    assert not torch.equal(one.examples[first], one.examples[last])
    plain = configure({"data": "digits"})
    assert preview({}, plain, dataset).examples == {}


def test_natural_clients(call, tmp_path, monkeypatch):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "letters.py").write_text(
        "from dataclasses import dataclass\n"
        "import torch\n"
        "from fl_lightning import Dataset, Source\n"
        "@dataclass(frozen=True)\n"
        "class Letters(Source):\n"
        '    """Letters of five writers."""\n'
        "    def load(self):\n"
        "        x, y = torch.zeros(60, 2), torch.arange(60) % 3\n"
        "        return Dataset(x, y, x, y, num_classes=3, owners=torch.arange(60) // 12)\n"
    )
    monkeypatch.setenv("FL_LIGHTNING_PLUGINS", str(tmp_path / "plugins"))
    flags = ["--data", "letters", "--data.partition", "natural"]
    assert "leave it out, or use data.partition natural_groups" in call(*flags, "--data.clients", 4)[2]
    for counted in ([], ["--data.clients", 5]):  # the data say how many there are
        shown = json.loads(call(*flags, *counted, "--json")[1])["partitions"][0]
        assert shown["clients"]["samples"] == [12] * 5
        assert shown["settings"]["data.clients"] == 5
    groups = json.loads(call(*flags[:3], "natural_groups", "--data.clients", 2, "--json")[1])["partitions"][0]
    assert sorted(groups["clients"]["samples"]) == [24, 36]
    assert len(problem_of(configure({"data": "letters", "data.partition": "natural", "data.clients": 5})).clients) == 5
    error = call("--data", "letters", "--data.feature_skew", "rotation", "--data.skew_strength", 9)[2]
    assert "rotation needs images" in error


BAD_INPUT = [
    (["--data.alpha", "0"], "data.alpha must be > 0"),
    (["--data.alpa", "1"], "did you mean 'data.alpha'?"),
    (["--data.alpha"], "--data.alpha needs a value"),
    (["--data.alpha", "0.1,x"], "data.alpha must be a number, got x"),
    (["--data.alpha", "0.1,,1"], "--data.alpha needs a value between commas, got '0.1,,1'"),
    (["--data.clients", "5,100000"], "data.clients must be at most the number of training samples, 1438"),
    (["--data.partition", "natural"], "needs data that name the owner of each sample; use --data table"),
    (["--data.partition", "class_blocks", "--data.clients", "11"], "at most the number of classes"),
    (["--data.partition", "classes", "--data.clients", "2"], "must be at least the number of classes, 10"),
    (["--data.min_samples", "144"], "data.clients * data.min_samples must be at most"),
    (["--data.feature_skew", "noise"], "data.skew_strength must be > 0"),
    (["--data", "mnits"], "unknown dataset 'mnits'"),
    (["--data"], "--data needs a value"),
    (["--config", "nowhere.yaml"], "cannot read the configuration nowhere.yaml"),
    (["--picture", "x.jpg"], "--picture must end in .png"),
    (["--fresh"], "unknown setting 'fresh'"),
    (["stray"], "expected a setting as --key value, got 'stray'"),
    (["--seed", ",".join(map(str, range(MOST_SPLITS + 1)))], f"at most {MOST_SPLITS} partitions can be shown"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_INPUT, ids=[" ".join(arguments) for arguments, _ in BAD_INPUT])
def test_bad_input_is_one_line(call, arguments, message):
    code, text, error = call(*arguments)
    assert (code, text) == (2, "")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not Path("runs").exists(), "a refused preview leaves nothing behind"


def test_help_explains_every_setting_of_the_split(capsys):
    assert main(["partition", "--data", "mnist", "--help"]) == 0
    text = capsys.readouterr().out
    for name in ("data.root", "data.alpha", "data.classes_per_client", "data.sigma", "data.feature_skew", "seed"):
        assert f"--{name} " in text


def test_one_value_is_one_partition():
    assert side_by_side({"seed": "5"}) == [({}, {"seed": "5"})]
    assert side_by_side({}) == [({}, {})]


def test_pictures_have_a_panel_for_each_partition():
    from matplotlib.colors import to_rgba

    from fl_lightning.runs.plotting import palette
    from fl_lightning.runs.plotting.run_figures import partitions

    tables = {f"{n} clients": torch.arange(n * 10).reshape(n, 10) for n in (1, 2, 30, 100)}
    tables["one is empty"] = torch.tensor([[0, 0], [5, 1]])
    figure = partitions(tables)
    panels = [panel for panel in figure.axes if panel.get_visible() and panel.get_title()]
    assert [panel.get_title() for panel in panels] == list(tables)
    for panel, counts in zip(panels, tables.values(), strict=True):
        held = torch.zeros_like(counts, dtype=torch.bool)
        for patch in panel.patches:  # one for all cells of a colour
            corners = patch.get_path().vertices.reshape(-1, 5, 2)[:, :4]
            client, label = torch.from_numpy(corners.mean(1)).round().long().T
            held[client, label] = True
            levels = {round(float(torch.log(n))) for n in counts[client, label].float()}
            assert max(levels) - min(levels) <= 1
        assert torch.equal(held, counts > 0)
    assert "without samples (crosses): 1" in panels[-1].get_xlabel()
    (most,) = {panel.patches[-1].get_facecolor() for panel in panels if panel.get_title() == "100 clients"}
    assert most == to_rgba(palette.shades()[-1])
    assert most not in {patch.get_facecolor() for patch in panels[-1].patches}  # one scale for all
