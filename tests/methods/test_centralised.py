"""Centralised training: plain SGD on everybody's data, whatever the split."""

import pytest
import torch

from fl_lightning import streams
from fl_lightning.loop import federate
from fl_lightning.metrics.round_metrics import measure
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import problem_of

SETTINGS = {
    "method": "centralised",
    "data": "digits",
    "data.subset": 0.3,
    "data.clients": 5,
    "model": "softmax",
    "training.lr": 0.1,
    "training.epochs": 2,
    "federation.rounds": 3,
    "engine": "functional",
    "compute.precision": "float64",
}


def records(**changes):
    config = configure({**SETTINGS, **{key.replace("__", "."): value for key, value in changes.items()}})
    problem = problem_of(config)
    rounds = federate(config.method, problem, config.training, config.federation, config.engine)
    return config, problem.task, problem.dataset, list(rounds)


def models(**changes):
    return [record.after.state.params for record in records(**changes)[3]]


@pytest.mark.parametrize("changes", [{"data__alpha": 100.0}, {"data__clients": 1}, {"data__partition": "iid"}])
def test_the_split_does_not_matter(changes):
    for one, other in zip(models(data__alpha=0.05), models(**changes), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_it_is_sgd_on_everything():
    config, task, dataset, rounds = records()
    everything = torch.cat(list(problem_of(config).clients)).sort().values
    weight = {name: value.clone() for name, value in task.initial.params.items()}
    for record in rounds:
        for epoch in range(2):
            order = torch.randperm(len(everything), generator=streams.generator(0, "batches", record.round, 0, epoch))
            for batch in torch.split(everything[order], 32):
                x = dataset.train_x[batch].double().flatten(1)
                leaves = {name: value.requires_grad_() for name, value in weight.items()}
                (w,) = (v for v in leaves.values() if v.dim() == 2)
                (b,) = (v for v in leaves.values() if v.dim() == 1)
                loss = torch.nn.functional.cross_entropy(x @ w.T + b, dataset.train_y[batch])
                grads = torch.autograd.grad(loss, list(leaves.values()))
                weight = {n: (v - 0.1 * g).detach() for (n, v), g in zip(leaves.items(), grads, strict=True)}
        for name, value in record.after.state.params.items():
            torch.testing.assert_close(value, weight[name], rtol=1e-10, atol=1e-12)


def test_the_budget_is_that_of_the_others():
    for fraction in (1.0, 0.5):
        mine = records(federation__fraction=fraction)[3]
        others = records(method="fedavg", federation__fraction=fraction)[3]
        assert [r.gradient_evaluations for r in mine] == [r.gradient_evaluations for r in others]


def test_one_model_one_number_and_no_traffic():
    config, task, dataset, rounds = records()
    metrics = measure(config.method, task, dataset, rounds[-1]).metrics
    assert metrics["GA"] == metrics["LA"] > 0.7
    assert metrics["bytes_up"] == metrics["bytes_down"] == 0
