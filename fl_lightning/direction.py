"""Which way a metric is good. What GA, LA and their like stand for is always good if large, whatever the task."""

import re

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

    >>> sign("GA"), sign("R2"), sign("NLL"), sign("RMSE"), sign("probit/ECE"), sign("LA_min")
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
