"""Names of metrics are checked before anything is trained."""

import pytest

from fl_lightning import discovery
from fl_lightning.errors import UserError
from fl_lightning.loop import federate
from fl_lightning.metrics.round_metrics import check_metric
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.evaluator import Evaluator
from fl_lightning.runs.problem import problem_of

SMALL = {
    **{"data.clients": 3, "data.holdout": 0.1, "data.subset": 0.1, "data.test_subset": 0.1, "model.hidden": [6]},
    **{"engine": "functional", "federation.rounds": 2, "training.epochs": 2, "training.batch_size": 16},
}


def check(setting, metric, config):
    check_metric(setting, metric, config.classes, config.split.validation)


@pytest.mark.slow
@pytest.mark.parametrize("method", discovery.names("methods"))
def test_what_a_method_measures_is_known(method, tmp_path):
    config = configure({**SMALL, "method": method})
    problem = problem_of(config)
    evaluator = Evaluator(config, problem, tmp_path)
    for record in federate(config.method, problem, config.training, config.federation, config.engine):
        for name in evaluator.evaluate(record).metrics:
            check("stop.metric", name, config)


@pytest.mark.parametrize("method", ["fedavg", "fola"])
@pytest.mark.parametrize("name", ["foo", "own", "GAA"])
def test_other_names_are_refused(method, name):
    with pytest.raises(UserError, match=f"unknown stop.metric '{name}'") as error:
        check("stop.metric", name, configure({"method": method}))
    assert "\n" not in str(error.value)


def test_what_methods_diagnose_is_no_metric_of_one_that_diagnoses_nothing():
    check("metric", "weight_shift", configure({"method": "fola"}))
    with pytest.raises(UserError, match="unknown metric 'weight_shift'"):
        check("metric", "weight_shift", configure({"method": "fedavg"}))
