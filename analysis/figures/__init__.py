"""One function for every figure of the paper: a table of runs or of rounds in, a matplotlib figure out.

| function | item of the paper |
|---|---|
| `best_for_alpha_and_clients(runs)` | best GA of the first round for each alpha and N |
| `over_hyperparameters(runs)` | GA over lr, E and B |
| `curves_by_clients(rounds)`, `curves_by_alpha(rounds)` | learning curves by N, by alpha |
| `over_epochs(runs)` | GA and LA over E and lambda |
| `best_for_alpha(runs)` | best accuracy for each alpha |
| `winners(runs)` | all methods for each alpha, with intervals |
| `global_against_local(runs)` | correlation of GA and LA |
| `online_against_offline(rounds)`, `prior_and_product(rounds)` | ablations |
| `precision_matrix(matrix)` | the precision of one client |
| `ridge_curves(ridges)` | accuracy along the ridge |
| `cosine_of_precisions(rounds)`, `curvatures(rounds)` | the curvatures over the rounds |
| `errors_behind_accuracies(runs)` | GA against AE, LA against LF |
| `landscape()` | two posteriors in the plane, their ridge, average and product |
| `reliability(curves)`, `risk_coverage(curves)`, `entropies(curves)` | calibration of predictions |
| `partitions(counts)` | classes of the clients |
| `personal_curves(rounds)` | accuracy on the clients' own test sets, before and after local training |
| `learning_curves(rounds)`, `against_bytes(rounds)`, `against_seconds(rounds)` | GA and LA over rounds, traffic, time |

Tables come from `analysis.runs`. A figure is a `Picture`; `remarks` holds what a reader must know about it. A figure
without data shows the reason instead of failing.
"""

from analysis.figures.accuracy import best_for_alpha, best_for_alpha_and_clients, over_epochs, over_hyperparameters
from analysis.figures.calibration import entropies, reliability, risk_coverage
from analysis.figures.correlation import errors_behind_accuracies, global_against_local
from analysis.figures.curves import (
    against_bytes,
    against_seconds,
    curves_by_alpha,
    curves_by_clients,
    learning_curves,
    online_against_offline,
    personal_curves,
    prior_and_product,
)
from analysis.figures.landscape import landscape
from analysis.figures.laplace import cosine_of_precisions, curvatures, precision_matrix, ridge_curves
from analysis.figures.partition import partitions
from analysis.figures.ranking import winners

__all__ = [
    "against_bytes",
    "against_seconds",
    "best_for_alpha",
    "best_for_alpha_and_clients",
    "cosine_of_precisions",
    "curvatures",
    "curves_by_alpha",
    "curves_by_clients",
    "entropies",
    "errors_behind_accuracies",
    "global_against_local",
    "landscape",
    "learning_curves",
    "online_against_offline",
    "over_epochs",
    "over_hyperparameters",
    "partitions",
    "personal_curves",
    "precision_matrix",
    "prior_and_product",
    "reliability",
    "ridge_curves",
    "risk_coverage",
    "winners",
]
