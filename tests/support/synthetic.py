"""Tables like those of `analysis.runs`, made up: many runs at once, with a truth that is known."""

import itertools

import numpy as np
import pandas as pd

from analysis.study import Study

METHODS = {"FedAvg": "fedavg", "FOLA": "fola", "FedCurv": "fedcurv", "SCAFFOLD": "scaffold", "FedBE": "fedbe"}
GAIN = {"FedAvg": 0.0, "FOLA": 0.08, "FedCurv": 0.03, "SCAFFOLD": -0.05, "FedBE": 0.02}


def rounds_table(
    cases=("FedAvg", "FOLA"),
    alphas=(0.01,),
    clients=(10,),
    seeds=3,
    rounds=10,
    lrs=(0.1,),
    epochs=(5,),
    batches=(32,),
    strengths=(None,),
    **columns,
):
    """One row per run and round. GA falls with heterogeneity and number of clients; FOLA gains 8 points."""
    rng = np.random.default_rng(7)
    rows = []
    grid = itertools.product(cases, alphas, clients, lrs, epochs, batches, strengths, range(seeds))
    for number, (case, alpha, n, lr, epoch, batch, strength, seed) in enumerate(grid):
        top = 0.75 + 0.05 * np.log10(alpha) - 0.03 * np.log10(n) + GAIN[case] * (2 - np.log10(alpha)) / 4
        top -= 0.1 * abs(np.log10(lr) + 1) + 0.02 * abs(np.log2(epoch / 5)) + 0.01 * abs(np.log2(batch / 32))
        luck = 0.03 * rng.standard_normal()
        for r in range(1, rounds + 1):
            ga = (top + luck) * (1 - 0.7 * np.exp(-r / 4)) + 0.01 * rng.standard_normal()
            rows.append(
                {
                    "run_id": f"{number:032x}",
                    "case": case,
                    "method": METHODS[case],
                    "data": "mnist",
                    "model": "mlp",
                    "seed": seed,
                    "partition": f"{alpha}/{n}/{seed}",
                    "status": "finished",
                    "ended": True,
                    "study": None,
                    "data.alpha": alpha,
                    "data.clients": n,
                    "federation.rounds": rounds,
                    "training.lr": lr,
                    "training.epochs": epoch,
                    "training.batch_size": batch,
                    "method.strength": strength if case != "FedAvg" else None,
                    "round": r,
                    "GA": ga,
                    "LA": 0.6 * ga + 0.02 * rng.standard_normal(),
                    "bytes_down": 1e6 * (2 if case == "FOLA" else 1),
                    "bytes_up": 1e6 * (2 if case == "FOLA" else 1),
                    "seconds_local": 0.5,
                    "seconds_server": 0.1,
                    "gradient_evaluations": 100.0,
                    **columns,
                }
            )
    table = pd.DataFrame(rows)
    table["method.strength"] = table["method.strength"].astype(float)
    return table


def runs_table(**options):
    """One row per run."""
    return last_rounds(rounds_table(**options))


def last_rounds(rounds):
    return rounds.drop_duplicates("run_id", keep="last").reset_index(drop=True)


def with_failures(rounds):
    """The run of the first case and seed diverges in round 3; the last run of all has only begun."""
    first, last = rounds["run_id"].iloc[0], rounds["run_id"].iloc[-1]
    changed = rounds.copy()
    changed.loc[changed["run_id"].eq(first), ["status", "ended"]] = ["diverged", False]
    changed.loc[changed["run_id"].eq(last), ["status", "ended"]] = ["running", False]
    short = changed["run_id"].isin([first, last]) & changed["round"].gt(3)
    return changed.loc[~short].reset_index(drop=True)


# Columns of runs that are neither settings nor metrics.
TOLD = {"run_id", "case", "method", "data", "model", "seed", "partition", "status", "ended", "study", "confirms"}


def as_study(table, **fields):
    """A study of made-up runs, from their rounds or from their last ones."""
    measured = [name for name in table if name == "run_id" or not (name in TOLD or "." in name)]
    runs = last_rounds(table).drop(columns="round", errors="ignore")
    return Study(runs, table[measured], **fields)
