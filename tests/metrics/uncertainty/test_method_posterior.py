"""The posterior that a method itself keeps, against what it was made of, and against a final round."""

import shutil
from dataclasses import replace

import pytest
import torch

from fl_lightning import Uncertainty, configure, experiment, posterior_of
from fl_lightning.data.batches import AllClients
from fl_lightning.errors import UserError
from fl_lightning.loop import Problem, federate, initial
from fl_lightning.method import HasPosterior
from fl_lightning.methods.bayes_admm import BayesADMM
from fl_lightning.methods.ep import EP
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fola import Fola
from fl_lightning.methods.fola_extended import FolaExtended
from fl_lightning.methods.presets import RegMean
from fl_lightning.metrics.uncertainty import method_posterior
from fl_lightning.metrics.uncertainty.posterior import build
from fl_lightning.metrics.uncertainty.sample_curvature import final_round
from fl_lightning.models.task import Weights
from fl_lightning.params import flatten
from fl_lightning.runs.load import measure_posterior
from fl_lightning.runs.open_run import RunOptions
from fl_lightning.training import Federation, Training
from tests.metrics.uncertainty.test_posterior import problem
from tests.metrics.uncertainty.test_runs import SETTINGS

# Nobody moves, so that curvature along the path, of all rounds, is that at the final model.
STILL = Training(lr=1e-300, batch_size=4, epochs=3)
PARTS = (range(16), range(16, 24), range(24, 40))


def ended(method, training=STILL, rounds=2, model="mlp", parts=PARTS):
    """Task, clients and the last record of a small run."""
    task, dataset = problem(model)
    clients = [torch.as_tensor(list(part)) for part in parts]
    *_, last = federate(method, Problem(task, dataset, clients), training, Federation(rounds=rounds))
    return task, AllClients(dataset, clients, torch.float64), last


def curvature(method, training=STILL, **options):
    task, data, last = ended(method, training, **options)
    kept = method.posterior(last.after.state, last.round, training, [len(one) for one in data])
    return method_posterior.pooled(kept, task, Weights(last.after.state.params, {}), list(data)).curvature


@pytest.mark.parametrize(
    ("settings", "form", "slopes", "parts"),
    [
        ({"fisher": "per_sample"}, "diagonal", "empirical", PARTS),
        ({"fisher": "per_sample", "curvature": "offline"}, "diagonal", "empirical", PARTS),
        ({"curvature_form": "last_layer"}, "last_layer", "exact", PARTS),
        ({"curvature_form": "last_layer", "rest": "diagonal"}, "last_layer", "exact", PARTS),
        ({"curvature_form": "full"}, "full", "exact", PARTS),
        ({"curvature_form": "full", "normalisation": "sum_epochs"}, "full", "exact", PARTS),
        ({"curvature_form": "kron"}, "kron", "exact", [range(40)]),  # of several, a product of sums is kept
        ({"curvature_form": "kron", "slopes": "empirical"}, "kron", "empirical", [range(40)]),
    ],
)
def test_while_nobody_moves_the_running_curvature_is_that_of_a_final_round(settings, form, slopes, parts):
    method = FolaExtended(strength=0, **settings)
    found = curvature(method, parts=parts)
    task, data, last = ended(method, parts=parts)
    expected = final_round(task, Weights(last.after.state.params, {}), list(data), form, slopes).curvature
    assert method_posterior.form_of(last.after.state.posterior) == form
    assert set(found) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("round_scaling", ["paper", "code"])
@pytest.mark.parametrize("normalisation", ["mean", "sum_epochs", "sum_steps"])
def test_however_a_fisher_is_summed_its_curvature_is_that_of_a_sample(normalisation, round_scaling):
    """Batches of one sample: the squares of minibatches are those of samples."""
    method = FolaExtended(strength=0, normalisation=normalisation, round_scaling=round_scaling)
    parts = [range(20), range(20, 40)]
    found = curvature(method, replace(STILL, batch_size=1), parts=parts)
    usual = curvature(Fola(strength=0, fisher="per_sample"), replace(STILL, batch_size=1), parts=parts)
    for name, value in usual.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-14)


def test_minibatches_count_as_many_times_as_they_have_samples():
    """Whose gradients are independent: for these, E[g_B^2] = E[g^2] / B when their mean is zero."""
    generator = torch.Generator().manual_seed(0)
    gradients = torch.randn(200_000, 4, generator=generator, dtype=torch.float64)
    gradients -= gradients.mean((0, 1))
    batches = gradients.mean(1).square().mean()
    scale = FolaExtended()._form.per_sample(Training(batch_size=4), [800, 400, 0])
    assert float(batches * scale) == pytest.approx(float(gradients.square().mean()), rel=0.02)


@pytest.mark.parametrize(
    "settings", [{}, {"fisher": "per_sample"}, {"curvature": "offline"}, {"curvature_form": "full"}], ids=str
)
def test_fola_counts_its_curvature_as_the_extended_method_does(settings):
    params, training, sizes = {"w": torch.ones(3)}, Training(batch_size=4, epochs=3), [9, 4, 0]
    scales = {
        cls: method.posterior(method.init(params, 3), 2, training, sizes).scale
        for cls in (Fola, FolaExtended)
        for method in [cls(**settings)]
    }
    assert scales[Fola] == scales[FolaExtended] == (13 / 4 if settings in ({}, {"curvature": "offline"}) else 1)


@pytest.mark.parametrize("method", [EP(), EP(memory="sep", prior=0.5), EP(inference="vi", prior=0.1), BayesADMM()])
def test_the_posterior_of_expectation_propagation_is_taken_as_it_stands(method):
    training = Training(lr=0.05, batch_size=8)
    task, data, last = ended(method, training)
    state = last.after.state
    kept = method.posterior(state, last.round, training, [len(one) for one in data])
    weights = Weights(state.params, {})
    pooled = method_posterior.pooled(kept, task, weights, list(data))
    posterior = build(task, weights, "diagonal", pooled, data[0].fetch(data[0].indices[:1])[0])
    precisions = posterior.with_prior(method.prior).precisions()
    flat = torch.cat([torch.cat([p[:, :-1].flatten(), p[:, -1]]) for p in precisions])
    torch.testing.assert_close(flat, flatten(state.precision), rtol=1e-12, atol=1e-12)
    assert bool((flat > method.prior).any())


OWN = {"uncertainty.final_round": True, "uncertainty.source": "running", "uncertainty.form": "diagonal"}


@pytest.fixture(scope="module")
def out(tmp_path_factory, empty_store):
    folder = tmp_path_factory.mktemp("own")
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder


@pytest.mark.slow
def test_a_run_and_what_is_measured_after_it_agree(out):
    fola = SETTINGS | {"method": "fola"}
    during = experiment.run(configure(fola | OWN), out)
    after = measure_posterior(experiment.run(configure(fola), out), Uncertainty(source="running", form="diagonal"))
    for name in ("probit/NLL", "posterior/prior_precision", "posterior/log_marginal_likelihood", "probit/AUROC/noise"):
        assert during.final[name] == after.final[name]
    assert after.tags["uncertainty"] == "diagonal, source running, prior precision auto"
    assert posterior_of(during).source == "running"
    usual = posterior_of(during, Uncertainty(form="diagonal"))
    assert usual.source == "final_round"
    assert not torch.allclose(usual.blocks[0].spectrum, posterior_of(during).blocks[0].spectrum)


@pytest.mark.slow
def test_the_prior_of_expectation_propagation_is_its_own_unless_another_is_asked_for(out):
    settings = SETTINGS | {"method": "ep", "method.prior": 0.25} | OWN | {"uncertainty.source": "ep"}
    result = experiment.run(configure(settings), out)
    assert posterior_of(result).prior_precision == 0.25
    assert "posterior/log_marginal_likelihood" not in result.final
    other = posterior_of(result, Uncertainty(source="ep", form="diagonal", prior_precision=7.0))
    assert other.prior_precision == 7.0
    torch.testing.assert_close(other.blocks[0].spectrum, posterior_of(result).blocks[0].spectrum)


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (FedAvg(), {"source": "running"}, "keeps curvature over the rounds, as fola does, got mine; use final_round"),
        (EP(), {"source": "running"}, "got mine; use --uncertainty.source ep, or final_round"),
        (Fola(), {"source": "ep"}, "got mine; use --uncertainty.source running, or final_round"),
        (Fola(), {"source": "running"}, "in which mine keeps its precision, diagonal, got --uncertainty.form kron"),
        (RegMean(), {"source": "running"}, "does not support the precision of mine"),
        (
            FolaExtended(curvature_form="kron", first_layer="average"),
            {"source": "running"},
            "does not support the precision of mine",
        ),
        (EP(), {"source": "ep", "form": "diagonal", "prior_precision": "marglik"}, "a prior around 0"),
    ],
)
def test_sources_that_a_method_does_not_have(method, settings, message):
    task, dataset = problem()
    state = initial(method, task, 2, dataset).state
    kept = method.posterior(state, 1, Training(), [4, 4]) if isinstance(method, HasPosterior) else None
    with pytest.raises(UserError) as caught:
        method_posterior.check("mine", kept, Uncertainty(**settings))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_source_is_refused_before_training_and_without_a_checkpoint(out):
    with pytest.raises(UserError, match="got fedavg; use final_round"):
        experiment.check(configure(SETTINGS | OWN))
    with pytest.raises(UserError, match="goes with the source final_round, got running"):
        Uncertainty(source="running", form="diagonal", slopes="empirical")
    config = configure(SETTINGS | {"method": "fola", "seed": 7})
    outputs = RunOptions(checkpoint=False, model=True)
    kept = experiment.complete(config, out, outputs)
    with pytest.raises(UserError, match="got its model alone, as sweeps keep"):
        posterior_of(kept, Uncertainty(source="running", form="diagonal"))
