"""FOLA with precisions by layers as runs: traffic, checkpoints, references, and settings that are refused."""

import pytest
import torch
from torch import nn

from fl_lightning.errors import UserError
from fl_lightning.loop import initial
from fl_lightning.method import traffic
from fl_lightning.methods.fola_extended import FolaExtended as Fola
from fl_lightning.metrics.settings import Probe
from fl_lightning.models.task import Task
from fl_lightning.runs import checkpoint
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.saved_model import load_reference
from fl_lightning.system import memory
from tests.support.cases import equal_bits, final, ragged
from tests.support.gaussian_references import dense

FORMS = ["inputs", "kron", "last_layer"]


def test_traffic_counts_triangles():
    """The table of docs/fola.md for the paper's MLP: 0.88 d for inputs and 1.19 d for kron beside the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 500), nn.ReLU(), nn.Linear(500, 300), nn.ReLU(), nn.Linear(300, 10))
    task = Task(model)
    expected = {"inputs": 0.88, "kron": 1.19}
    for form, share in expected.items():
        posterior = Fola(curvature_form=form)._form.nothing(task.initial.params, task, torch.zeros(1, 784))
        sent = traffic(Fola(), posterior.with_mean({}))
        assert sent / task.num_params == pytest.approx(share, abs=0.005)
    triangles = sum(n * (n + 1) // 2 for n in (785, 501, 301))
    assert traffic(
        Fola(), Fola(curvature_form="inputs")._form.nothing(task.initial.params, task, torch.zeros(1, 784))
    ) == (task.num_params + triangles)
    record = ragged().run(Fola(curvature_form="kron", strength=0.0), rounds=1)[0]
    numbers = ragged().task().num_params + sum(n * (n + 1) // 2 for n in (6, 6, 7, 3))
    assert record.bytes_up == record.bytes_down == 4 * 4 * numbers


@pytest.mark.parametrize("form", ["inputs", "kron", "last_layer", "full"])
def test_every_symmetric_matrix_is_a_triangle(form):
    """Beside the model: of a perceptron, and of a convolution (patches of four pixels, three filters)."""
    torch.manual_seed(0)
    perceptron = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    convolution = nn.Sequential(nn.Conv2d(1, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2))
    sides = {
        "inputs": ((6, 7), (5, 13)),
        "kron": ((6, 6, 7, 3), (5, 3, 13, 2)),
        "last_layer": ((3 * 7,), (2 * 13,)),
        "full": ((57,), (41,)),
    }
    shapes = (1, 5), (1, 1, 3, 3)
    for model, shape, matrices in zip((perceptron, convolution), shapes, sides[form], strict=True):
        task = Task(model)
        posterior = Fola(curvature_form=form).begin(task.initial.params, 2, task, torch.zeros(shape)).posterior
        numbers = sum(n * (n + 1) // 2 for n in matrices)
        assert traffic(Fola(), posterior.with_mean({})) == numbers
        assert traffic(Fola(), posterior) == task.num_params + numbers


@pytest.mark.parametrize("form", FORMS)
def test_a_run_goes_on_from_its_checkpoint_to_the_bit(form, tmp_path):
    case, method = ragged(dtype=torch.float32), Fola(curvature_form=form, strength=0.1)
    records = case.run(method)
    checkpoint.write(tmp_path, "id", records[0].after)
    template = initial(method, case.task(), len(case.clients), case.dataset)
    saved = checkpoint.read(tmp_path, "id", template)
    assert equal_bits(final(case.go_on(method, resume=saved)), final(records))


@pytest.mark.parametrize("form", FORMS)
def test_the_posterior_of_a_saved_run_is_a_reference(form, tmp_path):
    case, method = ragged(), Fola(curvature_form=form, strength=0.0)
    after = case.run(method)[-1].after
    checkpoint.write(tmp_path, "id", after)
    found = load_reference(Probe(str(tmp_path), "run"), case.task(), case.dataset, case.clients)
    other = {name: value + 0.1 for name, value in after.state.params.items()}
    offset = torch.full((case.task().num_params,), 0.1, dtype=torch.float64)
    expected = 0.5 * offset @ dense(after.state.posterior) @ offset
    assert found.distances([other]) == pytest.approx([float(expected)], rel=1e-9)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"slopes": "exact"}, "method.slopes exact is for --method.curvature_form kron, got diagonal"),
        ({"curvature_form": "inputs", "solver": "factored", "strength": 0}, "is for --method.curvature_form kron"),
        ({"curvature_form": "last_layer", "first_layer": "average"}, "inputs or kron, got last_layer"),
        ({"curvature_form": "kron", "rest": "diagonal"}, "is for --method.curvature_form last_layer, got kron"),
        ({"curvature_form": "kron", "damping_place": "denominator"}, "diagonal or e_full, got kron"),
        ({"curvature_form": "kron", "normalisation": "sum_steps"}, "got kron"),
        ({"curvature_form": "kron", "round_scaling": "code"}, "got kron"),
        ({"curvature_form": "inputs", "damping_in_prior": True, "strength": 0}, "got inputs"),
        ({"curvature_form": "inputs", "strength": 100.0}, "sure to diverge .* use --method.strength 0"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings, message):
    with pytest.raises(UserError, match=message) as refusal:
        ragged().run(Fola(**settings))
    assert "\n" not in str(refusal.value)


def test_impossible_damping_is_refused():
    with pytest.raises(UserError, match=r"method\.damping_slopes must be"):
        Fola(damping_slopes=-1.0)
    assert configure({"method": "fola_extended", "method.damping_slopes": None}).method.damping_slopes is None


def test_too_wide_layers_are_refused_with_the_memory_they_would_take(monkeypatch):
    monkeypatch.setattr(memory, "available", lambda device: 1000)
    with pytest.raises(UserError, match=r"curvature_form kron of 57 parameters for 4 clients would take"):
        ragged().run(Fola(curvature_form="kron"))
