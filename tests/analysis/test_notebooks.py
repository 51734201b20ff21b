"""Notebooks are stored without outputs, are thin, and run from top to bottom on the runs of the smoke studies."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

import analysis

pytestmark = pytest.mark.system


FOLDER = Path(analysis.__file__).parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
# What must be drawn from the smoke studies, at least.
PICTURES = {
    "ablations": 2,
    "ae_and_lf": 1,
    "comparison_of_two_methods": 10,
    "correlation_of_ga_and_la": 3,
    "heterogeneity": 6,
    "hyperparameters": 4,
    "laplace_study": 5,
    "learning_curves": 12,
}


def test_all_notebooks_are_there():
    assert {path.stem for path in NOTEBOOKS} == set(PICTURES)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_without_outputs_and_thin(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    assert "STORE = " in cells[0].source
    assert sum(len(cell.source.splitlines()) for cell in cells) < 40
    assert not any("def " in cell.source for cell in cells)


def execute(paths, store, where):
    """Pictures and printed text of some notebooks, run in one kernel, which is emptied between them.

    A kernel of its own for each would import everything again, which takes longer than the notebooks do.
    """
    whole, parts = nbformat.v4.new_notebook(), {}
    for path in paths:
        cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        cells[0].source = f"STORE = {str(store)!r}"
        parts[path.stem] = cells
        whole.cells += [nbformat.v4.new_code_cell("%reset -f"), *cells]
    nbclient.NotebookClient(whole, timeout=300, resources={"metadata": {"path": str(where)}}).execute()
    found = {}
    for name, cells in parts.items():
        outputs = [output for cell in cells for output in cell.outputs]
        pictures = sum("image/png" in output.get("data", {}) for output in outputs)
        found[name] = pictures, "".join(output.get("text", "") for output in outputs)
    return found


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # of sockets of the kernel
def test_all_run_on_the_smoke_studies(smoke_store, tmp_path):
    found = execute(NOTEBOOKS, smoke_store, tmp_path)
    assert found.keys() == PICTURES.keys()
    for name, (pictures, printed) in found.items():
        assert pictures >= PICTURES[name], f"{name}: {printed}"
        assert "Traceback" not in printed


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_absent_study_is_said(odd_store, tmp_path):
    ((pictures, printed),) = execute([FOLDER / "laplace_study.ipynb"], odd_store, tmp_path).values()
    assert pictures == 1  # the one that needs no runs
    assert "Nothing to show" in printed
    assert "fl-lightning sweep laplace" in printed


def test_the_documented_command_keeps_what_it_computes(odd_store, tmp_path):
    """The command of docs/analysis.md, in a folder like the project's."""
    root = FOLDER.parents[1]
    (line,) = re.findall(r"^ {4}(python -m jupyter execute .*)$", (root / "docs" / "analysis.md").read_text(), re.M)
    (tmp_path / "analysis").mkdir()
    shutil.copytree(FOLDER, tmp_path / "analysis" / "notebooks")
    (tmp_path / "runs").symlink_to(odd_store)
    names = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(root)}
    done = subprocess.run(line, shell=True, cwd=tmp_path, env=names, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (kept,) = tmp_path.glob("*.ipynb")
    cells = [cell for cell in nbformat.read(kept, as_version=4).cells if cell.cell_type == "code"]
    assert any("image/png" in output.get("data", {}) for cell in cells for output in cell.outputs)
    untouched = (tmp_path / "analysis" / "notebooks" / kept.name).read_text()
    assert untouched == (FOLDER / kept.name).read_text()
