"""LEAF's json files: FEMNIST, Shakespeare, Sent140 and vectors, and what is refused in one line."""

import json
import re

import numpy as np
import pytest
import torch
from torch import nn

from fl_lightning.data.partition import Split, partition
from fl_lightning.data.sources.leaf import ALPHABET, Leaf
from fl_lightning.errors import UserError
from fl_lightning.loop import Problem, federate
from fl_lightning.methods.fedavg import FedAvg
from fl_lightning.metrics.round_metrics import measure
from fl_lightning.models.task import Task
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import problem_of
from fl_lightning.training import Federation


def document(users, **more):
    """A file as LEAF writes it, from the samples (x, y) of every user."""
    data = {user: {"x": [x for x, _ in samples], "y": [y for _, y in samples]} for user, samples in users.items()}
    return {"users": list(users), "num_samples": [len(own["y"]) for own in data.values()], "user_data": data, **more}


def written(folder, **halves):
    for half, documents in halves.items():
        (folder / half).mkdir(parents=True)
        for number, content in enumerate(documents):
            (folder / half / f"all_data_{number}_niid.json").write_text(json.dumps(content))
    return folder


def image(value):
    return [((i * value) % 256) / 255 for i in range(784)]


def test_femnist(tmp_path):
    train = [document({"w2": [(image(3), 61), (image(5), 0)]}), document({"w1": [(image(7), 10)]}, hierarchies=["a"])]
    folder = written(tmp_path / "femnist" / "data", train=train, test=[document({"w1": [(image(11), 10)]})])
    dataset = Leaf(str(folder)).load()
    assert Leaf(str(folder.parent)).load().train_x.equal(dataset.train_x)  # the folder above is as good
    assert (dataset.num_classes, dataset.shape, dataset.train_x.dtype) == (62, (1, 28, 28), torch.uint8)
    assert dataset.train_y.tolist() == [61, 0, 10]
    assert dataset.owners.tolist() == [1, 1, 0]  # in the order of the names, whatever that of the files
    assert dataset.test_y.tolist() == [10]
    expected = torch.tensor([image(3), image(5), image(7)], dtype=torch.float64).view(3, 1, 28, 28)
    assert torch.allclose(dataset.inputs(dataset.train_x, torch.float64), expected, atol=1e-15)
    clients = partition(dataset.train_y, Split(partition="natural"), 0, dataset.owners)
    assert [part.tolist() for part in clients] == [[2], [0, 1]]


def test_pixels_that_are_no_bytes_stay_as_they_are(tmp_path):
    odd = [0.1234567] * 784
    folder = written(tmp_path, train=[document({"a": [(image(3), 1), (odd, 0)]})], test=[document({"a": [(odd, 1)]})])
    dataset = Leaf(str(folder)).load()
    assert dataset.train_x.dtype == torch.float32
    assert torch.allclose(dataset.train_x.view(2, -1), torch.tensor([image(3), odd]))


def test_shakespeare(tmp_path):
    text = "To be, or not to be"
    lines = [(text[i : i + 8], text[i + 8]) for i in range(8)]
    folder = written(tmp_path, train=[document({"HAMLET": lines[:6]})], test=[document({"HAMLET": lines[6:]})])
    dataset = Leaf(str(folder)).load()
    assert (dataset.num_classes, dataset.vocabulary, dataset.shape) == (80, 80, (8,))
    assert dataset.train_x.dtype == torch.long
    assert "".join(ALPHABET[i] for i in dataset.train_x[0]) == text[:8]
    assert "".join(ALPHABET[i] for i in dataset.train_y) == text[8:14]
    assert len(set(ALPHABET)) == 80


def test_a_model_learns_the_next_character(tmp_path):
    lines = [("abab", "a"), ("baba", "b")] * 6
    folder = written(tmp_path, train=[document({"one": lines, "two": lines})], test=[document({"one": lines})])
    dataset = Leaf(str(folder)).load()
    torch.manual_seed(0)
    task = Task(nn.Sequential(nn.Embedding(80, 3), nn.Flatten(), nn.Linear(12, 80)))
    clients = partition(dataset.train_y, Split(partition="natural"), 0, dataset.owners)
    from fl_lightning.training import Training

    training = Training(lr=0.5, batch_size=4)
    *_, last = federate(FedAvg(), Problem(task, dataset, clients), training, Federation(rounds=6))
    assert measure(FedAvg(), task, dataset, last)["GA"] == 1


def tweet(words):
    return ["1", "Mon", "NO_QUERY", "someone", words]


def test_sent140(tmp_path):
    train = [(tweet("good good day"), 1), (tweet("Bad day, bad!"), 0)]
    folder = written(tmp_path, train=[document({"u": train})], test=[document({"v": [(tweet("bad what?"), 0)]})])
    dataset = Leaf(str(folder), words=5, vocabulary=5).load()  # bad, day and good come twice, all others once
    assert (dataset.num_classes, dataset.vocabulary) == (2, 5)
    bad, day, good = 2, 3, 4
    assert dataset.train_x.tolist() == [[0, 0, good, good, day], [bad, day, 1, bad, 1]]
    assert dataset.test_x.tolist() == [[0, 0, bad, 1, 1]]


def test_vectors_and_a_test_share(tmp_path):
    rng = np.random.default_rng(0)
    users = {f"f_{n}": [(rng.normal(size=6).tolist(), int(i % 3)) for i in range(20)] for n in range(4)}
    folder = written(tmp_path, all_data=[document(users)])
    dataset = Leaf(str(folder), test_share=0.25).load()
    assert (len(dataset.train_y), len(dataset.test_y), dataset.num_classes) == (60, 20, 3)
    assert dataset.train_x.dtype == torch.float32
    assert set(dataset.owners.tolist()) == {0, 1, 2, 3}


def test_users_that_the_split_by_samples_has_emptied_are_skipped(tmp_path):
    whole = document({"a": [([1.0, 2.0], 0), ([3.0, 4.0], 1)]})
    whole["user_data"]["gone"] = {"x": [], "y": []}
    whole["hierarchies"] = ["x", "y"]  # LEAF does not shorten them
    dataset = Leaf(str(written(tmp_path, train=[whole], test=[whole]))).load()
    assert dataset.owners.tolist() == [0, 0]


def test_a_run_is_known_by_the_content(tmp_path):
    content = document({user: [([float(i), 1.0], i % 2) for i in range(6)] for user in "abc"})
    one, other = written(tmp_path / "one", all_data=[content]), written(tmp_path / "two", all_data=[content])
    assert Leaf(str(one)).fingerprint() == Leaf(str(other)).fingerprint()
    settings = {"data": "leaf", "data.root": str(one), "data.partition": "natural", "model": "softmax"}
    problem = problem_of(configure(settings))
    assert len(problem.clients) == 3  # nobody has said how many
    (other / "all_data" / "all_data_0_niid.json").write_text(json.dumps(document({"a": [([0.0, 1.0], 0)] * 3})))
    assert Leaf(str(one)).fingerprint() != Leaf(str(other)).fingerprint()


NO_CLASSES = (float("nan"), float("inf"), -float("inf"), -1, 10**400)
GOOD = {"a": [([1.0, 2.0], 0), ([2.0, 1.0], 1)]}


def changed(**changes):
    return {**document(GOOD), **changes}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a whole json file"),
        (b"\xff\xfe", "not a whole json file"),
        ("[]", "as LEAF writes them, got no users"),
        (changed(users=None), "got no users"),
        (changed(users=["a", "b"]), "users and num_samples must be lists of one length, got 2 and 1"),
        (changed(users=["b"]), "user 'a' has samples in user_data but is missing in users"),
        (changed(users=["a", "b"], num_samples=[2, 2]), "user 'b' is in users but not in user_data"),
        (changed(users=["a", "a"], num_samples=[2, 2]), "a user is named twice"),
        (changed(num_samples=[3]), "as many x and y as num_samples says, 3, got 2 and 2"),
        (changed(user_data={"a": {"x": [[1.0]]}}), "user_data of 'a' must hold lists x and y"),
        (document({"a": [([1.0, 2.0], 0), ([2.0], 1)]}), "expected 2 numbers in every x"),
        (document({"a": [([1.0, 2.0], 0.5)]}), "expected a class 0, 1, 2"),
        *((document({"a": [([1.0, 2.0], label)]}), "expected a class 0, 1, 2") for label in NO_CLASSES),
        (changed(users=[["a"]]), "users must be names, got ['a']; name the user otherwise"),
        (changed(users=[{"a": 1}]), "users must be names, got {'a': 1}"),
        (document({"a": [("000001.jpg", 1)]}), "expected images or vectors of numbers"),
        (document({"a": [("ab", "c"), ("abc", "d")]}), "expected a text of 2 characters in every x"),
        (document({"a": [("ab", "cd")]}), "expected one character in every y"),
        (document({"a": [("a€", "c")]}), "got '€'; remove it"),
        (document({"a": []}), "the files of train hold no samples"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, content, message):
    folder = written(tmp_path, train=[], test=[document(GOOD)])
    text = content if isinstance(content, str | bytes) else json.dumps(content)
    (folder / "train" / "broken.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        Leaf(str(folder)).load()
    assert "\n" not in str(caught.value)


def test_missing_folders_are_named(tmp_path):
    with pytest.raises(UserError, match=r"data.root is missing"):
        Leaf().load()
    with pytest.raises(UserError, match="not a folder: "):
        Leaf(str(tmp_path / "nowhere")).load()
    with pytest.raises(UserError, match=r"expected LEAF's json files in .*/train and .*/test"):
        Leaf(str(tmp_path)).load()
    written(tmp_path, train=[document(GOOD)])
    with pytest.raises(UserError, match=r"expected json files in .*/test beside those in .*/train, got none"):
        Leaf(str(tmp_path)).load()
    for settings in ({"words": 0}, {"vocabulary": 2}, {"test_share": 1.0}):
        with pytest.raises(UserError, match="must be"):
            Leaf(str(tmp_path), **settings)
