"""Models of finished runs take inputs as their users have them."""

from copy import deepcopy

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file, save_file

from fl_lightning import experiment, load_model
from fl_lightning.data.preparation import Column, Preparation
from fl_lightning.data.sources.digits import Digits
from fl_lightning.errors import UserError
from fl_lightning.runs import saved_model
from fl_lightning.runs.config.run_config import configure

SETTINGS = {"method": "fedavg", "federation.rounds": 2, "training.lr": 0.1, "engine": "functional", "data.clients": 2}


def houses(number=80):
    """Columns of very different sizes, one of them text."""
    rng = np.random.default_rng(0)
    area, year, place = rng.normal(9e4, 2e4, number), rng.integers(1900, 2000, number), rng.integers(2, size=number)
    table = pd.DataFrame({"area": area, "year": year, "place": np.array(["hill", "shore"])[place]})
    table["price"] = 3 * area + 1e5 * place
    table["kind"] = np.where(area + 4e4 * place > 1.1e5, "villa", "hut")
    table["half"] = np.where(np.arange(number) % 4, "train", "test")
    return table


def run_of(table, out, **settings):
    table.to_csv(out / "houses.csv", index=False)
    data = {"data": "table", "data.path": str(out / "houses.csv"), "data.split": "half", "model": "softmax"}
    return experiment.run(configure(SETTINGS | data | settings), out)


def of_images(out):
    """A run on bytes, with a scaling of their own."""
    digits = Digits().load()
    x = {name: (getattr(digits, name) * 255).round().to(torch.uint8).numpy() for name in ("train_x", "test_x")}
    scaling = {"mean": np.array([0.3]), "std": np.array([0.2])}
    np.savez(out / "images.npz", train_y=digits.train_y.numpy(), test_y=digits.test_y.numpy(), **x, **scaling)
    data = {"data": "arrays", "data.path": str(out / "images.npz"), "model": "softmax"}
    config = configure(SETTINGS | data)
    return experiment.run(config, out), config.source.load()


@pytest.mark.slow
def test_bytes_are_scaled_as_in_training(out):
    result, dataset = of_images(out)
    model = load_model(result)
    found = model.predict(dataset.test_x)
    assert float((found.argmax(1) == dataset.test_y).double().mean()) == pytest.approx(result.history[-1]["GA"])
    assert torch.allclose(found.sum(1), torch.ones(len(found)))
    assert torch.equal(found, model.predict(dataset.test_x[:, 0].numpy()))  # grey images without a channel
    assert torch.equal(found, model(dataset.inputs(dataset.test_x, torch.float32)).softmax(1))
    assert torch.equal(found, deepcopy(model).predict(dataset.test_x))
    with pytest.raises(UserError, match=r"inputs must hold bytes \(uint8\).* got torch\.float32; .* model\(x\)"):
        model.predict(dataset.test_x / 255)


@pytest.mark.slow
def test_rows_of_a_table_are_standardised_by_the_training_rows(out):
    table = houses()
    result = run_of(table, out, **{"data.label": "kind", "data.drop": ["price"]})
    test = table[table["half"] == "test"]
    said = load_model(result).predict(test).argmax(1)
    labels = torch.tensor((test["kind"] == "villa").to_numpy()).long()
    assert float((said == labels).double().mean()) == pytest.approx(result.history[-1]["GA"])
    with pytest.raises(UserError, match="got none of the name place"):
        load_model(result).predict(test.drop(columns="place"))
    with pytest.raises(UserError, match="column 'place' must hold one of hill, shore, got 'moon'"):
        load_model(result).predict(test.assign(place="moon"))


@pytest.mark.slow
def test_predictions_of_a_regression_are_in_the_units_of_its_column(out):
    table = houses().drop(columns=["kind", "place"])
    result = run_of(table, out, **{"data.label": "price", "data.task": "regression", "data.noise": 0.5})
    test, train = (table[table["half"] == half] for half in ("test", "train"))
    found = load_model(result).predict(test[["area", "year"]].to_numpy()).flatten()
    errors = (found.numpy() - test["price"]) / train["price"].std(ddof=0)
    assert float(np.sqrt((errors**2).mean())) == pytest.approx(result.history[-1]["RMSE"], rel=1e-4)


@pytest.mark.slow
def test_a_model_of_an_earlier_version_still_loads_and_says_what_it_lacks(out):
    result, dataset = of_images(out)
    raw = dataset.test_x
    expected = load_model(result).predict(raw)
    file = result.folder / saved_model.FILE
    save_file(load_file(file), file)
    with pytest.warns(UserWarning, match="has not saved how its inputs are prepared"):
        assert torch.equal(load_model(result).predict(raw), expected)


def test_a_preparation_comes_back_from_its_text():
    columns = (Column("age", 40.5, 12.0), Column("sex", values=("f", "m")))
    for one in (
        Preparation(("float32",), (0.5,), (0.5,), columns, columns[:1]),
        Preparation(("uint8",) * 2, (0,), (1,)),
    ):
        assert Preparation.of_text(one.text()) == one


def test_several_inputs_keep_their_structure():
    preparation = Preparation(("uint8", "int64", "float32"), (0.5,), (0.5,))
    raw = {"image": torch.zeros(2, 1, 3, 3, dtype=torch.uint8), "words": torch.ones(2, 4).int(), "age": np.ones((2, 1))}
    found = preparation.inputs(raw, torch.float64)
    assert list(found) == list(raw)
    assert found["image"].unique().tolist() == [-1]
    assert (found["words"].dtype, found["age"].dtype) == (torch.long, torch.float64)
    assert isinstance(preparation.inputs(tuple(raw.values()), torch.float64), tuple)
