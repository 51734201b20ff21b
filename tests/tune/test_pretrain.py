"""Studies that pretrain: one run in one place, from which all cases and seeds start."""

from dataclasses import replace

import pytest

from fl_lightning.cli.sweep import _counted
from fl_lightning.errors import UserError
from fl_lightning.experiment import check
from fl_lightning.runs.folder import folder_of, read_result
from fl_lightning.runs.identity import identity
from fl_lightning.runs.problem import problem_of
from tune.grid import cells, pretrain_cells, started
from tune.study import Range
from tune.study_file import load
from tune.sweep import Options, sweep

STUDY = """
base:
  {data: digits, data.holdout: 0.3, data.clients: 3, model.hidden: [8], federation.rounds: 1, engine: functional,
   model.new_head: true, model.train: head, data.test_subset: 0.2, data.subset: 0.3, data.validation: 0.1,
   evaluation.local: false}
pretrain: {training.lr: 0.2, federation.rounds: 2}
environments: {data.alpha: [0.1, 1]}
cases: [fedavg, fola]
seeds: 2
"""


@pytest.fixture
def study(tmp_path):
    (tmp_path / "mine.yaml").write_text(STUDY)
    return load(str(tmp_path / "mine.yaml"))


def test_the_server_trains_on_its_own_data_alone(study):
    first, second = pretrain_cells(study)
    assert identity(first.config) == identity(second.config)  # the division among clients does not matter to it
    assert first.config.names["method"] == "centralised"
    assert first.config.model.tuning.train == "all"
    assert first.config.federation.rounds == 2
    held = {cell.configs[0].seed: problem_of(cell.configs[0]).holdout.tolist() for cell in cells(study)}
    of_second_seed = problem_of(cells(study)[0].configs[1])
    assert held[0] == problem_of(first.config).holdout.tolist() == of_second_seed.holdout.tolist()
    assert not {*held[0]} & {int(place) for part in of_second_seed.clients for place in part}


@pytest.mark.slow
def test_all_cases_and_seeds_start_from_one_run(study, out):
    options = Options(out, in_process=True)
    assert [cell.start for cell in started(study, cells(study), out)] == [None] * 4
    seen = []
    found = sweep(study, options, seen.append)
    assert found.failures == {}
    assert found.computed == 1 + 8
    assert {status.best for status in seen if status.total == 1} == {float("-inf")}  # of another metric
    assert _counted(study, found) == "8 runs and 1 run of pretraining on seeds 0 and 1, 9 of them computed now"
    folder = folder_of(pretrain_cells(study)[0].config, out)
    for outcome in found.cells:
        for config in outcome.cell.configs:
            assert config.model.tuning.weights == str(folder)
            assert read_result(folder_of(config, out)).status == "finished"
    assert sweep(study, options, lambda _: None).computed == 0


def test_pretraining_goes_with_settings_that_are_known(study):
    search, space = replace(study.search, algorithm="optuna", samples=3), {"training.lr": Range("grid", (0.1, 0.2))}
    with pytest.raises(UserError, match=r"pretrain goes with search.algorithm grid or random"):
        replace(study, search=search, space=space)


def test_without_data_the_server_is_refused(study):
    alone = replace(study, base={key: value for key, value in study.base.items() if key != "data.holdout"})
    with pytest.raises(UserError, match=r"method.on holdout trains on the server's data.*data.holdout"):
        check(pretrain_cells(alone)[0].config)
