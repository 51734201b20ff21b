"""Random kills, damage and settings for some minutes: `make chaos`, or `python -m tests.faults.chaos --minutes 10`.

Every attempt has a seed of its own, printed if it does not hold; `--seed N --attempts 1` repeats it, though moments of
kills vary with the machine. Ends with a table of what was tried and what held; exit code 1 if something did not.
"""

import argparse
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import yaml
from mlflow import MlflowClient

from fl_lightning import discovery
from fl_lightning.data.sources.arrays import Arrays
from fl_lightning.errors import UserError
from fl_lightning.experiment import run
from fl_lightning.runs.config.run_config import RunConfig, configure
from fl_lightning.system.text import render
from tests.support.clusters import ENVIRONMENT, Driver, alone, check_complete, timeless, tracked
from tune.grid import cells
from tune.study_file import load

SETTINGS = {
    "data": "digits",
    "data.subset": 0.2,
    "data.clients": 4,
    "data.holdout": 0.1,
    "model": "mlp",
    "model.hidden": [8],
    "federation.rounds": 12,
    "engine": "functional",
    "engine.chunk": 1,
}
VALUES = [
    0,
    1,
    -1,
    2,
    0.5,
    1e-3,
    1e9,
    math.nan,
    math.inf,
    "",
    "x",
    "1e-3",
    None,
    True,
    [],
    [8],
    [0],
    {},
    "null",
    "é☃",
    "$",
]
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
SECONDS = 600


class Broken(Exception):  # noqa: N818 - a finding
    """A promise that did not hold."""


def hold(condition: bool, what: str) -> None:
    if not condition:
        raise Broken(what)


def killed_run(rng: random.Random, folder: Path) -> None:
    """Kill a run at random moments; the last start ends at the numbers of an undisturbed run, in one MLflow run."""
    config = configure({**SETTINGS, "method": rng.choice(list(discovery.discover("methods")))})
    for _ in range(rng.randint(1, 2)):
        _stop(_start(config, folder), folder, rng)
    _finish(config, folder)


def damaged_run(rng: random.Random, folder: Path) -> None:
    """Damage a file of a killed run; it is refused in one line that names it, or the numbers are right."""
    config = configure({**SETTINGS, "method": "fola"})
    _stop(_start(config, folder), folder, rng)
    files = [file for file in folder.glob("*-digits-*/**/*") if file.is_file() and file.stat().st_size]
    if files:
        _damage(rng.choice(sorted(files)), rng)
    _finish(config, folder, may_refuse=True)


def killed_sweep(rng: random.Random, folder: Path) -> None:
    """Kill a sweep's driver, or one of its processes; the same command completes it."""
    path = folder.parent / "chaos.yaml"
    path.write_text(yaml.safe_dump({"base": SETTINGS, "cases": ["fedavg", "fola"], "seeds": 2}), encoding="utf-8")
    configs = [config for cell in cells(load(str(path))) for config in cell.configs]
    first = Driver(folder, str(path), "--max-concurrent", "1")
    last = None
    try:
        deadline = time.monotonic() + rng.uniform(5, 60)
        while time.monotonic() < deadline and first.process.poll() is None:
            time.sleep(0.05)
        victims = [first.process.pid, *(pid for pid, words in first.family().items() if words.startswith("ray::"))]
        with suppress(ProcessLookupError):
            os.kill(rng.choice(victims), signal.SIGKILL)
        if rng.random() < 0.5:  # the driver goes on after the loss of a worker
            with suppress(ProcessLookupError):
                os.kill(first.process.pid, signal.SIGKILL)
        # 1: the loss may be one that Ray does not survive; then the sweep says which runs have failed.
        ended = first.wait(SECONDS)
        hold(ended in (0, 1, -signal.SIGKILL), f"the disturbed sweep ended with {ended}: {first.errors[-300:]}")
        hold("Traceback" not in first.errors, f"a traceback: {first.errors[-500:]}")
        last = Driver(folder, str(path), "--max-concurrent", "1", TMPDIR=first.temporary)
        hold(last.wait(SECONDS) == 0, f"the second sweep ended with {last.process.returncode}: {last.errors[-300:]}")
        check_complete(configs, folder, folder.parent / "undisturbed")
        hold(first.wait_until_gone(30) == {}, "processes of the killed sweep live on")
    except AssertionError as error:
        raise Broken(str(error)) from None
    finally:
        first.end()
        if last is not None:
            last.end()


def random_settings(rng: random.Random, folder: Path) -> None:
    """Settings by chance: a result, or a line that says what is wrong; never a traceback."""
    keys = [
        *SETTINGS,
        "training.lr",
        "training.epochs",
        "training.batch_size",
        "federation.fraction",
        "seed",
        "data.alpha",
    ]
    settings = {**SETTINGS, "method": rng.choice(list(discovery.discover("methods"))), "federation.rounds": 1}
    settings |= {rng.choice(keys): rng.choice(VALUES) for _ in range(rng.randint(1, 3))}
    try:
        config = configure(settings)
        if config.federation.rounds <= 3 and config.training.epochs <= 3:  # others are right, and take for ever
            run(config, folder)
    except UserError as error:
        hold("\n" not in str(error), f"{settings}: {error}")
    except Exception as error:
        raise Broken(f"{settings}: {type(error).__name__}: {error}") from None


def mutated_study(rng: random.Random, folder: Path) -> None:
    """A study with random damage to its text: it is read, or refused in one line."""
    content = {
        "base": SETTINGS,
        "cases": ["fedavg", {"label": "A", "method": "fola"}],
        "scales": {"small": {"seeds": 1}},
    }
    text = list(yaml.safe_dump({**content, "space": {"training.lr": [0.1, 1]}, "seeds": 2}))
    for _ in range(rng.randint(1, 6)):
        place = rng.randrange(len(text))
        text[place : place + rng.randint(0, 3)] = rng.choice("{}[]:,-\n\t #&*!|>'\"%@`é\0/.0a")
    path = folder.parent / "mutated.yaml"
    path.write_text("".join(text), encoding="utf-8")
    try:
        study = load(str(path))
        place = (folder / f"{study.name}-{study.scale}").resolve()
        hold(place.parent == folder.resolve(), f"{place} is outside of {folder}")
        cells(study)
    except UserError as error:
        hold("\n" not in str(error), f"{''.join(text)!r}: {error}")
    except Exception as error:
        raise Broken(f"{''.join(text)!r}: {type(error).__name__}: {error}") from None


def mutated_arrays(rng: random.Random, folder: Path) -> None:
    """An .npz with random damage: it is read, or refused in one line."""
    path = folder.parent / "mutated.npz"
    generator = np.random.default_rng(rng.randrange(2**32))
    np.savez(path, train_x=generator.normal(size=(40, 3)), train_y=np.arange(40) % 4)
    _damage(path, rng)
    try:
        Arrays(path=str(path)).load()
    except UserError as error:
        hold("\n" not in str(error), str(error))
    except Exception as error:
        raise Broken(f"{type(error).__name__}: {error}") from None


# How often each is tried: those that start programs take seconds to minutes, the others milliseconds.
ATTEMPTS: dict[Callable[[random.Random, Path], None], int] = {
    killed_run: 3,
    damaged_run: 3,
    killed_sweep: 1,
    random_settings: 12,
    mutated_study: 30,
    mutated_arrays: 30,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--attempts", type=int, default=sys.maxsize, help="at most so many")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the first attempt [the clock]")
    options = parser.parse_args()
    print(f"chaos for {options.minutes:g} minutes, seed {options.seed}", flush=True)
    os.environ.update({**ENVIRONMENT, "OMP_NUM_THREADS": "1"})
    tried: Counter[str] = Counter()
    held: Counter[str] = Counter()
    place = Path(tempfile.mkdtemp(prefix="chaos"))
    try:
        store = place / "empty.db"
        MlflowClient(f"sqlite:///{store}").search_experiments()  # creating its tables takes seconds
        end = time.monotonic() + 60 * options.minutes
        for seed in range(options.seed, options.seed + options.attempts):
            if time.monotonic() > end:
                break
            rng = random.Random(seed)
            (attempt,) = rng.choices(list(ATTEMPTS), list(ATTEMPTS.values()))
            folder = place / str(seed) / "runs"
            folder.mkdir(parents=True)
            shutil.copy(store, folder / "mlflow.db")
            tried[attempt.__name__] += 1
            try:
                attempt(rng, folder)
                held[attempt.__name__] += 1
            except Broken as finding:
                print(f"seed {seed}, {attempt.__name__}: {finding}", flush=True)
            shutil.rmtree(folder.parent, ignore_errors=True)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    rows = [
        {"what": attempt.__doc__ or "", "tried": str(tried[attempt.__name__]), "held": str(held[attempt.__name__])}
        for attempt in ATTEMPTS
    ]
    print(render(rows, markdown=True))
    return int(tried != held)


def _start(config: object, folder: Path) -> subprocess.Popen[str]:
    flags = [
        f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in config.flat().items()
    ]
    command = [sys.executable, "-m", "fl_lightning", "run", *flags, "--runs", str(folder), "--json", "--quiet"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _stop(process: subprocess.Popen[str], folder: Path, rng: random.Random) -> None:
    """After some checkpoints, or while it loads."""
    wanted, seen = rng.randint(0, 10), set()
    deadline = time.monotonic() + 120
    while process.poll() is None and len(seen) < wanted and time.monotonic() < deadline:
        for file in folder.glob("*/checkpoint.safetensors"):
            with suppress(FileNotFoundError):
                seen.add(file.stat().st_mtime_ns)
        time.sleep(0.001)
    time.sleep(rng.uniform(0, 0.05) if wanted else rng.uniform(0.3, 8))
    number = rng.choice(SIGNALS)
    process.send_signal(number)
    _, errors = process.communicate(timeout=SECONDS)
    expected = (0, -signal.SIGKILL) if number == signal.SIGKILL else (0, 128 + number)
    hold(process.returncode in expected, f"ended with {process.returncode} after signal {number}: {errors[-300:]}")
    hold("Traceback" not in errors, f"a traceback after signal {number}: {errors[-500:]}")


def _finish(config: RunConfig, folder: Path, may_refuse: bool = False) -> None:
    process = _start(config, folder)
    output, errors = process.communicate(timeout=SECONDS)
    if may_refuse and process.returncode == 2:
        hold(errors.count("\n") == 1 and str(folder) in errors, f"refused without naming the file: {errors[-300:]}")
        return
    hold(process.returncode == 0, f"ended with {process.returncode}: {errors[-500:]}")
    expected = timeless(alone(config, folder.parent / "undisturbed"))
    summary = json.loads(output.splitlines()[-1])
    final = expected[2][-1][0]
    hold((summary["GA"], summary["LA"]) == (final["GA"], final["LA"]), f"{summary} instead of {final}")
    client, runs = tracked(folder)
    hold(len(runs) == 1, f"{len(runs)} runs in MLflow instead of one")
    steps = [point.step for point in client.get_metric_history(runs[0].info.run_id, "GA")]
    hold(steps == list(range(1, len(expected[2]) + 1)), f"rounds {steps} in MLflow")


def _damage(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    kind = rng.choice(["flip", "cut", "empty", "gone", "noise"])
    if kind == "flip":
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    elif kind == "noise":
        for _ in range(20):
            content[rng.randrange(len(content))] = rng.randrange(256)
    else:
        content = content[: rng.randrange(len(content)) if kind == "cut" else 0]
    path.unlink()
    if kind != "gone":
        path.write_bytes(content)


if __name__ == "__main__":
    sys.exit(main())
