"""The paper's claims, one by one, against runs: what it says, what came out, and by which rule that is a yes or a no.

    from analysis import claims
    for checked in claims.check(parts("runs")):
        print(claims.markdown(checked))

A claim is checked where the store has its study. It has several parts, each a comparison of means over seeds that is
true or not; confirmed is a claim whose parts are all true, partly confirmed one of which some are. The rules are crude
on purpose: how sure the means are is in the tables.
"""

import textwrap
from collections.abc import Iterable, Iterator, Sequence

import pandas as pd

from analysis import tables
from analysis.claims import federated, laplace
from analysis.claims.claim import Checked, Claim, Finding
from analysis.parts import Part
from fl_lightning.errors import UserError
from fl_lightning.system.text import render

CLAIMS = (
    Claim(
        "first_round",
        "FOLA aggregates better than FedAvg in round 1 when α is small",
        "figure only; FedAvg suffers from a large aggregation error at small α, which FOLA reduces significantly; all "
        "methods perform alike at large α.",
        "mnist_first_round",
        "best_for_alpha_and_clients",
        federated.first_round,
    ),
    Claim(
        "environment",
        "The aggregation error grows as α falls and as N grows",
        "figure only; AE is negatively correlated with α and always increases with N.",
        "mnist_first_round",
        "best_for_alpha_and_clients",
        federated.environment,
    ),
    Claim(
        "convergence_mnist",
        "FOLA converges faster than FedAvg at α = 0.01 (MNIST)",
        "figure only: learning curves for N from 5 to 100, E = 5, lr = 0.01.",
        "mnist_curves",
        "curves_by_clients",
        federated.convergence,
    ),
    Claim(
        "convergence_cifar",
        "FOLA converges faster and higher than all others at α = 0.01 (CIFAR-10)",
        "30 % GA in round 4 and 40 % in round 21, FedAvg in rounds 23 and 73; final GA 48.57 %, FedAvg 42.16, FedCurv "
        "41.31, FedBE 40.02, SCAFFOLD 20.30, FedNova 10.00 % (100 rounds, N = 20, E tuned).",
        "cifar_table",
        "learning_curves",
        federated.convergence,
    ),
    Claim(
        "every_alpha",
        "FOLA is the best for every α (CIFAR-10)",
        "figure only; 48.57 % at α = 0.01, five points above the others; all methods alike at large α.",
        "cifar_heterogeneity",
        "best_for_alpha",
        federated.every_alpha,
    ),
    Claim(
        "ga_and_la",
        "LA and GA are positively correlated over hyperparameters",
        "figure only: a regression line for all methods at α = 0.01.",
        "cifar_epochs",
        "global_against_local",
        federated.ga_and_la,
    ),
    Claim(
        "online_mnist",
        "Online curvature is steadier than offline (MNIST, α = 0.01)",
        "figure only; the curves of the offline method vary dramatically after a few rounds, those of FOLA are smooth.",
        "mnist_curves",
        "curves_by_clients",
        federated.steadiness,
    ),
    Claim(
        "online_cifar",
        "Online curvature is steadier than offline (CIFAR-10, α = 100)",
        "figure only, as above.",
        "ablation_online_offline",
        "online_against_offline",
        federated.steadiness,
    ),
    Claim(
        "prior_and_product",
        "Prior loss and product together beat either alone",
        "figure only; the full framework achieves better performance than a single module.",
        "ablation_prior",
        "prior_and_product",
        federated.prior_and_product,
    ),
    Claim(
        "full_is_best",
        "Full curvature is the best, and nearly at 90 % GA in three rounds",
        "nearly 90 % GA after 3 rounds, while other methods need more than 10.",
        "laplace",
        "curvatures",
        laplace.full_is_best,
    ),
    Claim(
        "laplace_online",
        "Evaluated online, every form of curvature ends better than offline, and is steadier",
        "offline diagonal ends below 83 % GA, worse than FedAvg; for full the difference in GA is very small, LA is "
        "better and steadier online; LA above 80 % for full and below 60 % for the others.",
        "laplace",
        "curvatures",
        laplace.laplace_online,
    ),
    Claim(
        "e_full_is_average",
        "E-full precisions are alike, and their product is close to FedAvg",
        "figure only: cosines near 1, curves close to FedAvg's.",
        "laplace",
        "cosine_of_precisions",
        laplace.e_full_is_average,
    ),
    Claim(
        "diagonal_keeps_differences",
        "Diagonal Fisher keeps the difference between clients, which helps in the first rounds",
        "figure only.",
        "laplace",
        "cosine_of_precisions",
        laplace.diagonal_keeps_differences,
    ),
    Claim(
        "ga_tracks_ae",
        "GA tracks the aggregation error",
        "figure only; the correlation is more pronounced at large α and weakens at small α.",
        "ae_lf",
        "errors_behind_accuracies",
        lambda part: laplace.tracks(part, "GA", "AE"),
    ),
    Claim(
        "la_tracks_lf",
        "LA tracks local forgetting",
        "figure only, as above.",
        "ae_lf",
        "errors_behind_accuracies",
        lambda part: laplace.tracks(part, "LA", "LF"),
    ),
)


def check(parts: Iterable[Part]) -> Iterator[Checked]:
    """Every claim whose study has runs that ended; at several scales of a study, at each of them."""
    known = [part for part in parts if part.study and part.runs["ended"].any()]
    for claim in CLAIMS:
        for part in known:
            if part.study == claim.study:
                try:
                    finding = claim.check(part)
                except (LookupError, UserError):  # a changed study that lacks a case or condition of the claim
                    continue
                if finding.held:
                    yield Checked(claim, part, finding)


def overview(checked: Sequence[Checked]) -> pd.DataFrame:
    """One row per claim."""
    return pd.DataFrame(
        {
            "claim": one.claim.title,
            "runs": origin(one.part),
            "verdict": one.finding.verdict,
        }
        for one in checked
    )


def origin(part: Part) -> str:
    """Study and scale, the data, which at another scale may be others than the claim's, and how many runs."""
    return f"{part.title}; {', '.join(part.runs['data'].unique())}; {len(part.runs)} runs"


def markdown(one: Checked) -> str:
    """A claim as a section of a document."""
    rows = tables.readable(one.finding.table).to_dict("records")
    parts = [f"- {'yes' if true else 'no'}: {text}" for text, true in one.finding.held]
    return "\n".join(
        [
            f"### {one.claim.title}",
            "",
            textwrap.fill(f"The paper: {one.claim.paper}", 120),
            "",
            render([{str(k): str(v) for k, v in row.items()} for row in rows], markdown=True),
            "",
            f"**{one.finding.verdict[0].upper()}{one.finding.verdict[1:]}** ({origin(one.part)}):",
            "",
            *parts,
        ]
    )


__all__ = ["CLAIMS", "Checked", "Claim", "Finding", "check", "markdown", "origin", "overview"]
