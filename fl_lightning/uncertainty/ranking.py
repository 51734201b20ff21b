"""Whether uncertainty sorts: errors from hits (risk and coverage), strange inputs from known ones (AUROC, AUPR, FPR95).

AURC  = mean over k = 1 .. n of the error among the k most confident (Geifman and El-Yaniv 2017)
E-AURC = AURC minus that of an oracle which is least confident where it is wrong
AUROC = P(score of an outlier > score of an inlier) + 1/2 P(equal), by ranks
AUPR  = sum over thresholds of (recall - recall before) precision, outliers being what is looked for
FPR95 = share of inliers that pass for outliers at the threshold that finds 95 % of these
"""

import torch
from torch import Tensor

RECALL = 0.95


def risk_coverage(confidence: Tensor, hits: Tensor) -> Tensor:
    """The error among the k most confident samples, for every k from 1 to n.

    Among equally confident samples no order is better than another: each counts with their mean error.
    """
    order = confidence.double().argsort(descending=True, stable=True)
    errors = 1 - hits.double()[order]
    _, group = torch.unique_consecutive(confidence[order], return_inverse=True)
    size = torch.bincount(group).double()
    errors = (torch.bincount(group, errors) / size)[group]
    return errors.cumsum(0) / torch.arange(1, len(errors) + 1, dtype=torch.float64, device=errors.device)


def selective(confidence: Tensor, hits: Tensor) -> dict[str, float]:
    """AURC and E-AURC."""
    area = float(risk_coverage(confidence, hits).mean())
    return {"AURC": area, "E_AURC": area - float(risk_coverage(hits, hits).mean())}


def detection(inside: Tensor, outside: Tensor) -> dict[str, float]:
    """How well a score tells strange inputs, for which it should be large, from known ones."""
    score = torch.cat([inside, outside]).double()
    strange = torch.cat([torch.zeros_like(inside), torch.ones_like(outside)]).double()
    # Thresholds from high to low; equal scores are passed at once.
    order = score.argsort(descending=True, stable=True)
    _, counts = torch.unique_consecutive(score[order], return_counts=True)
    last = counts.cumsum(0) - 1
    found, false = strange[order].cumsum(0)[last], (1 - strange[order]).cumsum(0)[last]
    recall, alarm = found / len(outside), false / len(inside)
    found_before = torch.cat([found.new_zeros(1), found[:-1]])
    false_before = torch.cat([false.new_zeros(1), false[:-1]])
    return {
        # Counts, which are exact, until the last division.
        "AUROC": float(((false - false_before) * (found + found_before)).sum()) / (2 * len(inside) * len(outside)),
        "AUPR": float(((found - found_before) * found / (found + false)).sum()) / len(outside),
        "FPR95": float(alarm[recall >= RECALL][0]),
    }
