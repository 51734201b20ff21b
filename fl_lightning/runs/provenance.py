"""Which code, on which machine, made a run; and what to say of results that another version of the code has left."""

import functools
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.config.run_config import RunConfig
from fl_lightning.runs.identity import in_words, settings_hash, versions
from fl_lightning.system import devices

VERSIONS_TAG, SETTINGS_TAG = "versions", "settings"


def tags(config: RunConfig) -> dict[str, str]:
    """What MLflow records of it: the versions of all parts, package, commit, torch, and the device's name."""
    found = {
        SETTINGS_TAG: settings_hash(config),
        VERSIONS_TAG: json.dumps(versions(config), sort_keys=True),
        "package": f"fl_lightning {version('fl_lightning')}",
        "torch": torch.__version__,
        "device": device_name(config.compute.torch_device),
    }
    if commit := git_commit():
        found["mlflow.source.git.commit"] = commit
    return found


def versions_of(tags: Mapping[str, str]) -> dict[str, int | str]:
    """The versions that made a run, from its tags; none if it is older than they are."""
    found: dict[str, int | str] = json.loads(tags.get(VERSIONS_TAG, "{}"))
    return found


@functools.cache
def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name, as its maker calls it where the system says."""
    if device.type != "cpu":
        return devices.product_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


@functools.cache
def git_commit() -> str | None:
    """The commit of the source, if the package lies in a git repository."""
    try:
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


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
