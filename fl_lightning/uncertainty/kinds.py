"""Which metrics of a round are those of a final one, by their names: `probit/NLL`, `posterior/train_loss`.

A LightningModule may log names with a slash, too (`val/NLL`); they are measured in every round and none of these.
"""

from collections.abc import Iterable
from typing import get_args

from fl_lightning.uncertainty.settings import Predictive

# Of predictions, in the order of tables.
KINDS: tuple[str, ...] = get_args(Predictive)
# What is said of the posterior itself.
POSTERIOR = "posterior"


def is_final(metric: str) -> bool:
    """Whether a metric is measured in the final round alone.

    >>> is_final("probit/AUROC/noise"), is_final("posterior/train_loss"), is_final("val/NLL"), is_final("map")
    (True, True, False, False)
    """
    start, slash, _ = metric.partition("/")
    return bool(slash) and start in (*KINDS, POSTERIOR)


def kinds_in(metrics: Iterable[str]) -> list[str]:
    """The kinds of prediction that were measured, by the names of metrics, in their order.

    >>> kinds_in(["val/NLL", "probit/NLL", "map/NLL", "NLL"])
    ['probit', 'map']
    """
    starts = (name.removesuffix("/NLL") for name in metrics if name.endswith("/NLL"))
    return list(dict.fromkeys(start for start in starts if start in KINDS))
