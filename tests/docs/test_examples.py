"""The documentation is executed: examples in it that do not work fail the tests."""

import json
import re
from pathlib import Path

import pytest

from fl_lightning import discovery
from tests.support.processes import contract_tests, fl_lightning
from tune import grid, study_file

pytestmark = pytest.mark.system


ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(name):
    return BLOCK.findall((ROOT / name).read_text())


@pytest.mark.parametrize("name", ["README.md", "docs/running.md", "docs/extending.md", "docs/data.md"])
def test_examples_run(name, out, monkeypatch, capsys):
    monkeypatch.chdir(out.parent)  # where runs go
    namespace = {}
    for block in blocks(name):
        if not block.startswith("# plugins/"):
            exec(compile(block, name, "exec"), namespace)
    rounds = [line.split() for line in capsys.readouterr().out.splitlines()[:3]]
    assert [row[0] for row in rounds] == ["1", "2", "3"]
    assert all(0 <= float(row[1]) <= 1 for row in rounds)


@pytest.fixture
def plugins(tmp_path):
    """The files of docs/extending.md in a folder."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    for block in blocks("docs/extending.md"):
        if block.startswith("# plugins/"):
            first, _, content = block.partition("\n")
            (folder / first.removeprefix("# plugins/")).write_text(content)
    assert {path.name for path in folder.iterdir()} == {
        "median.py",
        "inertia.py",
        "fedmild.py",
        "tiny.py",
        "moons.py",
        "lit_digits.py",
    }
    return folder


def test_plugins_work_by_name(plugins, out):
    flags = ["--method", "median", "--method.mu", 0.1, "--model", "tiny", "--model.width", 8, "--data", "moons"]
    more = ["--data.samples", 300, "--training.lr", 0.5, "--federation.rounds", 3, "--runs", out, "--json", "--quiet"]
    done = fl_lightning("run", *flags, *more, FL_LIGHTNING_PLUGINS=str(plugins))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["round"] == 3
    listed = fl_lightning("list", "methods", FL_LIGHTNING_PLUGINS=str(plugins)).stdout
    assert "median" in listed
    assert "Coordinate-wise median of the clients' models." in listed
    help = fl_lightning("run", "--method", "median", "--help", FL_LIGHTNING_PLUGINS=str(plugins)).stdout
    assert "Weight of a proximal term around the server's model; 0 switches it off. [0.0]" in help


def test_an_edited_plugin_is_a_new_run(plugins, out):
    def run():
        flags = ["--method", "median", "--data", "moons", "--model", "tiny", "--federation.rounds", 2]
        done = fl_lightning("run", *flags, "--runs", out, "--json", "--quiet", FL_LIGHTNING_PLUGINS=str(plugins))
        return json.loads(done.stdout)

    first, again = run(), run()
    assert first == again
    path = plugins / "median.py"
    path.write_text(path.read_text().replace("v.median(0).values", "v[0]"))
    assert run()["run_id"] != first["run_id"]


def test_a_plugin_does_not_replace_what_is_built_in(plugins):
    (plugins / "median.py").rename(plugins / "fedavg.py")
    done = fl_lightning("run", "--method", "fedavg", FL_LIGHTNING_PLUGINS=str(plugins))
    assert done.returncode == 2
    assert "has the name of a built-in method" in done.stderr


def test_plugins_pass_the_contract_tests(plugins):
    done = contract_tests("--method", "median", "--model", "tiny", "--data", "moons", FL_LIGHTNING_PLUGINS=str(plugins))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line[:1].strip()] == [
        "method median",
        "model tiny",
        "data moons",
    ]
    assert done.stdout.count(" 0 broken") == 3


def test_a_plugin_with_memory_of_its_clients_passes_the_contract_tests(plugins):
    done = contract_tests("--method", "inertia", FL_LIGHTNING_PLUGINS=str(plugins))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 broken") == 1


def test_a_named_setting_of_ones_own_passes_the_contract_tests(plugins):
    done = contract_tests("--method", "fedmild", FL_LIGHTNING_PLUGINS=str(plugins))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" 0 broken") == 1
    listed = fl_lightning("list", "methods", FL_LIGHTNING_PLUGINS=str(plugins)).stdout
    assert "Made of fedopt+optimiser=sgd+server_lr=1+server_momentum=0.5." in listed


def test_a_plugin_that_writes_in_place_does_not_pass(plugins):
    path = plugins / "median.py"
    path.write_text(
        path.read_text().replace("return State({k: v", "state.params['0.bias'].zero_()\n        return State({k: v")
    )
    done = contract_tests("--method", "median", FL_LIGHTNING_PLUGINS=str(plugins))
    assert done.returncode == 1
    assert "broken   hooks change no inputs: Median.aggregate writes into its inputs" in done.stdout


def test_a_broken_plugin_is_named(tmp_path):
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    done = fl_lightning("list", "methods", FL_LIGHTNING_PLUGINS=str(tmp_path))
    assert done.returncode == 0
    assert "broken.py cannot be imported: ModuleNotFoundError" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def fenced(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / name).read_text(), re.MULTILINE | re.DOTALL)


def test_the_studies_of_the_docs_are_studies(tmp_path):
    for number, text in enumerate(fenced("docs/sweeps.md", "yaml")):
        (tmp_path / f"study{number}.yaml").write_text(text)
    (tmp_path / "my_study.py").write_text(fenced("docs/sweeps.md", "python")[0])
    assert len(grid.cells(study_file.load(str(tmp_path / "study0.yaml")))) == 2 * (2 + 4)
    models = {cell.config.names["model"] for cell in grid.cells(study_file.load(str(tmp_path / "study1.yaml")))}
    assert models == {"mlp", "cnn"}
    honest = study_file.load(str(tmp_path / "study2.yaml"))
    assert (len(grid.cells(honest)), honest.metric, honest.confirm.seeds) == (18, "GA_validation", (2, 3, 4, 5, 6, 7))
    assert study_file.load(str(tmp_path / "study3.yaml")).search.samples == 20
    assert len(grid.cells(study_file.load(str(tmp_path / "my_study.py")))) == 6


def test_every_study_is_documented():
    text = (ROOT / "docs" / "sweeps.md").read_text()
    for name in study_file.names():
        assert f"| `{name}` |" in text


def test_the_readme_names_every_method():
    text = (ROOT / "README.md").read_text()
    built_in = [cls for cls in discovery.discover("methods").values() if cls.__module__.startswith("fl_lightning.")]
    assert f"and {len(built_in) - 1} other methods" in text
    missing = [name for name in discovery.discover("methods") if f"`{name}`" not in text]
    assert not missing


def test_every_method_is_documented(monkeypatch):
    """In the table, which the code makes, and in a section; a preset needs the table alone."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import methods_table

    text = methods_table.PAGE.read_text()
    assert text == methods_table.updated(text), "run: python docs/site/methods_table.py"
    headings = re.findall(r"^## ([a-z_]+)", text, re.MULTILINE)
    assert {name for name in discovery.discover("methods") if not discovery.made_of("methods", name)} <= set(headings)


@pytest.mark.parametrize("page", [ROOT / "README.md", *(ROOT / "docs").glob("*.md")], ids=lambda page: page.stem)
def test_links_to_lines_of_the_code_are_right(page, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import line_links

    assert page.read_text() == line_links.updated(page), "run: python docs/site/line_links.py"


def test_a_link_to_a_line_follows_what_it_names(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "site"))
    import line_links

    (tmp_path / "code.py").write_text("from other import f\n\n\nclass A:\n    def f(self):\n        pass\n")
    (tmp_path / "page.md").write_text("[`A.f`](code.py#L1), [`f`](code.py#L9), [`A`](code.py#L4)")
    assert line_links.updated(tmp_path / "page.md") == "[`A.f`](code.py#L5), [`f`](code.py#L5), [`A`](code.py#L4)"
    (tmp_path / "page.md").write_text("[`B`](code.py#L1)")
    with pytest.raises(LookupError, match=r"code\.py defines no B"):
        line_links.updated(tmp_path / "page.md")


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"
