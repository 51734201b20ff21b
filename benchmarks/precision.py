"""What bf16-mixed does to the speed of a training step, and to its gradient."""

import time
from copy import deepcopy
from statistics import median

import torch

from benchmarks.table import Row
from benchmarks.works import Work
from fl_lightning.models.task import Task

STEPS = 4  # the first of which is not counted


def measure_precision(work: Work) -> list[Row]:
    """CPU time of a step against float32, and how far apart the two gradients are."""
    seconds, grads = {}, {}
    x, y = work.dataset.train_x[:32], work.dataset.train_y[:32]
    for mixed in (None, torch.bfloat16):
        task, times = Task(deepcopy(work.model), mixed=mixed), []
        task.model.train()
        for _ in range(STEPS):
            start = time.process_time()
            found = torch.autograd.grad(task.batch_loss(x, y), list(task.model.parameters()))
            times.append(time.process_time() - start)
        seconds[mixed], grads[mixed] = median(times[1:]), torch.cat([g.flatten() for g in found])
    full, short = grads[None], grads[torch.bfloat16]
    return [
        Row(work.name, "step: bf16-mixed / float32", seconds[torch.bfloat16] / seconds[None], "x"),
        Row(work.name, "gradient: distance / length", 100 * float((short - full).norm() / full.norm()), "%"),
    ]
