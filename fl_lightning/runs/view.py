"""The table of runs as the MLflow UI first shows it: GA and LA beside the settings that matter, the best run on top.

MLflow itself shows neither metrics nor params until a user chooses columns. A shared view, which is a tag of the
experiment and a key in the address, chooses them for everybody. It sorts by a metric, because only then does the table
show the runs of a sweep and not the sweep alone.
"""

import json

KEY = "fl_lightning"
TAG = f"mlflow.sharedViewState.{KEY}"
METRICS = ("GA", "LA")
TAGS = ("case", "study", "status")
PARAMS = ("method", "data", "data.alpha", "data.clients", "training.lr", "training.epochs", "method.strength", "seed")


def tags() -> dict[str, str]:
    """The tag of the experiment that holds the view."""
    columns = [f"metrics.`{name}`" for name in METRICS]
    columns += [f"tags.`{name}`" for name in TAGS] + [f"params.`{name}`" for name in PARAMS]
    return {TAG: json.dumps({"selectedColumns": columns, "orderByKey": "metrics.`GA`", "orderByAsc": False})}


def address(experiment: str = "1") -> str:
    """Where the UI shows it, behind the address of the server.

    >>> address()
    '#/experiments/1/runs?viewStateShareKey=fl_lightning'
    """
    return f"#/experiments/{experiment}/runs?viewStateShareKey={KEY}"
