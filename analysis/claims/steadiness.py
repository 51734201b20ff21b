"""What the paper says about online and offline curvature on MNIST and CIFAR-10: which curve is the steadier one."""

import operator

import pandas as pd

from analysis import contests, tables
from analysis.claims.claim import A_FEW, Finding, Mean, compared, need
from analysis.claims.means import falls, over_seeds, where_words
from analysis.parts import Part
from analysis.statistics import mean_interval

OFFLINE = "offline"


def steadiness(part: Part) -> Finding:
    """How far GA falls from round to round after the first few: online and offline."""
    need_late_rounds(part)
    runs = part.runs.assign(
        falls=part.runs["run_id"].map(falls(part.rounds)),
        late_falls=part.runs["run_id"].map(falls(part.rounds, A_FEW)),
    )
    keys = contests.conditions(runs)
    rows, held = [], []
    for condition in contests.groups(runs, keys):
        where = {key: condition[key].iloc[0] for key in keys}
        for case, mine in condition.groupby("case", sort=False):
            ended = mine.loc[mine["ended"]]
            rows.append(
                {
                    **{contests.symbol(key): value for key, value in where.items()},
                    "case": case,
                    **tables.columns("falls of GA (points)", mean_interval(ended["falls"])),
                    **tables.columns(f"after round {A_FEW} (points)", mean_interval(ended["late_falls"])),
                    **tables.columns("final GA (%)", mean_interval(100 * ended["GA"])),
                    "n": len(ended),
                    "diverged seeds": int(mine["status"].eq("diverged").sum()),
                }
            )
        late = over_seeds(condition, condition.set_index("run_id")["late_falls"])
        # FOLA online and offline, whatever a study calls them.
        offline = next((mean for case, mean in late.items() if OFFLINE in case), Mean())
        online = next((mean for case, mean in late.items() if case.startswith("FOLA") and OFFLINE not in case), Mean())
        text = f"{where_words(where)}after round {A_FEW} falls of GA add up to {online:.1f} points online, "
        held.append(compared(f"{text}{offline:.1f} offline", online, offline, operator.lt))
    return Finding(pd.DataFrame(rows), held)


def need_late_rounds(part: Part) -> None:
    """A curve can only fall after the first few rounds if it goes on after them."""
    last = int(part.rounds["round"].max()) if len(part.rounds) else 0
    need(last > A_FEW, f"the rule looks at rounds after round {A_FEW}, and round {last} is the last")
