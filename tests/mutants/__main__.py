"""Whether the fast tests notice small mistakes: each change of `changes.txt` in turn, on a copy of the project.

    python -m tests.mutants              # all, two at once
    python -m tests.mutants fola loop.py # those of files with such a path

The process has imported what takes long, and is forked for every change; nothing of ours is imported before that.
"""

import argparse
import gc
import importlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from tests.mutants.changes import Change, changes

ROOT = Path(__file__).parents[2]
PACKAGES = ("fl_lightning", "analysis", "tune", "tests")
# The first makes the others importable.
SLOW_IMPORTS = ("fl_lightning", "torch", "pytorch_lightning", "mlflow", "pandas", "scipy.stats", "sklearn")
# Tests that do not end have noticed something, too.
SECONDS = 600


def copied(to: Path) -> Path:
    """The project in another folder: our packages, and links to all else."""
    for name in PACKAGES:
        shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for entry in ROOT.iterdir():
        if entry.name not in PACKAGES and not entry.name.startswith("."):
            (to / entry.name).symlink_to(entry)
    return to


def passes(copy: Path, paths: tuple[str, ...]) -> bool:
    """Whether the fast tests of some files pass in a copy."""
    process = multiprocessing.get_context("fork").Process(target=_run_tests, args=(copy, paths))
    process.start()
    process.join(SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    return process.exitcode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)  # a file may have no examples


def _run_tests(copy: Path, paths: tuple[str, ...]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
        del sys.modules[name]
    sys.path[:] = [str(copy), *(place for place in sys.path if place not in ("", str(ROOT)))]
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "CHOICE_SEED": "0", "PYTHONDONTWRITEBYTECODE": ""}
    sys.dont_write_bytecode = False  # all but the changed file is compiled once
    os.chdir(copy)
    with open(copy / "output.txt", "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    fast = ["-m", "not system and not exhaustive"]
    # pytest would rewrite plugins, which are imported by now; Hypothesis's imports all of it for its last line.
    less = ["-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    os._exit(pytest.main(["-x", "-q", f"--basetemp={copy}/.tests", *fast, *less, *paths]))


def survives(change: Change, copy: Path) -> bool:
    """Whether no test notices the change."""
    path = copy / change.file
    before = path.read_text()
    written(path, change.applied(before))
    try:
        return passes(copy, change.tests)
    finally:
        written(path, before)


def written(path: Path, text: str) -> None:
    """Replace a file by one of another age: what Python has compiled of it is believed by age and length."""
    age = int(path.stat().st_mtime) - 1
    path.write_text(text)
    os.utime(path, (age, age))


class Copies:
    """Several copies of the project, each at work on one thing at a time."""

    def __init__(self, folder: Path, number: int) -> None:
        self.free: Queue[Path] = Queue()
        self.pool = ThreadPoolExecutor(number)
        for one in range(number):
            self.free.put(copied(folder / str(one)))

    def map(self, work: Callable[[Any, Path], bool], items: Iterable[Any]) -> Iterator[bool]:
        """What comes of each item, in their order."""

        def on_one(item: Any) -> bool:
            copy = self.free.get()
            try:
                return work(item, copy)
            finally:
                self.free.put(copy)

        return self.pool.map(on_one, items)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="of the paths of files whose changes are tried")
    parser.add_argument("--jobs", type=int, default=2, help="copies at work at once")
    given = parser.parse_args()
    chosen = [one for one in changes() if not given.parts or any(part in one.file for part in given.parts)]
    for name in SLOW_IMPORTS:
        importlib.import_module(name)
    gc.freeze()  # children need not look through it
    with tempfile.TemporaryDirectory() as folder:
        copies = Copies(Path(folder), given.jobs)
        paths = sorted({path for one in chosen for path in one.tests})
        sound = copies.map(lambda path, copy: passes(copy, (path,)), paths)
        if failing := [path for path, passed in zip(paths, sound, strict=True) if not passed]:
            print(f"fail without any change: {', '.join(failing)}; fix them first")
            return 2
        alive = []
        for change, survived in zip(chosen, copies.map(survives, chosen), strict=True):
            print(f"{'SURVIVED' if survived else 'killed':<9} {change}", flush=True)
            alive += [change] if survived else []
    print(f"{len(chosen) - len(alive)} of {len(chosen)} killed")
    return int(any(one.noticed for one in alive))


if __name__ == "__main__":
    sys.exit(main())
