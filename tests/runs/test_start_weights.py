"""Runs that start from weights, and train a part of a network."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from fl_lightning import experiment, load_model
from fl_lightning.__main__ import main
from fl_lightning.cli.flags import with_files
from fl_lightning.cli.run import _parser
from fl_lightning.errors import UserError
from fl_lightning.runs import frozen_weights, start_weights
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.frozen_weights import FOLDER, FROZEN, MODEL, PART
from fl_lightning.runs.identity import identity
from fl_lightning.runs.problem import problem_of

SETTINGS = {
    **{"method": "fedavg", "engine": "functional", "data.clients": 3, "federation.rounds": 1, "model.hidden": [8, 6]},
    **{"training.lr": 0.1, "data.subset": 0.2},
}
SMALL = {"data.test_subset": 0.2, "evaluation.local": False}


def settings(**changes):
    return configure({**SETTINGS, **SMALL, **{key.replace("__", "."): value for key, value in changes.items()}})


def saved(path, **changes):
    """The initial weights of some settings in a file."""
    state = problem_of(settings(**changes)).task.model.state_dict()
    (save_file if path.suffix == ".safetensors" else torch.save)(state, path)
    return state


def state_of(config):
    return problem_of(config).task.model.state_dict()


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("name", ["weights.pt", "weights.safetensors"])
def test_a_file_is_where_a_run_starts(tmp_path, name):
    given = saved(tmp_path / name, seed=5)
    found = state_of(settings(model__weights=str(tmp_path / name)))
    assert equal(found, given)
    assert not equal(found, state_of(settings()))


def test_other_forms_of_a_file_are_taken(tmp_path):
    given = saved(tmp_path / "w.safetensors", seed=5)
    forms = {
        "model.bin": save(given),
        "nested.pt": {"epoch": 3, "model": given},
        "wrapped.pt": {f"module.net.{name}": value for name, value in given.items()},
    }
    for name, content in forms.items():
        path = tmp_path / name
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        assert equal(state_of(settings(model__weights=str(path))), given)
    with pytest.raises(UserError, match=r"model.weights needs a value, got ''; .* null starts at random"):
        settings(model__weights="")


def test_a_new_head_is_drawn_by_the_seed_and_the_rest_is_given(tmp_path):
    given = saved(tmp_path / "w.pt", seed=5)
    starts = [
        state_of(settings(model__weights=str(tmp_path / "w.pt"), model__new_head=True, seed=s)) for s in (0, 1, 1)
    ]
    for one in starts:
        assert torch.equal(one["layers.1.weight"], given["layers.1.weight"])
        assert not torch.equal(one["layers.5.weight"], given["layers.5.weight"])
    assert equal(starts[1], starts[2])
    assert not equal(starts[0], starts[1])


def test_what_a_file_holds_names_the_run_and_not_where_it_lies(tmp_path):
    state = saved(tmp_path / "a.pt", seed=5)
    torch.save(state, tmp_path / "b.pt")
    copied = (tmp_path / "c.pt").write_bytes((tmp_path / "a.pt").read_bytes())
    assert copied
    ids = [identity(settings(model__weights=str(tmp_path / name))) for name in ("a.pt", "c.pt")]
    assert ids[0] == ids[1] != identity(settings())
    saved(tmp_path / "d.pt", seed=6)
    assert identity(settings(model__weights=str(tmp_path / "d.pt"))) not in ids


class Harmful:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda path: path.write_bytes(pickle.dumps(Harmful())), "pickled code or objects, which are never executed"),
        (lambda path: torch.save({"w": Harmful()}, path), "pickled code or objects, which are never executed"),
        (lambda path: path.write_bytes(b"nothing"), "holds no weights|pickled code"),
        (lambda path: path.write_bytes(b"\x80\x02."), r"holds no weights .IndexError.; save a state_dict"),
        (lambda path: torch.save([1, 2], path), "expected tensors by name, or one such dict, got list"),
        (lambda path: torch.save({"w": torch.zeros(2)}, path), "missing: layers.1.weight.*unexpected: w"),
        (
            lambda path: torch.save({"w": torch.tensor([1.0, torch.nan])}, path),
            "w has values that are not finite; .* another file",
        ),
        (lambda path: torch.save({"epoch": 3, "model": {"w": torch.zeros(2)}}, path), "missing: layers.1.weight"),
        (
            lambda path: torch.save({"a": {"w": torch.zeros(2)}, "b": {"w": torch.zeros(2)}}, path),
            "no state dict: expected tensors by name, or one such dict, got a, b; save a state_dict",
        ),
        (
            lambda path: path.mkdir(),
            "model.weights .* neither model.safetensors nor a checkpoint in it; expected a file",
        ),
        (lambda path: None, "does not exist; expected a file of weights, the folder of a finished run"),
    ],
)
def test_a_file_that_is_something_else_is_refused_in_one_line(tmp_path, capsys, content, message):
    content(tmp_path / "w.pt")
    with pytest.raises(UserError, match=message) as error:
        problem_of(settings(model__weights=str(tmp_path / "w.pt")))
    assert "\n" not in str(error.value)
    assert capsys.readouterr().out == ""


def test_published_weights_are_known_by_their_file_and_need_the_internet(monkeypatch):
    from torchvision import models

    options = {"name": "resnet18"}
    assert start_weights.content("DEFAULT", options) == "resnet18-f37072fd.pth"
    with pytest.raises(UserError, match=r"unknown model.weights of resnet18 'IMAGENET'"):
        start_weights.content("IMAGENET", options)

    def offline(*_, **__):
        raise URLError("no route to host")

    monkeypatch.setattr(models.ResNet18_Weights, "get_state_dict", offline)
    with pytest.raises(UserError, match=r"cannot be reached .no route to host.; download it elsewhere") as error:
        start_weights.read("DEFAULT", options)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_part_is_sent_saved_and_loaded_and_the_rest_kept_once(out):
    first = experiment.run(settings(), out)
    part = {"model__weights": str(first.folder), "model__new_head": True, "model__train": "head"}
    runs = [experiment.run(settings(**part, seed=seed), out) for seed in (0, 1)]
    assert start_weights.read(str(first.folder), {}).keys() == load_file(first.folder / MODEL).keys()
    assert len(list((out / FOLDER).iterdir())) == 1  # the rest, of both
    before = load_model(first).state_dict()
    for run in runs:
        last = run.history[-1]
        assert last["bytes_up"] == last["bytes_down"] == 3 * 4 * (6 * 10 + 10)
        assert set(load_file(run.folder / MODEL)) == {"layers.5.weight", "layers.5.bias"}
        after = load_model(run).state_dict()
        assert torch.equal(after["layers.1.weight"], before["layers.1.weight"])
        assert not torch.equal(after["layers.5.weight"], before["layers.5.weight"])
        assert equal(after, start_weights.read(str(run.folder), {}))
    gone = {path: path.rename(path.with_suffix(".away")) for path in [first.folder]}
    assert gone
    assert equal(load_model(runs[1]).state_dict(), after)
    next((out / FOLDER).iterdir()).unlink()
    with pytest.raises(UserError, match=r"trained part of a network alone.*copy the folder frozen"):
        start_weights.read(str(runs[1].folder), {})


def test_the_rest_is_written_as_a_whole_and_again_where_it_is_damaged(tmp_path):
    state = {"w": torch.arange(5.0)}
    name = frozen_weights.keep(tmp_path, state)
    (path,) = (tmp_path / FOLDER).iterdir()
    content = path.read_bytes()
    saved_model = save({}, metadata={PART: json.dumps({FROZEN: name})})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / MODEL).write_bytes(saved_model)
    assert equal(frozen_weights.frozen(tmp_path / "run"), state)
    path.write_bytes(content[:-4])
    with pytest.raises(UserError, match=r"safetensors is damaged; compute a run that shares it again with --fresh"):
        frozen_weights.frozen(tmp_path / "run")
    assert frozen_weights.keep(tmp_path, state) == name
    assert [one.read_bytes() for one in (tmp_path / FOLDER).iterdir()] == [content]


def test_runs_that_end_at_once_keep_the_rest_once(tmp_path):
    state = {"w": torch.arange(200_000.0)}
    with ThreadPoolExecutor(8) as pool:
        names = set(pool.map(lambda _: frozen_weights.keep(tmp_path, state), range(40)))
    assert [path.stem for path in (tmp_path / FOLDER).iterdir()] == list(names)


@pytest.mark.slow
def test_a_whole_network_is_loaded_where_its_start_is_gone(tmp_path, out):
    saved(tmp_path / "w.pt", seed=5)
    run = experiment.run(settings(model__weights=str(tmp_path / "w.pt")), out)
    before = load_model(run).state_dict()
    (tmp_path / "w.pt").unlink()
    assert equal(load_model(run).state_dict(), before)


def with_a_in_the_rest(folder):
    """The files of a run as earlier versions wrote them: frozen A among what runs share."""
    state, rest, said = load_file(folder / MODEL), frozen_weights.frozen(folder), frozen_weights.header(folder)
    rest |= {name: state.pop(name) for name in list(state) if name.endswith(".0.a")}
    said[FROZEN] = frozen_weights.keep(folder.parent, rest)
    (folder / MODEL).write_bytes(save(state, metadata={PART: json.dumps(said)}))


@pytest.mark.slow
def test_adapters_of_all_seeds_share_one_rest(tmp_path, out):
    """A frozen A is random, a run's own."""
    saved(tmp_path / "w.pt", seed=5)
    part = {"method": "fola", "model__weights": str(tmp_path / "w.pt"), "model__train": "lora"}
    runs = [experiment.run(settings(**part, seed=seed), out) for seed in (0, 1)]
    assert len(list((out / FOLDER).iterdir())) == 1
    (tmp_path / "w.pt").unlink()
    for run in runs:
        whole = load_model(run).state_dict()
        with_a_in_the_rest(run.folder)
        again = load_model(run).state_dict()
        read = start_weights.read(str(run.folder), {})
        assert whole.keys() == again.keys() == read.keys()
        assert all(torch.equal(value, again[name]) for name, value in whole.items())
        assert all(torch.allclose(value, read[name]) for name, value in whole.items())


@pytest.mark.slow
def test_a_run_is_loaded_and_measured_where_its_start_holds_another_network(tmp_path, out):
    start = tmp_path / "w.pt"
    saved(start, seed=5)
    run = experiment.run(settings(method="fola", model__weights=str(start), model__train="head"), out)
    before = load_model(run).state_dict()
    for change in (lambda: saved(start, model__hidden=[3]), start.unlink):
        change()
        assert equal(load_model(run).state_dict(), before)
        flags = ["--source", "running", "--form", "diagonal", "--runs", str(out)]
        assert main(["uncertainty", str(run.folder), *flags]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["functional", "lightning"])
@pytest.mark.parametrize("method", ["scaffold", "fola"])
def test_methods_see_the_part_alone(out, method, engine):
    config = settings(method=method, engine=engine, model__train="last:2")
    problem = problem_of(config)
    assert set(problem.task.initial.params) == {f"layers.{n}.{name}" for n in (3, 5) for name in ("weight", "bias")}
    result = experiment.run(replace(config), out)
    whole, start = load_model(result).state_dict(), problem.task.model.state_dict()
    assert [name for name in whole if not torch.equal(whole[name], start[name])] == list(problem.task.initial.params)


def test_a_method_with_a_network_of_its_own_takes_no_part():
    with pytest.raises(UserError, match=r"fedsparse trains a network of its own.*--model.train all"):
        problem_of(settings(method="fedsparse", model__train="head"))


@pytest.mark.slow
def test_the_id_of_a_run_stands_for_its_folder(out):
    run = experiment.run(settings(), out)
    flags = ["--runs", str(out), "--model.weights", run.run_id[:12], "--seed", "3"]
    _, given = with_files(_parser(), flags)
    assert given["model.weights"] == str(run.folder)


LIT = '''
import pytorch_lightning as pl
import torch
from torch import nn

class Lit(pl.LightningModule):
    """A user's module."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.ReLU(), nn.Linear(6, 4))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])
'''


@pytest.mark.slow
def test_a_lightning_module_takes_a_new_head_and_trains_it_alone(tmp_path, out, monkeypatch):
    (tmp_path / "plugins").mkdir()
    (tmp_path / "plugins" / "lit.py").write_text(LIT)
    monkeypatch.setenv("FL_LIGHTNING_PLUGINS", str(tmp_path / "plugins"))
    shapes = {"1.weight": (6, 64), "1.bias": (6,), "3.weight": (4, 6), "3.bias": (4,)}
    given = {f"model.net.{name}": torch.full(shape, 0.1) for name, shape in shapes.items()}
    torch.save({"state_dict": given, "epoch": 3}, tmp_path / "lit.ckpt")
    part = {"model": "lit", "model.weights": str(tmp_path / "lit.ckpt"), "model.new_head": True, "model.train": "head"}
    base = {key: value for key, value in SETTINGS.items() if not key.startswith("model")}
    result = experiment.run(configure(base | SMALL | part), out)
    model = load_model(result)
    assert torch.equal(model.net[1].weight, given["model.net.1.weight"])
    assert model.net[3].weight.shape == (10, 6)
    assert result.history[-1]["bytes_up"] == 3 * 4 * 70
