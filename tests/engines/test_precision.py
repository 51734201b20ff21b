"""Mixed precision: the network in shorter numbers, everything else as it was."""

import pytest
import torch

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.errors import UserError
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.methods.fedprox import FedProx
from fl_lightning.methods.fola import Fola
from fl_lightning.models.task import Task
from fl_lightning.params import flatten
from fl_lightning.runs.config.compute import Compute
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import problem_of
from fl_lightning.system import trees
from tests.engines.test_user_module import Plain
from tests.optimisers.test_base import Noisy, with_optimiser
from tests.support.cases import equal_bits, final, largest_difference, network, ragged

ENGINES = {"loop": Functional(chunk=1), "vmap": Functional(chunk=4), "lightning": Lightning()}


def records(method, engine, mixed, **changes):
    case = ragged(torch.float32).changed(rounds=2, **changes)
    return case.go_on(method, task=Task(network(torch.float32), mixed=mixed), engine=engine)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("method", [FedProx(mu=0.3), Fola(strength=1), Fola(strength=1, fisher="per_sample")])
def test_bf16_is_near_float32_and_everything_that_is_kept_is_float32(method, engine):
    full, short = final(records(method, engine, None)), records(method, engine, torch.bfloat16)
    difference = largest_difference(full, final(short))
    assert 1e-6 < difference < 0.02
    for record in short:
        assert {value.dtype for value in flatten_all(record)} == {torch.float32}


def flatten_all(record):
    leaves = trees.leaves((record.after.state, record.reports))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def test_engines_agree_in_bf16_up_to_its_rounding():
    loop = final(records(Fola(strength=1), ENGINES["loop"], torch.bfloat16))
    for engine in ("lightning", "vmap"):
        assert largest_difference(loop, final(records(Fola(strength=1), ENGINES[engine], torch.bfloat16))) < 0.01


def test_a_module_of_ones_own_trains_in_bf16_alike():
    case = ragged(torch.float32).changed(rounds=2)
    tasks = [Task.of(Plain().float(), mixed=torch.bfloat16) for _ in range(2)]
    found = [final(case.go_on(FedAvg(), task=t, engine=e)) for t, e in zip(tasks, (None, Lightning()), strict=True)]
    assert largest_difference(*found) < 1e-6
    plain = final(case.go_on(FedAvg(), task=Task.of(Plain().float())))
    assert largest_difference(found[0], plain) > 1e-6


class Halved(Lightning):
    """float16 with scaled losses on a CPU, too."""

    scale = 2.0**16

    def scaler(self, task):
        return torch.amp.GradScaler("cpu", init_scale=self.scale)


class Overflowing(Halved):
    scale = 2.0**60


@pytest.mark.parametrize("method", [FedProx(mu=0.3), Fola(strength=1)], ids=["fedprox", "fola"])
@pytest.mark.parametrize("clip_norm", [None, 0.3])
def test_scaled_gradients_are_unscaled_before_anybody_sees_them(method, clip_norm):
    full = records(method, Functional(chunk=1), None, clip_norm=clip_norm)
    short = records(method, Halved(), torch.float16, clip_norm=clip_norm)
    assert 1e-7 < largest_difference(final(full), final(short)) < 0.01
    if isinstance(method, Fola):
        ours, theirs = (flatten(r[-1].after.state.posterior.precision) for r in (full, short))
        assert torch.allclose(ours, theirs, rtol=0.05, atol=1e-4)


def test_a_rule_of_the_methods_own_sees_unscaled_gradients():
    method, _ = with_optimiser(FedAvg(), Noisy)
    full, short = (records(method, e, m) for e, m in ((Functional(chunk=1), None), (Halved(), torch.float16)))
    assert 1e-7 < largest_difference(final(full), final(short)) < 0.01


def test_a_step_that_overflows_is_neither_taken_nor_observed():
    """The loss is scaled by 2^60 at first, then by half of that after every step that was not taken."""
    case = ragged(torch.float32).changed(rounds=1, epochs=1)
    task = Task(network(torch.float32), mixed=torch.float16)
    record = case.go_on(Fola(), task=task, engine=Overflowing())[0]
    assert equal_bits(record.after.state.params, task.initial.params)
    assert float(flatten(record.after.state.posterior.precision).abs().max()) == 0


def test_refusals():
    with pytest.raises(UserError, match=r"16-mixed is for a GPU.*use --compute.precision bf16-mixed"):
        _ = Compute(device="cpu", precision="16-mixed").mixed
    with pytest.raises(UserError, match="use --engine lightning, or bf16-mixed"):
        records(FedAvg(), Functional(), torch.float16)
    with pytest.raises(UserError, match=r"takes logger.*got 'precision'; give the model another type"):
        Lightning(trainer={"precision": 16})
    with pytest.raises(UserError, match=r"got 'max_epochs'; set Training\(epochs=...\)"):
        Lightning(trainer={"max_epochs": 3})


def test_the_setting_reaches_the_task():
    problem = problem_of(configure({"compute.precision": "bf16-mixed", "compute.device": "cpu", "data.clients": 2}))
    assert (problem.task.mixed, problem.task.dtype) == (torch.bfloat16, torch.float32)
