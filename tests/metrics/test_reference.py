"""AE and LF against dense matrices, and references that cannot serve."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from fl_lightning.client_state import Snapshot
from fl_lightning.curvature import full, gauss_newton
from fl_lightning.data.batches import ClientData
from fl_lightning.errors import UserError
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola
from fl_lightning.metrics.round_metrics import measure
from fl_lightning.metrics.settings import Probe
from fl_lightning.params import flatten
from fl_lightning.runs import checkpoint
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.identity import identity
from fl_lightning.runs.saved_model import load_reference
from tests.support.cases import equal_bits, ragged


def softmax_case():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ragged()._replace(model=nn.Linear(5, 3).double())


def saved(case, method, folder: Path) -> Snapshot:
    snapshot = case.run(method)[-1].after
    checkpoint.write(folder, "identity", snapshot)
    return snapshot


def loaded(case, folder, precision="pooled_hessian"):
    return load_reference(Probe(str(folder), precision), case.task(), case.dataset, case.clients)


def other_model(params, seed=0):
    stream = torch.Generator().manual_seed(seed)
    return {k: v + torch.randn(v.shape, generator=stream, dtype=v.dtype) for k, v in params.items()}


@pytest.mark.parametrize("make", [softmax_case, ragged])
def test_the_distance_is_the_quadratic_form_of_the_pooled_curvature(make, tmp_path):
    case = make()
    mean = saved(case, FedAvg(), tmp_path).state.params
    found = loaded(case, tmp_path)
    task = case.task()
    places = torch.cat(case.clients)
    data = ClientData(0, case.dataset, places, torch.float64)
    weights = task.initial._replace(params=mean)
    if make is softmax_case:
        matrix = full.at(task, weights, data)  # its Hessian
    else:
        matrix = gauss_newton.matrix(task, weights, case.dataset.train_x[places], case.dataset.train_y[places])
    models = [other_model(mean, seed) for seed in range(3)]
    offsets = [flatten(model) - flatten(mean) for model in models]
    expected = [float(0.5 * offset @ matrix @ offset) for offset in offsets]
    assert found.distances(models) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("precision", ["pooled_hessian", "run"])
def test_the_reference_itself_is_at_distance_zero_and_nothing_is_below(precision, tmp_path):
    case = softmax_case()
    mean = saved(case, Fola(curvature_form="full", strength=0.0), tmp_path).state.params
    found = loaded(case, tmp_path, precision)
    assert found.distances([mean]) == [0.0]
    assert all(d > 0 for d in found.distances([other_model(mean, seed) for seed in range(5)]))


def test_one_vector_for_all_classes_does_not_count(tmp_path):
    """Predictions do not change, and neither does the distance; a plain norm would."""
    case = softmax_case()
    mean = saved(case, FedAvg(), tmp_path).state.params
    model = other_model(mean)
    gauge = {"weight": model["weight"] + torch.linspace(-3, 3, 5, dtype=torch.float64), "bias": model["bias"] + 7}
    near, far = loaded(case, tmp_path).distances([model, gauge])
    assert near == pytest.approx(far, rel=1e-12)


@pytest.mark.parametrize("form", ["diagonal", "full"])
def test_the_precision_that_the_run_kept(form, tmp_path):
    case = softmax_case()
    state = saved(case, Fola(curvature_form=form, strength=0.0), tmp_path).state
    model = other_model(state.params)
    offset = flatten(model) - flatten(state.params)
    matrix = state.posterior.matrix if form == "full" else flatten(state.posterior.precision).diag()
    assert loaded(case, tmp_path, "run").distances([model]) == pytest.approx([float(0.5 * offset @ matrix @ offset)])


def test_ae_and_lf_are_measured_in_every_round(tmp_path):
    case, method = softmax_case(), Fola(strength=0.0)
    saved(case, method, tmp_path)
    found = loaded(case, tmp_path)
    records = case.run(method)
    for record in records:
        measured = measure(method, case.task(), case.dataset, record, found)
        clients = found.distances([result.local.params for result in record.clients])
        assert measured.metrics["AE"] == pytest.approx(found.distances([record.after.state.params])[0])
        assert measured.metrics["LF"] == pytest.approx(
            sum(w * d for w, d in zip(record.cohort.weights, clients, strict=True))
        )
        assert measured.clients["distance"] == pytest.approx(clients)
    assert measured.metrics["AE"] == 0  # the reference is this run's own end
    assert "AE" not in measure(method, case.task(), case.dataset, record).metrics


def test_clients_that_have_not_moved_forget_nothing(tmp_path):
    case = softmax_case()
    mean = saved(case, FedAvg(), tmp_path).state.params
    case.model.load_state_dict(mean)
    record = case.run(FedAvg(), lr=0.0, rounds=1)[0]
    measured = measure(FedAvg(), case.task(), case.dataset, record, loaded(case, tmp_path))
    assert measured.metrics["LF"] == 0


def test_the_model_of_a_checkpoint_is_read_without_knowing_its_method(tmp_path):
    case = ragged()
    snapshot = saved(case, Fola(), tmp_path)
    found = checkpoint.read_parts(tmp_path)
    assert found.params.keys() == snapshot.state.params.keys()
    assert all(torch.equal(found.params[k], v) for k, v in snapshot.state.params.items())
    assert isinstance(found.posterior, Diagonal)
    assert equal_bits(found.posterior.mean, snapshot.state.params)
    assert equal_bits(found.posterior.precision, snapshot.state.posterior.precision)
    assert checkpoint.identity_of(tmp_path) == "identity after round 3"


def test_references_that_cannot_serve_are_refused(tmp_path):
    case = softmax_case()
    with pytest.raises(UserError, match="there is no such folder"):
        loaded(case, tmp_path / "nowhere")
    with pytest.raises(UserError, match="there is no checkpoint in it"):
        loaded(case, tmp_path)
    saved(ragged(), FedAvg(), tmp_path)
    with pytest.raises(UserError, match=r"another model or of data of another shape: expected weight \[3, 5\]"):
        loaded(case, tmp_path)
    saved(case, FedAvg(), tmp_path)
    with pytest.raises(UserError, match="keeps no precision"):
        loaded(case, tmp_path, "run")
    path = tmp_path / checkpoint.CURRENT
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="is damaged"):
        loaded(case, tmp_path)
    with pytest.raises(UserError, match="is damaged"):
        checkpoint.identity_of(tmp_path)
    with pytest.raises(UserError, match="needs a reference"):
        Probe(reference_precision="run")
    with pytest.raises(UserError, match="at least 1"):
        Probe(ridge_rounds=(0,))
    assert load_reference(Probe(), case.task(), case.dataset, case.clients) is None


def test_a_run_s_identity_knows_its_reference_by_content(tmp_path):
    here, there, elsewhere = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    for folder in (here, there, elsewhere):
        folder.mkdir()
    case = softmax_case()
    snapshot = saved(case, FedAvg(), here)
    checkpoint.write(there, "identity", snapshot)
    checkpoint.write(elsewhere, "another identity", snapshot)
    plain = configure({})
    probed = [identity(configure({"probe.reference": str(folder)})) for folder in (here, there, elsewhere)]
    assert probed[0] == probed[1] != probed[2]
    assert identity(plain) not in probed
    assert identity(configure({"probe.ridge_rounds": [1]})) != identity(plain)
    assert identity(configure({"probe.reference": str(here), "probe.reference_precision": "run"})) not in probed
    with pytest.raises(UserError, match="no such folder"):
        _ = identity(configure({"probe.reference": str(tmp_path / "nowhere")}))


def test_without_probes_the_identity_is_that_of_the_other_settings():
    config = configure({"data": "digits", "method": "fedavg"})
    assert identity(replace(config, probe=Probe())) == identity(config)
    assert configure(config.flat()) == config
