"""Runs are named, tagged, listed, shown and deleted."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from zipfile import ZipFile

import pytest
from mlflow import MlflowClient

from fl_lightning import experiment
from fl_lightning.__main__ import main
from fl_lightning.runs import folder as run_folder
from fl_lightning.runs import locate
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.open_run import OpenRun, RunOptions
from fl_lightning.runs.problem import problem_of
from fl_lightning.runs.tracking.store import store_uri
from fl_lightning.system import checksums
from tune.study import Case, Study
from tune.sweep import Options, sweep

pytestmark = pytest.mark.slow


QUICK = {
    "data": "digits",
    "data.subset": 0.2,
    "data.clients": 4,
    "model": "softmax",
    "engine": "functional",
    "federation.rounds": 2,
}


def call(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def run(out, tags=None, **changes):
    settings = {key.replace("__", "."): value for key, value in changes.items()}
    return experiment.run(configure({**QUICK, **settings}), out, tags=tags or {})


def flags(out, *more):
    return ["run", *(f"--{key}={value}" for key, value in QUICK.items()), "--runs", out, "--quiet", *more]


def listed(capsys, out, *arguments):
    code, text, error = call(capsys, "runs", "--runs", out, "--json", *arguments)
    assert (code, error) == (0, "")
    return json.loads(text)


def test_a_run_has_the_name_and_the_tags_that_were_given(out, capsys):
    assert call(capsys, *flags(out, "--name", "first try", "--tag", "note=a=b", "--tag", "day=monday"))[0] == 0
    (found,) = listed(capsys, out)
    assert found["case"] == "first try"
    assert found["name"].startswith("first try R=2 seed=0 digits alpha=0.1 ")
    assert found["tags"]["note"] == "a=b"
    assert found["settings"]["federation.rounds"] == 2
    assert call(capsys, *flags(out, "--name", "second", "--tag", "day=tuesday"))[0] == 0  # only read, but renamed
    (found,) = listed(capsys, out)
    assert found["name"].startswith("second ")
    assert (found["case"], found["tags"]["note"], found["tags"]["day"]) == ("second", "a=b", "tuesday")
    assert found["status"] == "finished"


def test_names_tell_runs_apart_that_differ(out):
    names = [
        MlflowClient(store_uri(out)).get_run(run(out, **changes).run_id).info.run_name
        for changes in [
            {"method": "fola"},
            {"method": "fola", "method__strength": 10},
            {"method": "fola", "federation__rounds": 3},
            {"method": "fola", "training__epochs": 2},
            {"method": "fola", "seed": 1},
        ]
    ]
    assert len(set(names)) == 5
    assert names[1].startswith("fola strength=10 R=2 seed=0 digits alpha=0.1 N=4 ")
    assert "E=2" in names[3]
    assert "data.root" not in "".join(names)


def test_runs_are_listed_and_chosen_by_settings_status_and_tags(out, capsys):
    run(out, {"note": "x"}, method="fedavg")
    run(out, {"note": "y"}, method="fola", method__strength=10)
    run(out, method="fola", model="mlp", training__lr=1e30)
    code, text, _ = call(capsys, "runs", "--runs", out)
    assert code == 0
    assert text.splitlines()[0].split()[:2] == ["id", "case"]
    assert "training.lr" in text.splitlines()[0]
    assert text.splitlines()[-1] == "3 runs"
    for where, number in {"method=fola": 2, "note=x": 1, "status=diverged": 1, "method.strength=10": 1}.items():
        assert len(listed(capsys, out, "--where", where)) == number
    assert len(listed(capsys, out, "--where", "note=x", "--where", "note=y")) == 2
    code, text, _ = call(
        capsys, "runs", "show", listed(capsys, out, "--where", "note=y")[0]["run_id"][:8], "--runs", out
    )
    assert code == 0
    assert "after round 2\n  GA " in text
    assert "method.strength  " in text
    assert str(out / "fola-digits-") in text


def test_deleted_runs_leave_folder_and_store_and_are_computed_anew(out, capsys):
    stays, goes = run(out, method="fedavg"), run(out, method="fola")
    code, text, error = call(capsys, "runs", "delete", goes.run_id[:12], "--runs", out)
    assert (code, text.count("\n")) == (2, 2)
    assert "add --yes to delete this run" in error
    assert goes.folder.exists()
    code, text, _ = call(capsys, "runs", "delete", goes.folder.name, "--runs", out, "--yes")
    assert code == 0
    assert "deleted 1 of 2 runs" in text
    assert not goes.folder.exists()
    assert list((out / "artifacts").glob(f"{goes.run_id}*")) == []
    assert [one["run_id"] for one in listed(capsys, out)] == [stays.run_id]
    again = run(out, method="fola")
    assert not again.reused
    assert again.run_id != goes.run_id
    assert again.final["GA"] == goes.final["GA"]


def test_of_two_deletes_at_once_one_claims_a_run(out, capsys, monkeypatch):
    run(out, method="fedavg")
    both_have_looked = threading.Barrier(2)
    original = locate.folders

    def folders(out):
        found = original(out)
        both_have_looked.wait(60)
        return found

    monkeypatch.setattr(locate, "folders", folders)
    delete = ["runs", "delete", "--where", "seed=0", "--runs", str(out), "--yes"]
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(main, [delete, delete])) == [0, 0]
    printed = capsys.readouterr().out
    assert printed.count("deleted 1 of 1 runs") == 1
    assert "deleted 0 of 1 runs" in printed
    assert "another process has deleted 1 of those" in printed
    assert not (out / locate.LOCK).exists()


def test_a_run_that_is_being_computed_is_not_deleted(out, capsys):
    config = configure(QUICK)
    folder = run_folder.folder_of(config, out)
    with run_folder.locked(folder):
        OpenRun(config, out, RunOptions(), problem_of(config), [])
        code, _, error = call(capsys, "runs", "delete", "--where", "status=running", "--runs", out, "--yes")
        assert code == 2
        assert "another process is computing this run" in error
        assert len(listed(capsys, out)) == 1


def test_the_last_run_of_a_sweep_takes_the_sweep_with_it(out, capsys):
    study = Study("mine", "", base=QUICK, cases=(Case("a", {"method": "fedavg"}),), seeds=(0, 1))
    sweep(study, Options(out, in_process=True), lambda status: None)
    client = MlflowClient(store_uri(out))
    experiment_id = client.get_experiment_by_name("fl_lightning").experiment_id
    assert call(capsys, "runs", "delete", "--where", "seed=0", "--runs", out, "--yes")[0] == 0
    assert len(client.search_runs([experiment_id])) == 2
    assert call(capsys, "runs", "delete", "--where", "study=mine", "--runs", out, "--yes")[0] == 0
    assert client.search_runs([experiment_id]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lits"], "unknown action 'lits': did you mean 'list'?"),
        (["list", "abc"], "list takes no ids"),
        (["show"], "show needs the ids of runs"),
        (["delete"], "delete needs the ids of runs"),
        (["show", "xyz"], "no run has the id or the folder 'xyz'"),
        (["delete", ""], "2 runs have an id that begins with ''"),
        (["--where", "alpha"], "--where is written key=value"),
        (["--where", "data.alpa=1"], "did you mean 'data.alpha'?"),
        (["--where", "data.alpha=77"], "no run has data.alpha=77"),
    ],
)
def test_mistakes_are_one_line(out, capsys, arguments, message):
    run(out, method="fedavg")
    run(out, method="fola")
    code, text, error = call(capsys, "runs", *arguments, "--runs", out)
    assert (code, text) == (2, "")
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        ("note", "key=value"),
        ("=x", "key=value"),
        ("a b=x", "letters"),
        ("status=x", "itself"),
        ("study.x=1", "itself"),
        (f"{'k' * 300}=x", "at most 250 letters"),
        (f"k={'x' * 5001}", "at most 5000, got 1 and 5001"),
        ("..=x", "begin it with a letter"),
        ("k=\udcff", "can be printed"),
    ],
)
def test_tags_that_cannot_be_are_refused(out, capsys, tag, message):
    code, text, error = call(capsys, *flags(out, "--tag", tag))
    assert (code, text) == (2, "")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not list(out.glob("*-digits-*"))


def numbers(out):
    return {one.parent.name: run_folder.read_result(one.parent).history for one in out.glob("*/result.json")}


def archived(out, capsys, *arguments):
    file = out.parent / "some.zip"
    code, text, error = call(capsys, "runs", "export", file, *arguments, "--runs", out)
    assert (code, error) == (0, "")
    return file, text


def test_runs_are_handed_on_in_a_file_and_known_where_it_is_read(out, tmp_path, capsys, monkeypatch):
    run(out, {"note": "x"}, method="fedavg")
    run(out, method="fola", method__strength=3)
    file, text = archived(out, capsys)
    assert "wrote 2 of 2 runs" in text
    assert str(tmp_path) not in str([ZipFile(file).read(name) for name in ZipFile(file).namelist()])
    elsewhere = tmp_path / "elsewhere"
    assert "2 runs of" in call(capsys, "runs", "import", file, "--runs", elsewhere)[1]
    assert numbers(elsewhere) == numbers(out)
    first, second = (sorted(listed(capsys, place), key=lambda one: one["name"]) for place in (out, elsewhere))
    for mine, theirs in zip(first, second, strict=True):
        assert mine["metrics"] == theirs["metrics"]
        assert mine["settings"] == theirs["settings"]
        assert mine["name"] == theirs["name"]
        assert mine["run_id"] != theirs["run_id"]
    assert {one["tags"].get("note") for one in second} == {"x", None}
    monkeypatch.setattr(experiment, "federate", lambda *args, **kwargs: pytest.fail("computed again"))
    assert run(elsewhere, method="fola", method__strength=3).reused
    for name in ("rounds.parquet", "clients.parquet", "config.yaml"):
        for folder in numbers(out):
            assert (elsewhere / folder / name).read_bytes() == (out / folder / name).read_bytes()
    again, _ = archived(elsewhere, capsys)
    assert call(capsys, "runs", "import", again, "--runs", out)[1].startswith(f"0 runs of {again} are new")


def test_a_sweep_goes_on_with_imported_runs(out, tmp_path, capsys):
    study = Study("own", "", base=QUICK, cases=(Case("a", {"method": "fedavg"}), Case("b", {"method": "fola"})))
    sweep(study, Options(out, in_process=True), lambda status: None)
    file, _ = archived(out, capsys, "--where", "study=own")
    before = numbers(out)
    elsewhere = tmp_path / "elsewhere"
    assert "fl-lightning sweep own" in call(capsys, "runs", "import", file, "--runs", elsewhere)[1]
    sweep(study, Options(elsewhere, in_process=True), lambda status: None)
    assert numbers(elsewhere) == before


def test_only_what_was_chosen_and_has_ended_is_exported(out, capsys):
    kept = run(out, method="fedavg")
    run(out, method="fola")
    config = configure({**QUICK, "method": "fedprox"})
    folder = run_folder.folder_of(config, out)
    folder.mkdir()
    OpenRun(config, out, RunOptions(), problem_of(config), [])
    assert "wrote 1 of 1 runs" in archived(out, capsys, kept.run_id[:8])[1]
    assert "wrote 2 of 3 runs" in archived(out, capsys)[1]
    code, _, error = call(capsys, "runs", "export", out / "none.zip", "--where", "method=fedprox", "--runs", out)
    assert code == 2
    assert "1 have not ended" in error
    assert not (out / "none.zip").exists()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda content: content[:-40], "is damaged, or not an archive of runs"),
        (lambda content: b"text", "is damaged, or not an archive of runs"),
        (lambda content: rezipped(content, lambda name: f"../{name}"), "expected a run in the folder"),
        (lambda content: rezipped(content, lambda name: f"/{name}"), "expected a run in the folder"),
        (lambda content: rezipped(content, lambda name: name.replace("result.json", "x.py")), "other things than runs"),
        (lambda content: rezipped(content, change=lambda text: text.replace(b"0.", b"1.")), "its checksum does not"),
        (lambda content: rezipped(content, change=with_text), "expected a number as GA, got 'much'"),
    ],
)
def test_a_file_that_is_no_archive_of_runs_changes_nothing(out, tmp_path, capsys, spoil, words):
    run(out, method="fedavg")
    file, _ = archived(out, capsys)
    file.write_bytes(spoil(file.read_bytes()))
    elsewhere = tmp_path / "elsewhere"
    code, _, error = call(capsys, "runs", "import", file, "--runs", elsewhere)
    assert code == 2
    assert words in error
    assert not list(tmp_path.glob("elsewhere/*"))


def with_text(text):
    """A result with a word among its numbers, sealed again."""
    if not text.startswith(b"{"):
        return text
    content = checksums.unpack(text, None)
    content["history"][0]["metrics"]["GA"] = "much"
    return checksums.pack(content["identity"], content)


def rezipped(content, rename=lambda name: name, change=lambda text: text):
    changed = BytesIO()
    with ZipFile(BytesIO(content)) as old, ZipFile(changed, "w") as new:
        for name in old.namelist():
            new.writestr(rename(name), change(old.read(name)))
    return changed.getvalue()


def test_export_and_import_say_what_they_need(out, tmp_path, capsys):
    assert "export needs a file" in call(capsys, "runs", "export", "--runs", out)[2]
    assert "no file at" in call(capsys, "runs", "import", tmp_path / "x.zip", "--runs", out)[2]
    assert "import takes one file" in call(capsys, "runs", "import", "a.zip", "b.zip", "--runs", out)[2]
