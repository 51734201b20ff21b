"""The arrays of laplace.npz against models that are made and scored one by one."""

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning.errors import UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola
from fl_lightning.metrics import ridge_scan
from fl_lightning.metrics.scores import score
from fl_lightning.metrics.settings import Probe
from fl_lightning.models.task import Weights
from fl_lightning.params import flatten, unflatten
from fl_lightning.training import Federation
from tests.support.cases import ragged


def two_clients():
    case = ragged()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return case._replace(model=nn.Linear(5, 3).double(), clients=[case.clients[0], case.clients[3]])


def accuracy(case, params):
    task = case.task()
    return score(task, [Weights(params, {})], case.dataset)[0].accuracy


@pytest.mark.parametrize("form", ["full", "e_full", "diagonal"])
def test_accuracy_along_the_ridge(form):
    case, method = two_clients(), Fola(curvature_form=form, strength=0.0)
    record = case.run(method, rounds=2)[-1]
    found = ridge_scan.measure(method, case.task(), case.dataset, record)
    assert set(found) == {"r2_share", "r2_line", "r2_ridge", "r2_precision"}
    reports = record.reports
    matrices = [r.posterior.matrix if form == "full" else flatten(r.posterior.precision).diag() for r in reports]
    total = sum(w * m for w, m in zip(record.cohort.weights, matrices, strict=True))
    gamma = 0.01 * float(total.diagonal().mean())
    one, two = (m + gamma * torch.eye(18, dtype=torch.float64) for m in matrices)
    like = reports[0].posterior.mean
    mean_one, mean_two = (flatten(r.posterior.mean) for r in reports)
    for share, on_ridge, on_line in zip(found["r2_share"], found["r2_ridge"], found["r2_line"], strict=True):
        left = share * one + (1 - share) * two
        right = share * one @ mean_one + (1 - share) * two @ mean_two
        theta = torch.linalg.solve(left, right)
        assert on_ridge == accuracy(case, unflatten(theta, like))
        assert on_line == accuracy(case, unflatten(share * mean_one + (1 - share) * mean_two, like))
    whole = matrices[0] if form == "full" else flatten(reports[0].posterior.precision) + gamma
    expected = (whole - whole.min()) / (whole.max() - whole.min())
    assert np.allclose(found["r2_precision"], expected.numpy(), atol=1e-3)


def test_methods_without_posteriors_have_the_straight_line_only():
    case = two_clients()
    record = case.run(FedAvg(), rounds=1)[0]
    assert set(ridge_scan.measure(FedAvg(), case.task(), case.dataset, record)) == {"r1_share", "r1_line"}


def test_the_probe_leaves_the_run_alone():
    case, method = two_clients(), Fola(curvature_form="full", strength=0.0)
    record = case.run(method, rounds=1)[0]
    kept = [report.posterior.matrix.clone() for report in record.reports]
    ridge_scan.measure(method, case.task(), case.dataset, record)
    assert all(torch.equal(r.posterior.matrix, k) for r, k in zip(record.reports, kept, strict=True))


def test_arrays_are_added_to_those_of_earlier_rounds(tmp_path):
    ridge_scan.write(tmp_path, {"r1_share": np.arange(3.0)})
    path = ridge_scan.write(tmp_path, {"r10_share": np.arange(4.0)})
    assert path.name == "laplace.npz"
    found = ridge_scan.read(tmp_path)
    assert {name: len(values) for name, values in found.items()} == {"r1_share": 3, "r10_share": 4}
    assert ridge_scan.read(tmp_path / "nowhere") == {}
    assert [p.name for p in tmp_path.iterdir()] == ["laplace.npz"]


def test_what_has_no_ridge_line_is_refused():
    settings = Probe(ridge_rounds=(1, 5))
    ridge_scan.check(settings, Federation(rounds=5), [3, 4, 0])
    ridge_scan.check(Probe(), Federation(), [1] * 7)
    with pytest.raises(UserError, match=r"exactly 2 clients in a round, .* got 7"):
        ridge_scan.check(settings, Federation(), [1] * 7)
    with pytest.raises(UserError, match=r"must lie in 1 to federation.rounds = 4, got 5"):
        ridge_scan.check(settings, Federation(rounds=4), [3, 4])
