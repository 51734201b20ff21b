"""Runs that an earlier version has left half done go on to the numbers that it would have reached.

`golden/checkpoints.zip` has one folder of an unfinished run for each method that keeps state of its own, as a killed
process left it; `golden/checkpoints.json` has their settings and the metrics of the uninterrupted runs.
"""

import json
import zipfile
from pathlib import Path

import pytest

from fl_lightning import configure, run
from fl_lightning.runs.folder import folder_of

pytestmark = pytest.mark.slow


GOLDEN = Path(__file__).parent
PINNED = json.loads((GOLDEN / "checkpoints.json").read_text())


@pytest.mark.parametrize("name", PINNED)
def test_an_old_run_goes_on(name, out):
    pinned = PINNED[name]
    with zipfile.ZipFile(GOLDEN / "checkpoints.zip") as file:
        file.extractall(out, [one for one in file.namelist() if one.startswith(f"{pinned['folder']}/")])
    config = configure(pinned["settings"])
    assert folder_of(config, out).name == pinned["folder"]
    result = run(config, out)
    assert len(result.history) == config.federation.rounds
    assert result.history[0].metrics["seconds"] == pinned["first_seconds"]  # not computed again
    final = {key: result.final[key] for key in pinned["final"]}
    assert final == pytest.approx(pinned["final"], rel=1e-7, abs=1e-9)
