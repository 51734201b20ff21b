"""Small files that are damaged, lost, old or another run's: none is believed, none ends in a traceback."""

import json
import random
from contextlib import suppress

import pytest
from mlflow import MlflowClient

from fl_lightning import experiment
from fl_lightning.errors import UserError
from fl_lightning.metrics.metric import Measurement
from fl_lightning.runs import files, rounds_file
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.folder import ATTEMPT, RESULT, Result
from fl_lightning.runs.open_run import RunOptions
from fl_lightning.runs.tracking.store import store_uri
from fl_lightning.runs.tracking.sync import EXPERIMENT
from tests.support.workers import SETTINGS

HISTORY = [Measurement({"GA": 0.8273, "LA": 0.1 + 0.2, "loss": float("nan")}, {"client": [0, 3]})] * 3


def config(**changes):
    return configure({**SETTINGS, **changes})


def saved_result(folder):
    result = Result("finished", "", "run", folder, HISTORY, identity="mine", params={"seed": 0}, tags={"a": "b"})
    run_folder.write_result(result)
    return result


def runs_of(out):
    client = MlflowClient(store_uri(out))
    return client, client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])


def test_a_result_comes_back_as_it_was(tmp_path):
    result = saved_result(tmp_path)
    found = run_folder.read_result(tmp_path, "mine")
    assert found.reused
    assert repr(found.history) == repr(result.history)
    assert (found.params, found.tags, found.unsent) == (result.params, result.tags, False)


@pytest.mark.parametrize("seed", range(10))
def test_no_change_of_a_result_is_believed(tmp_path, seed):
    saved_result(tmp_path)
    path, chance = tmp_path / RESULT, random.Random(seed)
    whole = path.read_bytes()
    for _ in range(50):
        content = bytearray(whole)
        place = chance.randrange(len(content))
        kind = chance.choice(["flip", "cut", "digit", "swap"])
        if kind == "flip":
            content[place] ^= 1 << chance.randrange(8)
        elif kind == "cut":
            del content[place:]
        elif kind == "digit":
            content[place : place + 1] = str(chance.randrange(10)).encode()
        else:
            content[place : place + 2] = content[place : place + 2][::-1]
        path.write_bytes(content)
        with suppress(UserError):  # or what was changed was no content
            assert repr(run_folder.read_result(tmp_path, "mine").history) == repr(HISTORY)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"3", b'{"checksum": 0}', b"[" * 100_000])
@pytest.mark.parametrize("name", [RESULT, ATTEMPT])
def test_nonsense_is_one_clear_line(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    if name == RESULT:
        with pytest.raises(UserError, match=r"result\.json .*--fresh"):
            run_folder.read_result(tmp_path, "mine")
    else:
        attempt = run_folder.attempt_of(tmp_path, "mine", lambda: "known to MLflow")
        assert attempt == run_folder.attempt_of(tmp_path, "mine", lambda: None) == ("known to MLflow", False)


def test_a_result_of_an_earlier_version_says_what_to_do(tmp_path):
    old = {"status": "finished", "message": "", "run_id": "r", "history": [], "tags": {}, "store": ""}
    (tmp_path / RESULT).write_text(json.dumps(old))
    with pytest.raises(UserError, match=r"earlier version.*compute this run again with --fresh"):
        run_folder.read_result(tmp_path, "mine")


@pytest.mark.system
def test_the_result_of_another_run_is_not_accepted(out):
    slim = RunOptions(pictures=False, checkpoint=False)
    mine, other = (experiment.complete(config(seed=seed), out, slim) for seed in (0, 1))
    for name in (RESULT, rounds_file.NAME, files.ROUNDS, files.CLIENTS):
        (mine.folder / name).write_bytes((other.folder / name).read_bytes())
    with pytest.raises(UserError, match=r"belongs to another run .*--fresh"):
        experiment.run(config(seed=0), out)
    assert experiment.run(config(seed=0), out, fresh=True).final["GA"] == mine.final["GA"]


@pytest.mark.system
@pytest.mark.parametrize("left", ["rounds", "tables", "both"])
def test_a_damaged_result_is_read_from_the_other_files(out, monkeypatch, capsys, left):
    outputs = RunOptions({"note": "mine"}, pictures=False, checkpoint=False)
    settings = config(**{"evaluation.every": 2, "federation.rounds": 3})
    before = experiment.complete(settings, out, outputs)
    (before.folder / RESULT).write_bytes(b"{")
    for file in {"rounds": [files.ROUNDS], "tables": [rounds_file.NAME], "both": []}[left]:
        path = before.folder / file
        path.write_bytes(path.read_bytes()[:-1])
    run_folder._warn_once.cache_clear()
    monkeypatch.setattr(experiment, "federate", None)  # nothing is computed
    after = experiment.complete(settings, out, outputs)
    assert (after.history, after.run_id, after.status) == (before.history, before.run_id, "finished")
    assert (after.tags, after.params, after.name) == (before.tags, before.params, before.name)
    assert run_folder.read_result(before.folder).history == before.history
    (line,) = capsys.readouterr().err.splitlines()
    assert "the numbers are read from its other files and saved again" in line
    (known,) = runs_of(out)[1]
    assert known.info.status == "FINISHED"


def test_tables_that_are_damaged_or_another_runs_are_not_believed(tmp_path):
    ours, other = tmp_path / "ours", tmp_path / "other"
    for folder in (ours, other):
        folder.mkdir()
        files.write_tables(HISTORY, folder)
    without_nan = [Measurement({"GA": 0.8273, "LA": 0.1 + 0.2}, {"client": [0, 3]})] * 3
    assert files.read_tables(ours) == without_nan
    other.rename(tmp_path / "renamed")
    assert files.read_tables(tmp_path / "renamed") == []
    for name in (files.ROUNDS, files.CLIENTS):
        whole = (ours / name).read_bytes()
        for place in range(0, len(whole), 13):
            content = bytearray(whole)
            content[place] ^= 1
            (ours / name).write_bytes(content)
            assert files.read_tables(ours) in ([], without_nan)
        (ours / name).write_bytes(whole)
    (ours / files.CLIENTS).unlink()
    assert files.read_tables(ours) == []


class StopError(Exception):
    pass


@pytest.mark.system
@pytest.mark.parametrize("damage", ["lost", "cut", "another's"])
def test_a_lost_attempt_is_found_again_in_mlflow(out, damage):
    def stop(number, _):
        raise StopError

    with pytest.raises(StopError):
        experiment.run(config(), out, watch=stop)
    path = run_folder.folder_of(config(), out) / ATTEMPT
    if damage == "lost":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:10])
    else:
        run_folder.attempt_of(out, "another", lambda: None)
        (out / ATTEMPT).rename(path)
    result = experiment.run(config(), out)
    client, runs = runs_of(out)
    assert [(run.info.run_id, run.info.status) for run in runs] == [(result.run_id, "FINISHED")]
    assert [point.step for point in client.get_metric_history(result.run_id, "seconds")] == [1, 2]
