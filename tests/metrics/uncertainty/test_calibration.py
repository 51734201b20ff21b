"""Calibration and ranking against sklearn and against loops that follow the definitions word by word."""

import math

import pytest
import torch
from sklearn import metrics as sklearn_metrics

from fl_lightning.metrics.uncertainty.calibration import (
    Calibration,
    binned,
    binned_evenly,
    detection,
    risk_coverage,
    selective,
)
from fl_lightning.metrics.uncertainty.prior_precision import best_temperature


def predictions(samples=400, classes=5, sharpness=2.0, seed=0):
    """Logits, and labels that are drawn from their probabilities: perfectly calibrated."""
    stream = torch.Generator().manual_seed(seed)
    logits = sharpness * torch.randn(samples, classes, generator=stream, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(1), 1, generator=stream).squeeze(1)


def ece_by_a_loop(confidence, hits, bins):
    total = 0.0
    for number in range(bins):
        low, high = number / bins, (number + 1) / bins
        mine = [i for i, c in enumerate(confidence) if low < c <= high or (number == 0 and c == 0)]
        if mine:
            gap = sum(hits[i] for i in mine) / len(mine) - sum(confidence[i] for i in mine) / len(mine)
            total += len(mine) / len(confidence) * abs(gap)
    return total


def test_nll_and_brier_are_those_of_sklearn():
    logits, labels = predictions()
    p = logits.softmax(1).numpy()
    found = Calibration.of(logits, labels).metrics()
    assert found["NLL"] == pytest.approx(sklearn_metrics.log_loss(labels, p, labels=range(5)), rel=1e-12)
    expected = sklearn_metrics.brier_score_loss(labels, p, labels=range(5), scale_by_half=False)
    assert found["Brier"] == pytest.approx(expected, rel=1e-12)
    assert found["accuracy"] == sklearn_metrics.accuracy_score(labels, p.argmax(1))


def test_probabilities_of_zero_and_one_are_finite_and_in_the_last_bin():
    found = Calibration.of(torch.tensor([[1000.0, 0.0], [0.0, 1000.0]]), torch.tensor([0, 0]))
    assert found.top.samples.tolist() == [0.0] * 14 + [2.0]
    assert found.metrics()["Brier"] == 1.0
    assert found.metrics()["NLL"] == 500.0


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_ece_is_that_of_a_loop_over_samples_and_bins(bins):
    logits, labels = predictions()
    confidence, guess = logits.softmax(1).max(1)
    found = Calibration.of(logits, labels, bins=bins).metrics()["ECE"]
    assert found == pytest.approx(ece_by_a_loop(confidence.tolist(), (guess == labels).tolist(), bins), abs=1e-12)


def test_classwise_ece_is_the_mean_over_classes_of_a_loop():
    logits, labels = predictions()
    p = logits.softmax(1)
    expected = [ece_by_a_loop(p[:, k].tolist(), (labels == k).tolist(), 15) for k in range(5)]
    found = Calibration.of(logits, labels, by_class=True).metrics()["classwise_ECE"]
    assert found == pytest.approx(sum(expected) / 5, abs=1e-12)


def test_adaptive_bins_hold_equally_many_samples():
    logits, labels = predictions(samples=47)
    confidence, guess = logits.softmax(1).max(1)
    found = binned_evenly(confidence, guess == labels)
    assert sorted(set(found.samples.tolist())) == [3.0, 4.0]
    order = sorted(range(47), key=lambda i: float(confidence[i]))
    sizes = [int(n) for n in found.samples]
    expected, start = 0.0, 0
    for size in sizes:
        mine = order[start : start + size]
        start += size
        expected += abs(sum(float(guess[i] == labels[i]) - float(confidence[i]) for i in mine)) / 47
    assert float(found.error()) == pytest.approx(expected, abs=1e-12)


def test_bins_own_their_upper_edges():
    confidence = torch.arange(1, 16, dtype=torch.float64) / 15
    assert binned(confidence, torch.ones(15)).samples.tolist() == [1.0] * 15


def test_two_half_test_sets_combine_to_the_whole():
    logits, labels = predictions()
    whole = Calibration.of(logits, labels, by_class=True)
    halves = [Calibration.of(logits[part], labels[part], by_class=True) for part in (slice(0, 123), slice(123, None))]
    both = halves[0].plus(halves[1])
    assert both.metrics() == pytest.approx(whole.metrics(), rel=1e-12)
    assert torch.equal(both.top.samples, whole.top.samples)


def test_ece_of_a_calibrated_simulator_is_noise():
    """sum_b |sum of centred Bernoullis| / n: each bin contributes at most sqrt(n_b p (1 - p)) in expectation."""
    logits, labels = predictions(samples=100_000, seed=3)
    found = Calibration.of(logits, labels)
    p = found.top.confidence / found.top.samples.clamp(min=1)
    expected = (found.top.samples * p * (1 - p)).sqrt().sum() * math.sqrt(2 / math.pi) / 100_000
    deviation = (found.top.samples * p * (1 - p)).sum().sqrt() * math.sqrt(1 - 2 / math.pi) / 100_000
    assert abs(float(found.top.error() - expected)) < 3 * float(deviation)
    assert Calibration.of(2 * logits, labels).metrics()["ECE"] > 10 * float(expected)


def test_ece_of_a_constant_predictor_is_the_gap_between_confidence_and_accuracy():
    logits = torch.tensor([0.7, 0.2, 0.1]).log().repeat(10, 1)
    labels = torch.tensor([0] * 4 + [1] * 6)
    assert Calibration.of(logits, labels).metrics()["ECE"] == pytest.approx(0.3, abs=1e-7)


def test_risk_and_coverage_are_those_of_a_double_loop():
    logits, labels = predictions(samples=60)
    confidence, guess = logits.softmax(1).max(1)
    hits = guess == labels
    order = sorted(range(60), key=lambda i: -float(confidence[i]))
    risks = [sum(not hits[i] for i in order[:k]) / k for k in range(1, 61)]
    assert risk_coverage(confidence, hits).tolist() == pytest.approx(risks)
    assert selective(confidence, hits)["AURC"] == pytest.approx(sum(risks) / 60)


def test_aurc_of_a_perfect_ranking_is_the_oracle_and_of_no_ranking_the_error():
    hits = torch.tensor([1, 1, 0, 1, 0]).bool()
    confidence = torch.tensor([0.9, 0.8, 0.2, 0.7, 0.1])
    assert selective(confidence, hits)["E_AURC"] == pytest.approx(0, abs=1e-15)
    oracle = (0 + 0 + 0 + 1 / 4 + 2 / 5) / 5
    assert selective(confidence, hits)["AURC"] == pytest.approx(oracle)
    assert selective(torch.full((5,), 0.5), hits)["AURC"] == pytest.approx(0.4)  # whatever the order of the samples
    assert selective(confidence, torch.ones(5))["AURC"] == 0


def scores(ties):
    stream = torch.Generator().manual_seed(1)
    inside, outside = torch.randn(300, generator=stream), 1 + torch.randn(200, generator=stream)
    return (inside.round(), outside.round()) if ties else (inside, outside)


@pytest.mark.parametrize("ties", [False, True])
def test_detection_is_that_of_sklearn(ties):
    inside, outside = scores(ties)
    truth, score = [0] * 300 + [1] * 200, torch.cat([inside, outside]).numpy()
    found = detection(inside, outside)
    assert found["AUROC"] == pytest.approx(sklearn_metrics.roc_auc_score(truth, score), rel=1e-12)
    assert found["AUPR"] == pytest.approx(sklearn_metrics.average_precision_score(truth, score), rel=1e-12)
    alarm, recall, _ = sklearn_metrics.roc_curve(truth, score, drop_intermediate=False)
    assert found["FPR95"] == pytest.approx(float(alarm[recall >= 0.95].min()))


def test_equal_scores_detect_nothing_and_reversed_ones_the_opposite():
    inside, outside = scores(ties=True)
    assert detection(inside, inside)["AUROC"] == pytest.approx(0.5)
    assert detection(-inside, -outside)["AUROC"] == pytest.approx(1 - detection(inside, outside)["AUROC"])
    assert detection(inside, outside + 100) == {"AUROC": 1.0, "AUPR": 1.0, "FPR95": 0.0}


@pytest.mark.slow
def test_the_temperature_of_calibrated_logits_is_one_and_scaling_is_undone():
    logits, labels = predictions(samples=200_000, seed=5)
    one = best_temperature(logits, labels)
    assert one == pytest.approx(1, abs=0.01)
    for factor in (0.25, 7.0):
        assert best_temperature(factor * logits, labels) == pytest.approx(factor * one, rel=1e-5)


def test_the_temperature_is_the_best_of_a_grid():
    logits, labels = predictions(samples=300)
    logits = 3 * logits
    found = best_temperature(logits, labels)
    nll = {t: float(torch.nn.functional.cross_entropy(logits / t, labels)) for t in (0.98 * found, found, 1.02 * found)}
    assert min(nll, key=nll.get) == found
