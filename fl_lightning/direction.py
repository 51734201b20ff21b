"""Which way a metric is good. What GA, LA and their like stand for is always good if large, whatever the task."""

# Metrics of which less is better, by what their name begins with or, after a slash, goes on with.
SMALLER = (
    *("NLL", "Brier", "ECE", "adaptive_ECE", "classwise_ECE", "AURC", "RMSE", "AE", "LF"),
    *("train_loss", "prior_loss", "bytes", "gradient_evaluations", "seconds"),
)


def sign(metric: str) -> int:
    """1 if more of it is better, -1 if less is: times this, every metric is good if large.

    >>> sign("GA"), sign("R2"), sign("NLL"), sign("RMSE"), sign("probit/ECE"), sign("LA_min")
    (1, 1, -1, -1, -1, 1)
    """
    return -1 if metric.rpartition("/")[2].startswith(SMALLER) else 1
