"""How often each rule errs, from stores that are made up: of each it is known whether its claim is true.

    python -m benchmarks.claims 200              # all rules, into analysis/claims/error_rates.csv
    python -m benchmarks.claims 1000 first_round # one, more often

In a store in which nothing differs, cases, conditions and settings have no effect at all. GA of round r is

    0.93 - 0.65 exp(-r / 4) + seed + run + round

with normal noise: of the seed, which draws the partition for all (2 points), of the run (1.5), of the round (0.5).
LA, AE and LF have the seed's part of it, and noise of their own. In a store in which a claim is false, its opposite
is added, five points or more. Each store has cases and conditions as the claim's study, and three seeds.
"""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

from analysis.claims import CLAIMS, Claim, Finding
from analysis.claims.__main__ import RATES
from analysis.study import Study
from fl_lightning.streams import numpy_generator
from fl_lightning.system.atomic import write_atomically
from fl_lightning.system.text import as_csv

SEEDS = 3
OF_SEED, OF_RUN, OF_ROUND = 0.02, 0.015, 0.005
GAP = 0.05
COSINE = "precision_cosine_minmax"
METRICS = ("GA", "LA", "AE", "LF", COSINE)


Change = Callable[[pd.DataFrame], pd.DataFrame]


class Design(NamedTuple):
    """The runs that decide a claim.

    Attributes:
        cases: By the names that its rule looks for.
        opposite: Adds the opposite of the claim to a table of rounds.
        grid: Conditions and settings, each with its values.
        rounds: Of every run.
    """

    cases: Sequence[str]
    opposite: Change
    grid: Mapping[str, Sequence[float]] = {}
    rounds: int = 1


def made_up(rounds: pd.DataFrame, name: str) -> Study:
    """A study with these rounds, which was never run."""
    runs = rounds.sort_values("round").drop_duplicates("run_id", keep="last").drop(columns="round")
    return Study(runs.reset_index(drop=True), rounds[["run_id", "round", *METRICS]], title="made up", name=name)


def nothing_differs(design: Design, rng: np.random.Generator) -> pd.DataFrame:
    """One row per run and round of a store without any effect."""
    keys = ["case", *design.grid, "seed"]
    runs = pd.DataFrame(itertools.product(design.cases, *design.grid.values(), range(SEEDS)), columns=keys)
    runs = runs.assign(run_id=runs.index.map(str), method=runs["case"].map(_method), status="finished", ended=True)
    runs = runs.assign(**{"federation.rounds": design.rounds, "federation.start": None, "data": "made up"})
    of_seed = OF_SEED * rng.standard_normal(SEEDS)

    def noise(size: float, table: pd.DataFrame) -> np.ndarray:
        return size * rng.standard_normal(len(table))

    luck = noise(OF_RUN, runs) + of_seed[runs["seed"]]
    rounds = runs.assign(luck=luck).merge(pd.DataFrame({"round": np.arange(1, design.rounds + 1)}), how="cross")
    seed = of_seed[rounds["seed"]]
    return rounds.drop(columns="luck").assign(
        GA=0.93 - 0.65 * np.exp(-rounds["round"] / 4) + rounds["luck"] + noise(OF_ROUND, rounds),
        LA=0.6 + seed + noise(OF_RUN, rounds),
        AE=1 - 5 * seed + noise(5 * OF_RUN, rounds),
        LF=1 - 5 * seed + noise(5 * OF_RUN, rounds),
        **{COSINE: 0.96 + noise(OF_ROUND, rounds)},
    )


def _method(case: str) -> str:
    return "fola" if case.startswith(("FOLA", "full", "e-full", "diagonal", "product", "average")) else case.lower()


def _lowered(
    *cases: str, where: Callable[[pd.DataFrame], "pd.Series[bool]"] = lambda rounds: rounds["ended"]
) -> Change:
    """GA and LA of these cases are lower, and their paths rougher."""

    def opposite(rounds: pd.DataFrame) -> pd.DataFrame:
        gap = GAP * (rounds["case"].isin(cases) & where(rounds)) * (1 + rounds["round"] % 2)
        return rounds.assign(GA=rounds["GA"] - gap, LA=rounds["LA"] - gap)

    return opposite


def _easier_with_more_clients(rounds: pd.DataFrame) -> pd.DataFrame:
    effect = GAP * (np.log2(rounds["data.clients"]) - np.log10(rounds["data.alpha"]))
    return rounds.assign(GA=rounds["GA"] + effect)


def _against(one: str, other: str) -> Change:
    """One metric falls where another rises."""
    return lambda rounds: rounds.assign(**{one: 1.5 - rounds[other]})


def _with(one: str, other: str) -> Change:
    """One metric rises where another does."""
    return lambda rounds: rounds.assign(**{one: rounds[other]})


def _diagonal_alike(rounds: pd.DataFrame) -> pd.DataFrame:
    diagonal = rounds["case"].isin(_of("diagonal"))
    return _lowered(*_of("diagonal"))(rounds).assign(**{COSINE: rounds[COSINE] + GAP * diagonal})


def _of(*forms: str) -> list[str]:
    return [f"{form} {how}" for form in forms for how in ("online", "offline")]


_ALL = ("FedAvg", "FOLA", "FedCurv", "FedBE", "SCAFFOLD", "FedNova")
_FORMS = ("FedAvg", *_of("full", "e-full", "diagonal"))
_FIRST_ROUND = {"data.alpha": (0.01, 100.0), "data.clients": (10, 20), "training.lr": (0.01, 0.1)}
_SETTINGS = {"data.alpha": (0.01,), "training.epochs": (1, 5, 10), "training.lr": (0.01, 0.03, 0.1)}
_BY_ALPHA = {"data.alpha": (0.01, 100.0), "training.lr": (0.003, 0.01, 0.03, 0.1, 0.3)}
DESIGNS = {
    "first_round": Design(
        ("FedAvg", "FOLA"), _lowered("FOLA", where=lambda rounds: rounds["data.alpha"].lt(1)), _FIRST_ROUND
    ),
    "environment": Design(("FedAvg", "FOLA"), _easier_with_more_clients, _FIRST_ROUND),
    "convergence_mnist": Design(("FedAvg", "FOLA"), _lowered("FOLA"), {"data.clients": (10, 20)}, 12),
    "convergence_cifar": Design(_ALL, _lowered("FOLA"), rounds=12),
    "every_alpha": Design(
        ("FedAvg", "FOLA"), _lowered("FOLA"), {"data.alpha": (0.01, 100.0), "training.lr": (0.01, 0.03, 0.1)}
    ),
    "ga_and_la": Design(("FedAvg", "FOLA"), _against("LA", "GA"), _SETTINGS),
    "online_mnist": Design(("FOLA", "FOLA offline"), _lowered("FOLA"), {"data.clients": (10, 20)}, 12),
    "online_cifar": Design(("FOLA", "FOLA offline"), _lowered("FOLA"), rounds=12),
    "prior_and_product": Design(
        ("product", "average"),
        _lowered("product", where=lambda rounds: rounds["method.strength"].gt(0)),
        {"method.strength": (0.0, 1.0, 10.0, 100.0)},
    ),
    "full_is_best": Design(_FORMS, _lowered(*_of("full")), rounds=5),
    "laplace_online": Design(_FORMS, _lowered("full online", "e-full online", "diagonal online"), rounds=5),
    "e_full_is_average": Design(_FORMS, _lowered(*_of("e-full", "diagonal")), rounds=5),
    "diagonal_keeps_differences": Design(_FORMS, _diagonal_alike),
    "ga_tracks_ae": Design(("FOLA",), _with("AE", "GA"), _BY_ALPHA),
    "la_tracks_lf": Design(("FOLA",), _with("LF", "LA"), _BY_ALPHA),
}


def simulate(claim: Claim, draws: int) -> dict[str, str | int]:
    """How often a claim is confirmed where nothing differs, and, in a quarter of as many stores, where it is false."""
    design = DESIGNS[claim.key]
    stores = [nothing_differs(design, numpy_generator(0, "claims", draw)) for draw in range(draws)]
    null = [verdict(claim, rounds) for rounds in stores]
    false = [verdict(claim, design.opposite(rounds)) for rounds in stores[: max(1, draws // 4)]]
    return {
        "claim": claim.key,
        "stores": len(null),
        "confirmed": null.count("confirmed"),
        "tends to": null.count("tends to"),
        "stores, false": len(false),
        "confirmed, false": false.count("confirmed"),
    }


def verdict(claim: Claim, rounds: pd.DataFrame) -> str:
    """What the rule says of these rounds; `CannotTell` is a mistake of the design."""
    found: Finding = claim.check(made_up(rounds, claim.study)).asking(claim.seeds)
    return found.verdict


def write(draws: int, keys: Sequence[str] = ()) -> None:
    """Simulate all rules, or those of some claims, and store the table."""
    table = pd.read_csv(RATES, index_col="claim") if RATES.exists() else pd.DataFrame()
    for claim in CLAIMS:
        if not keys or claim.key in keys:
            found = pd.DataFrame([simulate(claim, draws)]).set_index("claim")
            table = pd.concat([table.drop(index=claim.key, errors="ignore"), found])
            order = [one.key for one in CLAIMS if one.key in table.index]
            write_atomically(RATES, as_csv(table.loc[order].reset_index(names="claim")).encode())


if __name__ == "__main__":
    write(int(sys.argv[1]), sys.argv[2:])
