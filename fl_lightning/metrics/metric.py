"""Every metric that runs measure, how tables and axes show it, and what was measured of a round.

A new metric is a line here and the function that measures it. Metrics that a user's module logs need no line: a word of
their name says which way they are good.
"""

import re
from collections.abc import Iterable, KeysView
from typing import Any, Literal, NamedTuple, get_args

from fl_lightning.errors import UserError, unknown

# The accuracy of the server's model after a round, and the mean of the clients' models before aggregation.
GA, LA = "GA", "LA"
# The server model's accuracy on data that belong to no client and serve only to choose.
VALIDATION = "GA_validation"
# Kinds of prediction, in the order of tables.
Predictive = Literal["map", "temperature", "probit", "glm_mc", "nn", "ensemble"]
KINDS: tuple[str, ...] = get_args(Predictive)
# What is said of the posterior itself.
POSTERIOR = "posterior"
# How often that of a run was measured.
TIMES = "posterior/times_measured"
# In every round; in rounds that evaluation.every names; of every kind of prediction after the final round.
Due = Literal["always", "measured", "final"]


class Metric(NamedTuple):
    """A metric.

    Attributes:
        name: In rounds, files and MLflow.
        due: When it is measured.
        column: The heading in tables; without one, its name.
        axis: Label of an axis; empty if no figure shows it.
        percent: Whether tables and axes show it in percent.
    """

    name: str
    due: Due = "measured"
    column: str = ""
    axis: str = ""
    percent: bool = False

    @property
    def heading(self) -> str:
        """Of its column, with the unit."""
        return f"{self.column or self.name}{' (%)' if self.percent else ''}"


METRICS: tuple[Metric, ...] = (
    Metric(GA, axis="global accuracy (GA, %)", percent=True),
    Metric(LA, axis="local accuracy (LA, %)", percent=True),
    Metric(VALIDATION, percent=True),
    Metric("PA_before", column="PA before", axis="personal accuracy before (PA, %)", percent=True),
    Metric("PA_before_worst", column="worst tenth before", percent=True),
    Metric("PA_before_std", column="spread before", percent=True),
    Metric("PA_after", column="PA after", axis="personal accuracy after (PA, %)", percent=True),
    Metric("PA_after_worst", column="worst tenth after", percent=True),
    Metric("PA_after_std", column="spread after", percent=True),
    Metric("NLL"),
    Metric("Brier"),
    Metric("ECE"),
    Metric("adaptive_ECE", "final", column="adaptive ECE"),
    Metric("classwise_ECE", "final", column="class-wise ECE"),
    Metric("AURC", "final"),
    Metric("AUROC", "final"),
    Metric("AUPR", "final"),
    Metric("FPR95", "final"),
    Metric("RMSE"),
    Metric("F1"),
    Metric("AE", axis="aggregation error (AE)"),
    Metric("LF", axis="local forgetting (LF)"),
    Metric("train_loss", "always"),
    Metric("prior_loss", "always"),
    Metric("bytes_down", "always"),
    Metric("bytes_up", "always"),
    Metric("gradient_evaluations", "always"),
    Metric("seconds", "always"),
    Metric("seconds_local", "always"),
    Metric("seconds_server", "always"),
    Metric("seconds_evaluation", "always"),
)
BY_NAME = {metric.name: metric for metric in METRICS}
PERCENT = frozenset(metric.name for metric in METRICS if metric.percent)
# What axes say of accuracies.
AXES = {metric.name: metric.axis for metric in METRICS if metric.axis and metric.percent}

# Words of a name by which less is better, in small letters. What ends in loss is one of them, too.
SMALLER = frozenset(
    (
        *("nll", "brier", "ece", "aurc", "fpr95", "rmse", "mse", "mae", "error", "errors", "perplexity", "ae", "lf"),
        *("losses", "bytes", "evaluations", "seconds", "idle", "std"),
    )
)
# Words by which more is better.
LARGER = frozenset(("ga", "la", "pa", "accuracy", "acc", "auroc", "auc", "aupr", "f1", "r2", "precision", "recall"))


def sign(metric: str) -> int:
    """1 if more of it is better, -1 if less is: times this, every metric is good if large.

    The first part between slashes that is known decides: what follows may be the name of a user's file.

    >>> sign(GA), sign("R2"), sign("NLL"), sign("RMSE"), sign("probit/ECE"), sign("LA_min")
    (1, 1, -1, -1, -1, 1)
    >>> sign("probit/FPR95/noise"), sign("probit/AUROC/loss"), sign("val/bce_loss"), sign("PA_after_std")
    (-1, 1, -1, -1)
    """
    for part in metric.split("/"):
        words = set(re.split(r"[\W_]+", part.lower()))
        if words & SMALLER or any(word.endswith("loss") for word in words):
            return -1
        if words & LARGER:
            return 1
    return 1


def is_final(metric: str) -> bool:
    """Whether a metric is measured in the final round alone, by its name: `probit/NLL`, `posterior/train_loss`.

    A LightningModule may log names with a slash, too; they are measured in every round.

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


class Measurement(NamedTuple):
    """The numbers of one round.

    Attributes:
        metrics: One value each for the round, by name.
        clients: One value for each member of the cohort, by name; `client` holds the ids.
    """

    metrics: dict[str, float]
    clients: dict[str, list[Any]]

    def __getitem__(self, key: Any) -> Any:
        """A metric by its name, `measurement[GA]`, or a field by its position, as tuples have it."""
        if not isinstance(key, str):
            return tuple.__getitem__(self, key)
        if key not in self.metrics:
            if key in (GA, LA):
                raise UserError(
                    f"{key} was not measured in this round, which evaluation.every or evaluation.local leaves out; ask "
                    f'`"{key}" in measurement` first'
                )
            raise unknown("metric", key, self.metrics)
        return self.metrics[key]

    def __contains__(self, key: object) -> bool:
        """Whether the round has this metric."""
        return key in self.metrics

    def keys(self) -> KeysView[str]:
        """The names of the round's metrics."""
        return self.metrics.keys()
