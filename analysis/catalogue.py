"""What a report can hold: every figure and table, when it makes sense, and how it is made."""

from collections.abc import Callable
from typing import NamedTuple

import pandas as pd

from analysis import comparisons, figures, run_arrays, tables
from analysis.runs import Study
from analysis.statistics import MIN_FOR_CORRELATION
from analysis.style import Picture


class Entry(NamedTuple):
    """A figure of the paper: when it makes sense, and how it is drawn."""

    key: str
    title: str
    about: str
    fits: Callable[[Study], bool]
    draw: Callable[[Study], Picture]


def _has_curvatures(study: Study) -> bool:
    """Whether forms of curvature are compared: of the cases, no two have the same one, evaluated alike."""
    if not study.varies("method.curvature_form"):
        return bool(len(run_arrays.ridges(study).runs))
    named = study.runs.dropna(subset="method.curvature_form")  # other methods have none
    forms = [key for key in ("method.curvature_form", "method.curvature") if key in named]
    return bool(named.groupby(forms, dropna=False)["case"].nunique().max() == 1)


# So many curves hide each other.
MANY = 5
_CURVES = ("curves_by_clients", "curves_by_alpha", "prior_and_product", "online_against_offline", "curvatures")
CATALOGUE: tuple[Entry, ...] = (
    Entry(
        "best_for_alpha_and_clients",
        "Best GA for each α and N",
        "The best setting of every method under every condition. Colour is N; FedAvg is solid, FOLA dashed.",
        lambda m: m.varies("data.alpha") and (m.varies("data.clients") or not m.lasts),
        lambda m: figures.best_for_alpha_and_clients(m),
    ),
    Entry(
        "best_for_alpha",
        "Best GA for each α",
        "The best setting of every method, continued to its last round.",
        lambda m: m.varies("data.alpha") and m.lasts,
        lambda m: figures.best_for_alpha(m),
    ),
    Entry(
        "winners",
        "Best methods for each α",
        "Every method at its best setting; colour is α, and the legend names the best. A filled marker is the best, or "
        "has an interval that reaches that of the best. Centralised training does not compete.",
        lambda m: m.varies("data.alpha") and m.runs["case"].nunique() >= MANY,
        lambda m: figures.winners(m),
    ),
    Entry(
        "over_hyperparameters",
        "GA over lr, E and B",
        "Each with the others at their best. Colour is the method, dash is α.",
        lambda m: any(m.varies(key) for key in ("training.lr", "training.epochs", "training.batch_size")),
        lambda m: figures.over_hyperparameters(m),
    ),
    Entry(
        "over_epochs",
        "GA and LA over E and λ",
        "The settings are those of the best GA, also in the panel of LA.",
        lambda m: m.varies("training.epochs") and m.lasts,
        lambda m: figures.over_epochs(m),
    ),
    Entry(
        "curves_by_clients",
        "Learning curves by N",
        "Colour is the method, dash the number of clients.",
        lambda m: m.lasts and m.varies("data.clients"),
        lambda m: figures.curves_by_clients(m),
    ),
    Entry(
        "curves_by_alpha",
        "Learning curves by α",
        "Colour is the method, dash the heterogeneity; every method at its best setting.",
        lambda m: m.lasts and m.varies("data.alpha"),
        lambda m: figures.curves_by_alpha(m),
    ),
    Entry(
        "prior_and_product",
        "Ablation: product and prior loss",
        "Product of posteriors or plain average; dash is the weight λ of the prior loss, and 0 switches it off.",
        lambda m: m.lasts and "method.strength" in comparisons.conditions(m),
        lambda m: figures.prior_and_product(m),
    ),
    Entry(
        "online_against_offline",
        "Ablation: online and offline curvature",
        "The Fisher taken along the local path, or once at its end.",
        lambda m: m.lasts and m.varies("method.curvature") and not m.varies("data.clients") and not _has_curvatures(m),
        lambda m: figures.online_against_offline(m),
    ),
    Entry(
        "learning_curves",
        "Learning curves",
        "GA is the accuracy of the server's model, LA the mean accuracy of the clients' models, on the same test set.",
        lambda m: m.lasts and not any(entry.fits(m) for entry in CATALOGUE if entry.key in _CURVES),
        lambda m: figures.learning_curves(m),
    ),
    Entry(
        "personal_curves",
        "Accuracy on the clients' own test sets",
        "Before local training the server's model is measured, after it each client's own; the mean over clients.",
        lambda m: m.lasts and m.measures("PA_after"),
        lambda m: figures.personal_curves(m),
    ),
    Entry(
        "curvatures",
        "GA and LA of the curvatures",
        "Colour is the form of the curvature, dash how it is evaluated.",
        lambda m: m.lasts and _has_curvatures(m),
        lambda m: figures.curvatures(m),
    ),
    Entry(
        "ridge_curves",
        "Accuracy along the ridge between two clients",
        "From client 2's model to client 1's: along the ridge of their posteriors, or along the straight line.",
        _has_curvatures,
        lambda m: figures.ridge_curves(run_arrays.ridges(m)),
    ),
    Entry(
        "precision_matrix",
        "The precision of a client",
        "What a diagonal leaves out: entries away from the diagonal couple parameters. Scaled to lie between 0 and 1.",
        _has_curvatures,
        lambda m: figures.precision_matrix(*run_arrays.precision_matrix(m)),
    ),
    Entry(
        "cosine_of_precisions",
        "How alike the clients' precisions are",
        "The paper's normalisation decides the answer for full matrices, so both are shown.",
        lambda m: m.lasts and _has_curvatures(m),
        lambda m: figures.cosine_of_precisions(m),
    ),
    Entry(
        "errors_behind_accuracies",
        "GA and AE, LA and LF",
        "Distances from a reference posterior: AE of the server's model, LF of the clients' models.",
        lambda m: m.measures("AE"),
        lambda m: figures.errors_behind_accuracies(m),
    ),
    Entry(
        "reliability",
        "Reliability",
        "Accuracy over confidence; below the diagonal predictions are overconfident, above it they are underconfident.",
        lambda m: m.has_final_rounds,
        lambda m: figures.reliability(run_arrays.trust(m)),
    ),
    Entry(
        "risk_coverage",
        "Risk and coverage",
        "The error among the most confident predictions: low where confidence separates right from wrong.",
        lambda m: m.has_final_rounds,
        lambda m: figures.risk_coverage(run_arrays.trust(m)),
    ),
    Entry(
        "entropies",
        "Entropies in and out of distribution",
        "A calibrated model predicts large entropies for out-of-distribution inputs.",
        lambda m: m.has_final_rounds,
        lambda m: figures.entropies(run_arrays.trust(m)),
    ),
    Entry(
        "global_against_local",
        "GA and LA",
        "One point per run, under equal conditions; lines are least squares.",
        lambda m: int(m.runs["ended"].sum()) >= MIN_FOR_CORRELATION,
        lambda m: figures.global_against_local(m),
    ),
    Entry(
        "against_bytes",
        "GA over traffic",
        "All that server and clients have sent: a method that sends twice as much per round is twice as far right.",
        lambda m: m.lasts,
        lambda m: figures.against_bytes(m),
    ),
    Entry(
        "against_seconds",
        "GA over time",
        "Seconds of training and aggregation on the machine that ran them, which may have been busy. The first round "
        "after a start also loads code and data.",
        lambda m: m.lasts,
        lambda m: figures.against_seconds(m),
    ),
    Entry(
        "partitions",
        "Classes of the clients",
        "The partitions of these runs. The background colour means no samples; a cross marks a client without data.",
        lambda m: True,
        lambda m: figures.partitions(run_arrays.partitions(m)),
    ),
)


class TableEntry(NamedTuple):
    """A table: when it makes sense, how it is made, and whether it is about the best settings alone."""

    key: str
    title: str
    about: str
    fits: Callable[[Study], bool]
    make: Callable[[Study], pd.DataFrame]
    of_chosen: bool = False


TABLES: tuple[TableEntry, ...] = (
    TableEntry(
        "accuracy",
        "GA, LA and rounds to thresholds",
        f"At the best setting of every case. {tables.NOTE}",
        lambda m: True,
        lambda m: tables.accuracy_and_rounds(m),
        of_chosen=True,
    ),
    TableEntry(
        "best",
        "Best settings",
        "If the cases have unequal numbers of settings, compare the expected best of equally many.",
        lambda m: bool(comparisons.tuned(m)),
        lambda m: tables.best_settings(m),
        of_chosen=True,
    ),
    TableEntry(
        "paired",
        "Paired comparison",
        "Differences of GA on equal seeds and partitions, at the best setting of every case; Wilcoxon's signed-rank "
        "test, with Holm's correction for all tests of this table; effect: rank-biserial correlation from -1 to 1.",
        lambda m: True,
        lambda m: tables.paired_comparison(m),
        of_chosen=True,
    ),
    TableEntry(
        "calibration",
        "Calibration",
        "Predictions of the posterior mean (map), and after a final round of all other kinds. ECE has 15 bins of equal "
        "width. AUROC: how well the entropy separates out-of-distribution inputs. T: divisor of the logits in kind "
        "temperature. For NLL, Brier score, ECE and AURC smaller is better.",
        lambda m: m.measures("ECE"),
        lambda m: tables.calibration(m),
        of_chosen=True,
    ),
    TableEntry(
        "detection",
        "Out-of-distribution inputs",
        "How well the entropy of a prediction separates them from the test set. For AUROC and AUPR larger is better, "
        "for FPR95 smaller: the share of the test set above the threshold that finds 95 % of them.",
        lambda m: any(str(name).startswith("map/AUROC/") and m.measures(str(name)) for name in m.runs),
        lambda m: tables.detection(m),
        of_chosen=True,
    ),
    TableEntry(
        "personal",
        "Accuracy on the clients' own test sets",
        "PA before: the server's model as a round begins; after: each client's model after local training. Means over "
        "the clients of the last round; the mean of the worst tenth of them; their standard deviation.",
        lambda m: m.measures("PA_after"),
        lambda m: tables.personal(m),
        of_chosen=True,
    ),
    TableEntry(
        "correlations",
        "Correlations",
        "Over runs; intervals from resampled settings, each with all its seeds.",
        lambda m: True,
        lambda m: tables.correlations(m),
    ),
    TableEntry(
        "costs",
        "What a round costs",
        "Traffic of the server and all clients together; the last GA that each case reaches within the traffic that "
        "all of them use.",
        lambda m: True,
        lambda m: tables.costs(m),
    ),
)
