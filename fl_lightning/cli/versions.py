"""What to say about results that another version of the code has left."""

from collections.abc import Sequence
from pathlib import Path

from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.runs.identity import in_words, versions
from fl_lightning.runs.provenance import versions_of


def notice(configs: Sequence[RunConfig], out: Path) -> str:
    """How many of the runs are there from other versions, and of which parts; empty if there are none."""
    found = run_folder.of_other_versions(configs, out)
    if not found:
        return ""
    by_name = {run_folder.folder_of(config, out).name: config for config in configs}
    name, (folder, *_) = next(iter(found.items()))
    result = run_folder.read_result(folder)
    differing = in_words(versions_of(result.tags) if result else {}, versions(by_name[name]))
    what = "this run is" if len(configs) == 1 else f"{len(found)} of these runs are"
    return f"{what} also there from another version of the code ({differing}), which is not used: {folder}"
