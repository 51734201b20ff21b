"""fl-lightning report: one page with everything, files beside it, mistakes in one line."""

import json
import re
import shlex
from dataclasses import asdict
from html.parser import HTMLParser

import pandas as pd
import pytest

from analysis import claims, commands, report, runs
from analysis.runs import studies
from analysis.study_records import Sweep
from fl_lightning.__main__ import main
from fl_lightning.cli.flags import flags_to_settings
from fl_lightning.runs.identity import identity
from tune.comparison import study_of


class Page(HTMLParser):
    """What a page refers to and what it is called."""

    def __init__(self, text):
        super().__init__()
        self.sources, self.links, self.ids, self.depth = [], [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        for name in ("src", "srcset", "data", "poster"):
            if name in values:
                self.sources.append(values[name])
        if "href" in values and tag in ("link", "image", "use", "script"):
            self.sources.append(values["href"])
        if "xlink:href" in values:
            self.sources.append(values["xlink:href"])
        if tag == "a":
            self.links.append(values["href"])
        if "id" in values:
            self.ids.append(values["id"])


@pytest.fixture(scope="session")
def written(smoke_store, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    report.write(out, smoke_store, study="demo")
    return out


@pytest.mark.system
def test_the_page_holds_everything_and_its_files_exist(written):
    text = (written / "index.html").read_text()
    page = Page(text)
    assert all(source.startswith(("data:", "#")) for source in page.sources)
    assert "@import" not in text
    assert "url(http" not in text
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        assert link.startswith("#") or (written / link).is_file(), link
        assert not link.startswith("#") or link[1:] in page.ids, link
    for name in ("learning_curves", "against_bytes", "against_seconds", "partitions"):
        for kind in (".svg", ".pdf", ".png", "-dark.svg"):
            assert (written / "figures" / f"demo-smoke-{name}{kind}").stat().st_size > 1000
    for name in ("accuracy", "paired", "costs"):
        assert (written / "tables" / f"demo-smoke-{name}.tex").exists()
        assert len(pd.read_csv(written / "tables" / f"demo-smoke-{name}.csv")) > 0
    assert len(pd.read_csv(written / "tables" / "demo-smoke-runs.csv")) == 6


@pytest.mark.system
def test_the_page_says_what_was_found_and_how_to_repeat_it(written, smoke_store):
    text = (written / "index.html").read_text()
    assert re.search(r"FOLA is ahead of FedAvg in \d of 2 seeds, mean difference [+-]", text)
    assert "n = 2 is too few for a test" in text
    assert "fl-lightning sweep demo --scale smoke --runs" in text
    for run_id in runs.load(smoke_store, study="demo").runs["run_id"]:
        assert run_id[:8] in text
    assert "prefers-color-scheme: dark" in text


@pytest.mark.system
def test_colours_follow_the_page(written):
    text = (written / "index.html").read_text()
    svg = text[text.index("<svg") : text.rindex("</svg>")]
    assert "var(--c-d55e00)" in svg
    assert "#d55e00" not in svg


@pytest.mark.slow
def test_every_study_and_the_odd_runs(odd_store, tmp_path, capsys):
    assert main(["report", "--runs", str(odd_store), "--out", str(tmp_path / "report"), "--quiet"]) == 0
    assert "index.html" in capsys.readouterr().out
    text = (tmp_path / "report" / "index.html").read_text()
    for piece in ("Runs without a study", "diverged", "were stopped", "failed", "FOLA curvature=offline"):
        assert piece in text
    assert "--fresh" not in text  # the repeated run took the place of the first: nothing is left out


@pytest.mark.system
def test_the_whole_catalogue_fits_some_study(smoke_store):
    fitting = {entry.key for part in studies(smoke_store) for entry in report.FIGURES if entry.fits(part)}
    # Many methods over several alpha are more than a smoke test can compute; test_figures draws them.
    assert {entry.key for entry in report.FIGURES} == fitting | {"winners"}


@pytest.mark.system
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--study", "dmo"], "did you mean 'demo'"),
        (["--study", "demo", "--scale", "paper"], "unknown scale of demo 'paper'"),
        (["--scale", "smoke"], "--scale needs --study"),
        (["--nonsense"], "--nonsense"),
        (["--where", "data.alpha"], "--where is written key=value"),
        (["--where", "data.alhpa=1"], "did you mean 'data.alpha'"),
        (["--where", "data.alpha=77"], "no run has data.alpha = 77"),
        (["--study", "demo", "--where", "data.alpha=77"], "no run of the study demo has data.alpha = 77"),
    ],
)
def test_mistakes_in_one_line(smoke_store, tmp_path, capsys, arguments, words):
    try:
        code = main(["report", "--runs", str(smoke_store), "--out", str(tmp_path / "r"), *arguments])
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    assert code == 2
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert not (tmp_path / "r").exists()


@pytest.mark.slow
def test_only_runs_that_are_asked_for(odd_store, tmp_path):
    arguments = ["report", "--runs", str(odd_store), "--out", str(tmp_path), "--quiet"]
    assert main([*arguments, "--where", "seed=0", "--where", "seed=1", "--where", "method=fedavg"]) == 0
    chosen = pd.read_csv(next(tmp_path.glob("tables/*-runs.csv")))
    assert sorted(chosen["seed"]) == [0, 1]
    assert set(chosen["method"]) == {"fedavg"}
    assert "only those with seed = 0 or 1 and method = fedavg" in (tmp_path / "index.html").read_text()


@pytest.mark.slow
def test_a_comparison_is_a_study_to_select_by(out, capsys):
    flags = ["--data.clients", "4", "--model.hidden", "[8]", "--training.epochs", "1", "--runs", str(out)]
    compare = ["compare", "--methods", "fedavg,flat:fola+strength=0", *flags, "--data", "digits"]
    for rounds, seeds in ((2, "0,1"), (3, "1")):
        assert main([*compare, "--seeds", seeds, "--federation.rounds", str(rounds)]) == 0
    first, second = re.findall(r"report --study (\S+) --runs", capsys.readouterr().out)
    assert first != second
    assert first.startswith("fedavg-flat-")
    assert set(runs.load(out, study=first).runs["case"]) == {"FedAvg", "flat"}
    assert len(runs.load(out, study=first).runs) == 4
    assert main([*compare, "--federation.rounds", "3", "--name", "mine"]) == 0  # runs that are there already
    assert set(runs.load(out, study="mine").runs["run_id"]) == set(runs.load(out, study=second).runs["run_id"])
    capsys.readouterr()
    assert main([*compare, "--name", "laplace"]) == 2
    assert "is the name of a study" in capsys.readouterr().err
    assert [part.title for part in studies(out)] == sorted([first, second, "mine"])
    assert list(claims.check(studies(out))) == []


@pytest.mark.system
def test_no_store_and_no_place(tmp_path, smoke_store, capsys, monkeypatch):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert main(["report", "--out", str(tmp_path / "none")]) == 2
    assert "fl-lightning demo" in capsys.readouterr().err
    (tmp_path / "file").touch()
    assert main(["report", "--runs", str(smoke_store), "--study", "demo", "--out", str(tmp_path / "file")]) == 2
    assert "cannot write to" in capsys.readouterr().err


@pytest.mark.slow
def test_commands_make_the_same_runs(odd_store):
    from fl_lightning.runs.config.run_config import configure

    table = runs.load(odd_store).runs
    for _, run in table.iterrows():
        words = commands.run_command(run, "runs").split()
        assert words[:2] == ["fl-lightning", "run"]
        flags = [word.strip("'") for word in words[2 : words.index("--runs")]]
        assert identity(configure(flags_to_settings(flags))) == run["identity"]


def test_a_comparison_is_repeated_by_the_command_that_made_it():
    variants = ["fedavg", "no prior:fola+strength=0"]
    study = study_of({"data.alpha": "0.01"}, variants, [0, 2], "mine")
    content = json.loads(json.dumps(asdict(study), default=str))
    words = shlex.split(commands.sweep_command(Sweep("mine", "all", "id", content, {}), "runs"))
    assert words[:4] == ["fl-lightning", "compare", "--methods", "fedavg:fedavg,no prior:fola+strength=0"]
    again = study_of({"data.alpha": "0.01"}, words[3].split(","), [0, 2], "mine")
    assert again.cases == study.cases
    assert words[4:] == ["--seeds", "0,2", "--data.alpha=0.01", "--name", "mine", "--runs", "runs"]


def test_a_sweep_with_pinned_settings_is_repeated_with_them():
    content = {"base": {"data": "digits", "training.lr": 0.5, "data.subset": 0.1}}
    swept = Sweep("demo", "smoke", "id", content, {})
    command = commands.sweep_command(swept, "my runs")
    assert "--training.lr=0.5" in command
    assert "--data.subset=0.1" in command
    assert command.startswith("fl-lightning sweep demo --scale smoke")
    assert command.endswith("--runs 'my runs'")


def test_a_sweep_of_some_cases_is_repeated_with_them():
    content = {"cases": [{"label": "FOLA"}, {"label": "my own"}], "among": ["FOLA", "FedAvg", "my own"]}
    swept = Sweep("demo", "smoke", "id", content, {})
    words = shlex.split(commands.sweep_command(swept, "runs"))
    assert words[3:7] == ["--scale", "smoke", "--cases", "FOLA,my own"]
    complete = swept._replace(content={**content, "among": ["FOLA", "my own"]})
    assert "--cases" not in commands.sweep_command(complete, "runs")
