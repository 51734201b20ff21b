"""The folders of archived runs and of the runs of every study: a finished run must be found again by later code.

`python -m tests.golden.identities` writes `identities.json` anew. A change there means that users compute finished runs
again, so it belongs into a commit of its own, with the reason.
"""

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from fl_lightning.errors import UserError
from fl_lightning.runs.folder import folder_of
from tune import grid, study_file
from tune.study import Study

FILE = Path(__file__).with_name("identities.json")
# The paper's grids have thousands of cells, which differ in numbers alone.
MOST_CELLS = 100


def of_studies() -> dict[str, dict[str, str | int]]:
    """How many runs the first cells of each study have, and a hash of their folders."""
    found = {}
    for name, study in _studies():
        cells = islice((*grid.cells(study), *grid.reference_cells(study)), MOST_CELLS)
        folders = sorted(folder_of(config, Path()).name for cell in cells for config in cell.configs)
        digest = hashlib.sha256("\n".join(folders).encode()).hexdigest()[:16]
        found[name] = {"runs": len(folders), "folders": digest}
    return found


def _studies() -> Iterator[tuple[str, Study]]:
    for name in study_file.names():
        for scale in ("smoke", "small", "medium", "digits", "paper"):
            try:
                study = study_file.load(name, scale)
            except UserError:  # a study without this scale
                continue
            yield f"{name}, {scale}", study


if __name__ == "__main__":
    FILE.write_text(json.dumps(of_studies(), indent=1) + "\n")
