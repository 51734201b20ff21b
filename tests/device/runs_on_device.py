"""What the files here have in common: a problem on the device and on the CPU, and how their numbers are compared."""

import torch

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.models.task import Task
from fl_lightning.system import trees
from tests.support.cases import ragged

DEVICE = "sim"
ENGINES = {"loop": Functional(chunk=1), "vmap": Functional(chunk=4), "lightning": Lightning()}


def records(method, engine, device, case=None, **changes):
    """Two rounds on a device; all tensors of the server must be there."""
    case = (case or ragged()).changed(**{"rounds": 2, **changes})
    task = Task(case.task().model.to(device), case.dataset.likelihood)
    found = case.go_on(method, task=task, engine=engine)
    for record in found:
        stray = {leaf.device.type for leaf in trees.leaves(record.after.state) if isinstance(leaf, torch.Tensor)}
        assert stray <= {device}, f"the server's state is on {stray}"
    return found


def same_numbers(method, engine, case=None, tolerance=0.0, **changes):
    """The device's models after each round are the CPU's."""
    expected, found = (records(method, engine, device, case, **changes) for device in ("cpu", DEVICE))
    for here, there in zip(expected, found, strict=True):
        for name, value in here.after.state.params.items():
            gap = float((value - there.after.state.params[name].cpu()).abs().max())
            assert gap <= tolerance, f"{name} differs by {gap:.1g} in round {here.round}"
    return expected, found
