"""One function for every figure of the paper: a study in, a matplotlib figure out. `FIGURES` lists them for the report.

Studies come from `analysis.runs`. A figure is a `Picture`: `remarks` says what a reader must know about it. Without
anything to show it says why instead of failing. A new figure is a function in a file of this folder and an entry here.
"""

from analysis import comparisons, run_arrays
from analysis.catalogue import Entry
from analysis.figures.accuracy import (
    LEARNING,
    best_for_alpha,
    best_for_alpha_and_clients,
    over_epochs,
    over_hyperparameters,
    winners,
)
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
from analysis.statistics import MIN_FOR_CORRELATION
from analysis.study import Study

# Cases whose curves hide each other.
MANY = 5


def _has_curvatures(study: Study) -> bool:
    """Whether forms of curvature are compared: of the cases, no two have the same one, evaluated alike."""
    if not study.varies("method.curvature_form"):
        return bool(len(run_arrays.ridges(study).runs))
    named = study.runs.dropna(subset="method.curvature_form")  # other methods have none
    forms = [key for key in ("method.curvature_form", "method.curvature") if key in named]
    return bool(named.groupby(forms, dropna=False)["case"].nunique().max() == 1)


def _compares_evaluations(study: Study) -> bool:
    """Whether online and offline curvature are compared, and nothing else that has curves of its own."""
    return (
        study.lasts
        and study.varies("method.curvature")
        and not study.varies("data.clients")
        and not _has_curvatures(study)
    )


# Curves over the rounds by what a study compares; the plain ones are for a study that fits none of these.
_CURVES = (
    Entry(curves_by_clients, "Learning curves by N", lambda s: s.lasts and s.varies("data.clients")),
    Entry(curves_by_alpha, "Learning curves by α", lambda s: s.lasts and s.varies("data.alpha")),
    Entry(
        prior_and_product,
        "Ablation: product and prior loss",
        lambda s: s.lasts and "method.strength" in comparisons.conditions(s),
    ),
    Entry(online_against_offline, "Ablation: online and offline curvature", _compares_evaluations),
)
_OF_CURVATURES = Entry(curvatures, "GA and LA of the curvatures", lambda s: s.lasts and _has_curvatures(s))

# In the order of the report.
FIGURES = (
    Entry(
        best_for_alpha_and_clients,
        "Best GA for each α and N",
        lambda s: s.varies("data.alpha") and (s.varies("data.clients") or not s.lasts),
    ),
    Entry(best_for_alpha, "Best GA for each α", lambda s: s.varies("data.alpha") and s.lasts),
    Entry(winners, "Best methods for each α", lambda s: s.varies("data.alpha") and s.runs["case"].nunique() >= MANY),
    Entry(over_hyperparameters, "GA over lr, E and B", lambda s: any(map(s.varies, LEARNING))),
    Entry(over_epochs, "GA and LA over E and λ", lambda s: s.varies("training.epochs") and s.lasts),
    *_CURVES,
    Entry(
        learning_curves,
        "Learning curves",
        lambda s: s.lasts and not any(entry.fits(s) for entry in (*_CURVES, _OF_CURVATURES)),
    ),
    Entry(
        personal_curves,
        "Accuracy on the clients' own test sets",
        lambda s: s.lasts and s.measures("PA_after"),
    ),
    _OF_CURVATURES,
    Entry(
        ridge_curves,
        "Accuracy along the ridge between two clients",
        _has_curvatures,
        reads=lambda s: (run_arrays.ridges(s),),
    ),
    Entry(precision_matrix, "The precision of a client", _has_curvatures, reads=run_arrays.precision_matrix),
    Entry(
        cosine_of_precisions,
        "How alike the clients' precisions are",
        lambda s: s.lasts and _has_curvatures(s),
    ),
    Entry(errors_behind_accuracies, "GA and AE, LA and LF", lambda s: s.measures("AE")),
    *(
        Entry(draw, title, lambda s: s.has_final_rounds, reads=lambda s: (run_arrays.trust(s),))
        for draw, title in (
            (reliability, "Reliability"),
            (risk_coverage, "Risk and coverage"),
            (entropies, "Entropies in and out of distribution"),
        )
    ),
    Entry(global_against_local, "GA and LA", lambda s: int(s.runs["ended"].sum()) >= MIN_FOR_CORRELATION),
    Entry(against_bytes, "GA over communication", lambda s: s.lasts),
    Entry(against_seconds, "GA over time", lambda s: s.lasts),
    Entry(partitions, "Samples per client and class", reads=lambda s: (run_arrays.partitions(s),)),
)

__all__ = [
    "FIGURES",
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
