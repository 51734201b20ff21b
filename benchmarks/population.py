"""A cohort of 100 clients out of 10^3, 10^4 and 10^5: what a whole run costs, each in a process of its own.

`python -m benchmarks.population scaffold 100000` prints one JSON line.
"""

import json
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.memory import forget_peak, peak_megabytes
from benchmarks.table import Row

METHODS = ("fola", "scaffold", "ep")
POPULATIONS = (1_000, 10_000, 100_000)
COHORT, SAMPLES, ROUNDS = 100, 2, 20
# The same data in memory for every population, of which smaller ones use a share: clients of all have as many samples.
LOAD = f"""
import numpy as np

def load():
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, ({SAMPLES * max(POPULATIONS)}, 1, 28, 28), dtype=np.uint8)
    y = rng.permutation({SAMPLES * max(POPULATIONS)}) % 10
    return x, y, x[:1000], y[:1000]
"""


def measure_population() -> list[Row]:
    """CPU time of a round and peak memory against those of the smallest population, and the start-up."""
    rows = []
    for method in METHODS:
        found = {}
        for population in POPULATIONS:
            command = [sys.executable, "-m", "benchmarks.population", method, str(population)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            found[population] = json.loads(output)
        for population, result in found.items():
            few = found[POPULATIONS[0]]
            what = f"{method}, {COHORT} of {population:,}"
            note = f"{1000 * result['round']:.0f} ms against {1000 * few['round']:.0f} ms"
            rows.append(Row("population", f"{what}: round", result["round"] / few["round"], "x", 1.2, note))
            note = f"{result['peak']:.0f} MB against {few['peak']:.0f} MB"
            rows.append(Row("population", f"{what}: peak memory", result["peak"] / few["peak"], "x", 1.2, note))
            note = f"with {result['load']:.1f} s to make and hash the data; without imports"
            rows.append(Row("population", f"{what}: start-up", result["start"], "s", 5.0, note))
    return rows


def cost_of(method: str, population: int) -> dict[str, float]:
    """CPU seconds from the command to the first round, per round, and after the last; to load the data; megabytes."""
    from fl_lightning.experiment import run
    from fl_lightning.runs.config.run_config import configure

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "many.py")
        file.write_text(LOAD, encoding="utf-8")
        run(configure({"method": method, "data": "digits", "federation.rounds": 2}), folder)  # libraries, a new store
        forget_peak()
        start = time.process_time()
        flat = {
            "method": method,
            "model": "softmax",
            "data": "function",
            "data.path": str(file),
            "data.partition": "iid",
            "data.clients": population,
            "data.subset": population / max(POPULATIONS),
            "federation.cohort": COHORT,
            "federation.rounds": ROUNDS,
            "training.lr": 0.01,
            "engine": "functional",
        }
        config = configure(flat)
        config.source.load()
        loaded = time.process_time()
        times = []
        run(config, folder, watch=lambda *_: times.append(time.process_time()))
        end = time.process_time()
    gaps = sorted(after - before for before, after in pairwise(times))
    usual = gaps[len(gaps) // 4]  # other processes make rounds longer, never shorter
    return {
        "start": times[0] - start - usual,
        "load": loaded - start,
        "round": usual,
        "end": end - times[-1],
        "peak": peak_megabytes(),
    }


if __name__ == "__main__":
    print(json.dumps(cost_of(sys.argv[1], int(sys.argv[2]))))
