"""Studies with a reference: it is computed first, for every environment and seed, and the others refer to it."""

from dataclasses import replace

import pytest

from fl_lightning import experiment
from fl_lightning.errors import UserError
from tune.grid import cells, reference_cells
from tune.study_file import load

STUDY = """
base:
  {data: digits, data.subset: 0.2, model: softmax, federation.rounds: 2, engine: functional,
   probe.reference: "@reference"}
environments: {data.alpha: [0.1, 1]}
reference: {method: centralised, federation.rounds: 3}
cases:
  - fedavg
  - {label: again, method: fedavg, federation.start: "@reference", federation.rounds: 1}
seeds: 2
"""


@pytest.fixture
def study(tmp_path):
    (tmp_path / "mine.yaml").write_text(STUDY)
    return load(str(tmp_path / "mine.yaml"))


def test_references_take_their_own_settings_and_refer_to_nothing(study):
    computed = reference_cells(study)
    assert [cell.environment for cell in computed] == [{"data.alpha": 0.1}, {"data.alpha": 1}]
    for cell in computed:
        assert cell.config.names["method"] == "centralised"
        assert cell.config.federation.rounds == 3
        assert all(config.probe.reference is None for config in cell.configs)


@pytest.mark.slow
def test_each_seed_refers_to_the_run_of_its_seed_and_environment(study, out):
    (first, _) = reference_cells(study)
    folders = {config.seed: str(experiment.run(config, out).folder) for config in first.configs}
    plain, again = (replace(cell, references=folders) for cell in cells(study)[:2])
    assert [config.probe.reference for config in plain.configs] == [folders[0], folders[1]]
    assert [config.federation.start for config in again.configs] == [folders[0], folders[1]]
    assert plain.configs[0].federation.start is None
    result = experiment.run(again.configs[0], out)
    assert result.final["LF"] > 0


def test_a_reference_that_is_not_described_is_refused(tmp_path):
    text = "\n".join(line for line in STUDY.splitlines() if not line.startswith("reference"))
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match="no `reference`"):
        load(str(tmp_path / "mine.yaml"))
