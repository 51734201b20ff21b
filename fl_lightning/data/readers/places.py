"""Where datasets lie on this machine."""

import os
from pathlib import Path

USER_CACHE = "~/.cache/fl_lightning/data"


def data_root(root: str | None) -> Path:
    """The folder of all datasets: the setting, else the environment's, else the user's cache."""
    return Path(root or os.environ.get("FL_LIGHTNING_DATA") or USER_CACHE).expanduser()


def prepared_folders(root: str | None) -> list[Path]:
    """Where prepared copies may lie: beside the data, so that all users of one folder share them, or in the cache."""
    places = (data_root(root), Path(USER_CACHE).expanduser())
    return list(dict.fromkeys(place / "prepared" for place in places))
