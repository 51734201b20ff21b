"""What `save_to_disk` writes, made here by pyarrow: images, text, numbers, splits, clients, and what is refused."""

import io
import json

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image

from fl_lightning.data.sources.hf import Hf
from fl_lightning.errors import UserError
from fl_lightning.runs.config.run_config import configure
from fl_lightning.runs.problem import problem_of

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
NOTHING = {"bytes": None, "path": None}
CLASSES = {"names": ["cat", "dog", "owl"], "_type": "ClassLabel"}


def saved(folder, table, features=None, pieces=1):
    """One split: rows in some files in Arrow's stream format, and what they mean."""
    folder.mkdir(parents=True)
    size = -(-table.num_rows // pieces)
    names = [f"data-{i:05}-of-{pieces:05}.arrow" for i in range(pieces)]
    for i, name in enumerate(names):
        with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
            writer.write_table(table.slice(i * size, size))
    state = {"_data_files": [{"filename": name} for name in names], "_split": folder.name, "_format_type": None}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features or {}}))
    return folder


def dictionary(folder, **splits):
    for name, (table, features) in splits.items():
        saved(folder / name, table, features)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    return str(folder)


def png(value, size=4):
    content = io.BytesIO()
    Image.fromarray(np.full((size, size), value, np.uint8)).save(content, "PNG")
    return {"bytes": content.getvalue(), "path": None}


def images(values, labels, **more):
    rows = {"image": pa.array([png(value) for value in values], IMAGE), "label": pa.array(labels), **more}
    return pa.table(rows), {"image": {"_type": "Image"}, "label": CLASSES}


def test_images_with_named_classes_and_clients(tmp_path):
    who = pa.array(["bo", "al", "bo", "cy"])
    path = dictionary(tmp_path / "pets", train=images([0, 50, 100, 255], [0, 1, 0, 1], who=who), test=images([7], [2]))
    dataset = Hf(path, client_column="who").load()
    assert dataset.num_classes == 3  # though nobody trains on an owl
    assert dataset.train_x.shape == (4, 1, 4, 4)
    assert dataset.train_x[:, 0, 0, 0].tolist() == [0, 50, 100, 255]
    assert (dataset.train_y.tolist(), dataset.test_y.tolist()) == ([0, 1, 0, 1], [2])
    assert dataset.owners.tolist() == [1, 0, 1, 2]
    assert float(dataset.inputs(dataset.train_x, torch.float32).max()) == 1  # from -1 to 1
    assert Hf(path, size=2).load().shape == (1, 2, 2)
    settings = {"data": "hf", "data.path": path, "data.client_column": "who", "data.partition": "natural"}
    assert len(problem_of(configure({**settings, "model": "softmax"})).clients) == 3


def test_text_and_a_share_for_testing(tmp_path):
    texts = ["good film", "bad film", "good good plot", "bad bad plot"] * 5
    table = pa.table({"text": texts, "label": ["yes", "no", "yes", "no"] * 5, "stars": [1.0] * 20})
    folder = saved(tmp_path / "films", table, pieces=3)
    dataset = Hf(str(folder), words=3, vocabulary=6, test_share=0.2).load()
    assert (dataset.num_classes, dataset.vocabulary, len(dataset.train_y), len(dataset.test_y)) == (2, 6, 16, 4)
    bad, good, film = 2, 3, 4
    tokens = {tuple(row) for row in torch.cat([dataset.train_x, dataset.test_x]).tolist()}
    assert tokens == {(0, good, film), (0, bad, film), (good, good, 5), (bad, bad, 5)}
    is_good = (dataset.train_x == good).any(1)
    assert torch.equal(is_good.long(), dataset.train_y)  # no before yes


def test_lists_of_numbers(tmp_path):
    kind = pa.list_(pa.float32(), 3)
    table = pa.table({"x": pa.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]], kind), "y": [0, 1, 0], "id": ["a", "b", "c"]})
    path = dictionary(tmp_path / "n", train=(table, {}), test=(table, {}))
    dataset = Hf(path, input="x", label="y").load()
    assert dataset.train_x.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_a_run_is_known_by_the_content(tmp_path):
    first = dictionary(tmp_path / "one", train=images([1, 2], [0, 1]), test=images([3], [1]))
    same = dictionary(tmp_path / "two", train=images([1, 2], [0, 1]), test=images([3], [1]))
    other = dictionary(tmp_path / "three", train=images([1, 9], [0, 1]), test=images([3], [1]))
    assert Hf(first).fingerprint() == Hf(same).fingerprint() != Hf(other).fingerprint()


def test_columns_that_cannot_be_guessed_or_used(tmp_path):
    table = pa.table({"a": ["x y", "z"], "b": ["x", "y"], "n": [0, 1], "when": [1.5, 2.5]})
    path = str(saved(tmp_path / "t", table))
    for settings, message in (
        ({}, r"name the column of the label by --data.label: there are a, b, n, when"),
        ({"label": "n"}, r"name the column of the input by --data.input: there are a, b, when"),
        ({"label": "nn"}, r"no column 'nn': did you mean 'n'"),
        ({"label": "n", "input": "when"}, r"column 'when' must hold images, text or lists of numbers, got double"),
        ({"label": "n", "input": "a", "client_column": "n"}, r"must be different columns"),
        ({"label": "when", "input": "a"}, r"column 'when' must hold classes, whole numbers or text, got float"),
        ({"label": "n", "input": "a", "client_column": "who"}, r"no column 'who': there are a, b, n, when"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            Hf(path, **settings).load()
        assert "\n" not in str(caught.value)


def test_damage_is_named_in_one_line(tmp_path):
    good = images([1, 2, 3, 4], [0, 1, 2, 0])
    for message, damage in {
        r"data.path must be a folder that save_to_disk has written": lambda folder: folder.rename(tmp_path / "away"),
        r"no split 'train' in .*: there are dev": lambda f: (f / "dataset_dict.json").write_text('{"splits": ["dev"]}'),
        r"expected state.json in": lambda folder: (folder / "train" / "state.json").unlink(),
        r"state.json must name the files": lambda folder: (folder / "train" / "state.json").write_text("{}"),
        r"cannot read .*state.json": lambda folder: (folder / "train" / "state.json").write_text("{"),
        r"arrow is missing": lambda folder: next((folder / "train").glob("*.arrow")).unlink(),
        r"is not a whole Arrow file": lambda folder: next((folder / "train").glob("*.arrow")).write_bytes(b"no arrow"),
    }.items():
        folder = tmp_path / f"d{len(message)}"
        path = dictionary(folder, train=good, test=images([5], [1]))
        damage(folder)
        with pytest.raises(UserError, match=message) as caught:
            Hf(path).load()
        assert "\n" not in str(caught.value)


def test_rows_that_cannot_be_used(tmp_path):
    table, features = images([1, 2], [0, 1])
    cases = {
        r"classes 0 to 2, got -1 to 1; -1 stands for a missing label": table.set_column(1, "label", pa.array([-1, 1])),
        r"column 'label' has no value in 1 of 2 rows": table.set_column(1, "label", pa.array([None, 1])),
        r"has no image in row 2": table.set_column(0, "image", pa.array([png(1), NOTHING], IMAGE)),
        r"row 1 is not an image": table.set_column(0, "image", pa.array([{**NOTHING, "bytes": b"x"}, png(1)], IMAGE)),
    }
    for number, (message, broken) in enumerate(cases.items()):
        folder = saved(tmp_path / str(number), broken, features)
        with pytest.raises(UserError, match=message):
            Hf(str(folder)).load()
    ragged = pa.table({"x": [[1.0], [1.0, 2.0]], "label": [0, 1]})
    with pytest.raises(UserError, match="lists of one length"):
        Hf(str(saved(tmp_path / "ragged", ragged))).load()
    huge = pa.table({"x": [[1.0], [1e39]], "label": [0, 1]})
    with pytest.raises(UserError, match=r"column 'x' holds a number beyond 3.4e\+38 in row 2; correct"):
        Hf(str(saved(tmp_path / "huge", huge))).load()
    unseen = {"train": (pa.table({"x": [[1.0], [2.0]], "label": ["a", "b"]}), {})}
    unseen["test"] = (pa.table({"x": [[1.0]], "label": ["c"]}), {})
    with pytest.raises(UserError, match=r"class \['c'\] of column 'label' is in the test split but not in train"):
        Hf(dictionary(tmp_path / "unseen", **unseen)).load()
    with pytest.raises(UserError, match="no split 'dev'"):
        Hf(dictionary(tmp_path / "dev", train=(table, features)), test_split="dev").load()
    for settings in ({"path": ""}, {"size": 0}, {"words": 0}):
        with pytest.raises(UserError, match=r"data\."):
            Hf(**{"path": str(tmp_path), **settings})
