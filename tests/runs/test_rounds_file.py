"""The numbers of rounds on disk: written once, and no torn, changed or foreign line is believed."""

import json
import random
import shutil
import zlib

import pytest
from safetensors.torch import load_file, safe_open, save

from fl_lightning import experiment
from fl_lightning.errors import UserError
from fl_lightning.metrics.metric import Measurement
from fl_lightning.runs import checkpoint, files, known_run, rounds_file
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.folder import Result
from fl_lightning.runs.rounds_file import COPY, NAME
from fl_lightning.system.checksums import header_checksum
from tests.support.workers import SETTINGS

HISTORY = [
    Measurement({"GA": number / 7, "LA": float("nan"), "loss": float("inf")}, {"client": [number]})
    for number in range(1, 7)
]


def begun(folder, number=6):
    """A run of which so many rounds are saved."""
    rounds_file.begin(folder, "id", [])
    for i, measurement in enumerate(HISTORY[:number], start=1):
        rounds_file.append(folder, "id", i, measurement)
    return folder


def test_rounds_come_back_to_the_bit(tmp_path):
    begun(tmp_path)
    assert repr(rounds_file.read(tmp_path, "id")) == repr(HISTORY)
    first = json.loads((tmp_path / NAME).read_text().splitlines()[0])
    assert (first["round"], first["metrics"]["GA"], first["clients"]) == (1, 1 / 7, {"client": [1]})


def test_a_round_is_written_once(tmp_path):
    begun(tmp_path, 5)
    before = (tmp_path / NAME).read_bytes()
    rounds_file.append(tmp_path, "id", 6, HISTORY[5])
    assert (tmp_path / NAME).read_bytes()[: len(before)] == before
    place = (tmp_path / NAME).stat()
    rounds_file.write(tmp_path, "id", HISTORY)  # at the end nothing is left to be written
    assert (tmp_path / NAME).stat() == place
    rounds_file.remove_copies(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_what_lies_beyond_the_checkpoint_is_cut_off(tmp_path):
    begun(tmp_path)
    rounds_file.begin(tmp_path, "id", HISTORY[:4])
    for name in (NAME, COPY):
        assert len((tmp_path / name).read_bytes().splitlines()) == 4
    rounds_file.append(tmp_path, "id", 5, HISTORY[0])  # computed again
    assert repr(rounds_file.read(tmp_path, "id")) == repr([*HISTORY[:4], HISTORY[0]])
    rounds_file.begin(tmp_path, "id", [])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("damaged", [NAME, COPY])
@pytest.mark.parametrize("damage", ["lost", "empty", "torn", "changed", "short"])
def test_one_damaged_file_costs_nothing(tmp_path, damaged, damage):
    path = begun(tmp_path) / damaged
    content = path.read_bytes()
    path.write_bytes(
        {
            "lost": b"",
            "empty": b"",
            "torn": content[:-5],
            "changed": content.replace(b'"GA": 0.', b'"GA": 1.', 1),
            "short": b"".join(content.splitlines(keepends=True)[:3]),
        }[damage]
    )
    if damage == "lost":
        path.unlink()
    assert repr(rounds_file.read(tmp_path, "id")) == repr(HISTORY)
    rounds_file.begin(tmp_path, "id", HISTORY)
    assert (tmp_path / NAME).read_bytes() == (tmp_path / COPY).read_bytes() == content


def test_lines_of_another_run_or_another_place_are_not_believed(tmp_path):
    begun(tmp_path)
    (tmp_path / COPY).unlink()
    assert rounds_file.read(tmp_path, "another") == []
    lines = (tmp_path / NAME).read_bytes().splitlines(keepends=True)
    (tmp_path / NAME).write_bytes(b"".join([*lines[:2], *lines[3:]]))
    assert repr(rounds_file.read(tmp_path, "id")) == repr(HISTORY[:2])


@pytest.mark.parametrize("seed", range(5))
def test_no_change_is_believed(tmp_path, seed):
    path, chance = begun(tmp_path) / NAME, random.Random(seed)
    (tmp_path / COPY).unlink()
    whole = path.read_bytes()
    for _ in range(50):
        content, place = bytearray(whole), chance.randrange(len(whole))
        if chance.random() < 0.3:
            del content[place:]
        else:
            content[place] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        found = rounds_file.read(tmp_path, "id")
        assert len(found) <= whole[:place].count(b"\n") + (content == whole)
        assert repr(found) == repr(HISTORY[: len(found)])


def result_of(folder):
    run_folder.write_result(Result("finished", "", "run", folder, HISTORY[:3], identity="id", params={}, name="x"))
    return folder


def test_rounds_that_a_result_lacks_are_named_in_one_line(tmp_path, capsys):
    path = result_of(tmp_path) / NAME
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:2]))
    with pytest.raises(UserError, match=r"rounds\.jsonl is damaged after round 2 of 3; .*--fresh"):
        run_folder.read_result(tmp_path)
    assert len(known_run.known_run(tmp_path).rounds) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "is damaged after round 2 of 3; those before the damage are shown" in line
    files.write_tables(HISTORY[:3], tmp_path)
    assert [one["GA"] for one in known_run.known_run(tmp_path).rounds] == [1 / 7, 2 / 7, 3 / 7]
    (line,) = capsys.readouterr().err.splitlines()
    assert "the numbers are read from its tables" in line


def test_a_finished_run_with_damaged_rounds_is_read_from_its_tables(out, monkeypatch, capsys):
    settings = configure(SETTINGS)
    before = experiment.run(settings, out)
    path = before.folder / NAME
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    monkeypatch.setattr(experiment, "federate", None)  # nothing is computed
    after = experiment.run(settings, out)
    assert (after.history, after.run_id) == (before.history, before.run_id)
    (line,) = capsys.readouterr().err.splitlines()
    assert "rounds.jsonl is damaged after round" in line
    assert path.read_bytes() == whole


class StopError(Exception):
    pass


def stopped(settings, out, number):
    """The folder of a run that was left in the middle."""

    def stop(round, _):
        if round == number:
            raise StopError

    with pytest.raises(StopError):
        experiment.run(settings, out, watch=stop)
    return run_folder.folder_of(settings, out)


def test_an_unfinished_run_that_has_lost_its_rounds_says_so(out, capsys):
    settings = configure({**SETTINGS, "federation.rounds": 4})
    folder = stopped(settings, out, 2)
    for name in (NAME, COPY):
        lines = (folder / name).read_bytes().splitlines(keepends=True)
        (folder / name).write_bytes(lines[0])
    assert len(known_run.known_run(folder).rounds) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "rounds.jsonl is damaged after round 1 of 2" in line
    with pytest.raises(UserError, match=r"rounds\.jsonl is damaged: 1 of 2 rounds are whole; .*--fresh"):
        experiment.run(settings, out)


def as_before(folder, history, parts):
    """Rewrite a checkpoint as versions before 4 have left it: with the numbers, some of them in files beside it."""
    path = folder / checkpoint.CURRENT
    with safe_open(path, framework="pt") as file:
        header = {key: value for key, value in file.metadata().items() if key != "checksum"}
    named = []
    for i in range(parts):
        content = json.dumps([one._asdict() for one in history[i : i + 1]]).encode()
        for name in (f"rounds-{i + 1}.json", f"rounds-{i + 1}.json.copy"):
            (folder / name).write_bytes(content)
        named.append((f"rounds-{i + 1}.json", zlib.crc32(content)))
    header["format"] = "fl_lightning checkpoint 3"
    header["history"] = json.dumps([one._asdict() for one in history[parts:]])
    header["earlier"] = json.dumps(named)
    header["checksum"] = header_checksum(header)
    path.write_bytes(save(load_file(path), metadata=header))
    for name in (NAME, COPY):
        (folder / name).unlink()


@pytest.mark.parametrize("damaged", [None, "rounds-1.json", "rounds-1.json.copy"])
def test_a_run_of_an_earlier_version_goes_on(out, damaged):
    settings = configure({**SETTINGS, "federation.rounds": 4})
    folder = stopped(settings, out, 3)
    history = rounds_file.read(folder, run_folder.identity(settings))
    as_before(folder, history, parts=2)
    if damaged:
        (folder / damaged).write_bytes(b"[]")
    assert repr(rounds_file.read(folder, "any")) == repr(history)
    result = experiment.run(settings, out)
    assert result.history[:3] == history
    assert not list(folder.glob("rounds-*"))


def test_a_result_of_an_earlier_version_is_read_and_keeps_its_rounds(out):
    settings = configure(SETTINGS)
    before = experiment.run(settings, out)
    path = before.folder / run_folder.RESULT
    content = run_folder.checksums.read(path, None)
    del content["rounds"]
    old = {**content, "history": [one._asdict() for one in before.history]}
    run_folder.checksums.write(path, before.identity, old)
    for name in (NAME, checkpoint.CURRENT):
        (before.folder / name).unlink()
    shutil.copytree(before.folder, out / "copy")
    assert len(known_run.known_run(out / "copy").rounds) == 2
    assert experiment.run(settings, out, tags={"note": "later"}).history == before.history  # which writes the result
    assert run_folder.read_result(before.folder).history == before.history
    assert "history" not in run_folder.checksums.read(path, None)
