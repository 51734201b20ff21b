"""Methods on parts of a network: they see parameters, and fewer of them."""

from itertools import product
from math import isfinite

import pytest
import torch

from fl_lightning import configure, experiment, load_model, posterior_of
from fl_lightning.gaussian.blocks import Blocks
from fl_lightning.runs import checkpoint
from fl_lightning.runs.problem import problem_of

SETTINGS = {
    **{"engine": "functional", "data.clients": 3, "federation.rounds": 2, "data.subset": 0.2, "data.test_subset": 0.2},
    **{"model.hidden": [8, 6], "model.lora.rank": 2, "training.lr": 0.05, "evaluation.local": False},
}
FORMS = {
    "diagonal": {"method": "fola"},
    "full": {"method": "fola", "method.curvature_form": "full"},
    "inputs": {"method": "fola_extended", "method.curvature_form": "inputs", "method.strength": 0},
    "kron": {"method": "fola_extended", "method.curvature_form": "kron", "method.cavity": True},
}

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("form", "train"), [*product(FORMS, ["head", "last:2", "lora"]), ("diagonal", "bias"), ("full", "bias")]
)
def test_precisions_are_over_the_part_alone(out, form, train):
    config = configure({**SETTINGS, **FORMS[form], "model.train": train})
    result = experiment.run(config, out)
    assert isfinite(result.final["NLL"])
    params = problem_of(config).task.initial.params
    saved = checkpoint.read_parts(result.folder)
    assert list(saved.params) == list(params)
    assert set(saved.posterior.mean) == set(params)
    if isinstance(saved.posterior, Blocks) and train == "lora":  # B of each adapter is a layer
        assert list(saved.posterior.blocks) == list(params)


@pytest.mark.parametrize(
    ("method", "train", "form"),
    [("fola", "head", "kron"), ("fola", "lora", "kron"), ("fola", "bias", "full"), ("fedavg", "lora", "diagonal")],
)
def test_uncertainty_is_that_of_the_part_in_the_whole_network(out, method, train, form):
    settings = {"method": method, "model.train": train, "uncertainty.final_round": True, "uncertainty.form": form}
    config = configure({**SETTINGS, **settings, "data.validation": 0.1})
    result = experiment.run(config, out)
    found, problem = posterior_of(result), problem_of(config)
    assert list(found.weights.params) == list(problem.task.initial.params)
    assert 0 < result.final["probit/NLL"] < 5
    x = problem.dataset.inputs(problem.dataset.test_x[:4], torch.float32)
    with torch.no_grad():
        problem.task.load(found.weights)
        assert torch.allclose(problem.task.model.eval()(x), load_model(result)(x), atol=1e-6)
