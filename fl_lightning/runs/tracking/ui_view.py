"""The runs as the MLflow UI first shows them: GA and LA beside the settings that matter, the best run on top.

MLflow itself shows neither metrics nor params in its table until a user chooses columns, and its charts in the order of
the alphabet, with the quantiles of LA before the NLL. A shared view, which is a tag of the experiment and a key in the
address, chooses both for all users. It sorts by a metric, because only then does the table show the runs of a sweep and
not the sweep alone.
"""

import json
from typing import Any

from fl_lightning.metrics.metric import GA, LA

KEY = "fl_lightning"
TAG = f"mlflow.sharedViewState.{KEY}"
METRICS = (GA, LA)
TAGS = ("case", "study", "status")
PARAMS = (
    *("method", "method.strength", "federation.rounds", "data.alpha", "training.lr", "training.epochs"),
    *("data.clients", "data", "seed"),
)
# The charts that come first; MLflow adds those of all other metrics below them.
CHARTS = (GA, LA, "NLL", "train_loss")
SECTION = "results"


def tags() -> dict[str, str]:
    """The tag of the experiment that holds the view."""
    columns = [f"metrics.`{name}`" for name in METRICS]
    columns += [f"tags.`{name}`" for name in TAGS] + [f"params.`{name}`" for name in PARAMS]
    section = {"uuid": SECTION, "name": "Results", "display": True, "isReordered": True, "isGenerated": False}
    view = {
        "selectedColumns": columns,
        "orderByKey": f"metrics.`{GA}`",
        "orderByAsc": False,
        "compareRunCharts": [_chart(name) for name in CHARTS],
        "compareRunSections": [section],
        "isAccordionReordered": True,
    }
    return {TAG: json.dumps(view)}


def address(experiment: str = "1", charts: bool = False) -> str:
    """Where the UI shows it, behind the address of the server.

    >>> address()
    '#/experiments/1/runs?viewStateShareKey=fl_lightning'
    """
    mode = "&compareRunsMode=CHART" if charts else ""
    return f"#/experiments/{experiment}/runs?viewStateShareKey={KEY}{mode}"


def _chart(metric: str) -> dict[str, Any]:
    """A line chart over the rounds, as MLflow's own page describes one."""
    return {
        "type": "LINE",
        "uuid": f"{SECTION}-{metric}",
        "metricSectionId": SECTION,
        "isGenerated": True,
        "deleted": False,
        "metricKey": metric,
        "lineSmoothness": 0,
        "xAxisKey": "step",
        "xAxisScaleType": "linear",
        "scaleType": "linear",
        "range": {},
        "selectedXAxisMetricKey": "",
        "yAxisKey": "metric",
        "yAxisExpressions": [],
        "ignoreOutliers": False,
        "useGlobalXaxisKey": True,
        "useGlobalLineSmoothing": True,
    }
