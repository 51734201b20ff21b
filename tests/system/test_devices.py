"""What is asked of torch's devices, without one: see tests/device for a simulated one."""

import types

import pytest
import torch

from fl_lightning import streams
from fl_lightning.errors import UserError
from fl_lightning.runs.config.compute import Compute
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.identity import identity
from fl_lightning.runs.problem import problem_of
from fl_lightning.system import devices


def pretend(monkeypatch, kind, **answers):
    """A machine whose accelerator is of this kind, and answers nothing else."""
    module = types.SimpleNamespace(is_available=lambda: True, device_count=lambda: 2, **answers)
    known = torch.get_device_module
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device(kind))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(
        torch, "get_device_module", lambda device: module if torch.device(device).type == kind else known(device)
    )


def test_cuda_is_not_started_by_a_run_on_the_cpu(monkeypatch):
    """Everything that would start it, such as its generators' state, is not there."""
    pretend(monkeypatch, "cuda", is_initialized=lambda: False)
    with streams.global_noise(0, "noise"):
        first = torch.rand(3)
    with streams.global_noise(0, "noise"):
        assert torch.equal(first, torch.rand(3))
    assert devices.named("cpu") == torch.device("cpu")


def test_a_second_gpu_is_taken_by_its_index(monkeypatch):
    pretend(monkeypatch, "cuda")
    assert devices.named("cuda:1") == torch.device("cuda:1")
    with pytest.raises(UserError, match=r"but torch sees only cuda:0, cuda:1 here; use --compute.device cuda:1"):
        devices.named("cuda:2")


def test_a_device_without_float64_is_refused_and_never_chosen(monkeypatch):
    pretend(monkeypatch, "mps")
    assert devices.named("auto") == torch.device("cpu")
    with pytest.raises(UserError, match="'mps', which lacks float64, the type of all sums over clients"):
        devices.named("mps")


def test_mixed_precision_where_there_is_none(monkeypatch):
    pretend(monkeypatch, "xpu")
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda kind: False)
    with pytest.raises(UserError, match=r"compute.precision bf16-mixed is not there on xpu"):
        _ = Compute(device="xpu", precision="bf16-mixed").mixed


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_is_what_the_setting_says(tf32):
    try:
        problem_of(configure({"compute.tf32": tf32, "compute.device": "cpu", "data.clients": 2}))
        assert torch.backends.cuda.matmul.allow_tf32 is tf32
        assert torch.backends.cudnn.allow_tf32 is tf32
    finally:
        Compute().apply()


def test_tf32_is_part_of_an_identity_when_it_is_on():
    plain = identity(configure({}))
    assert identity(configure({"compute.tf32": False})) == plain
    assert identity(configure({"compute.tf32": True})) != plain
