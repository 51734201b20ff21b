import pytest
import torch

from fl_lightning import params


def random_models(number=4, dtype=torch.float32):
    stream = torch.Generator().manual_seed(0)
    return [
        {"w": torch.randn(3, 2, generator=stream).to(dtype), "b": torch.randn(2, generator=stream).to(dtype)}
        for _ in range(number)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_average_is_a_sum_of_differences_in_double(dtype):
    start, *models = random_models(dtype=dtype)
    weights = [0.5, 0.3, 0.2]
    kept = [{name: value.clone() for name, value in model.items()} for model in [start, *models]]
    found = params.average(start, models, weights, rate=0.7)
    for name in start:
        base = start[name].double()
        step = sum(w * (m[name].double() - base) for w, m in zip(weights, models, strict=True))
        assert torch.allclose(found[name], (base + 0.7 * step).to(dtype), rtol=1e-14 if dtype == torch.float64 else 0)
    assert all(torch.equal(a[name], b[name]) for a, b in zip(kept, [start, *models], strict=True) for name in a)


def test_a_single_model_is_taken_as_it_is():
    start, model = random_models(2)
    assert params.average(start, [model], [1.0])["w"] is model["w"]
    assert not torch.equal(params.average(start, [model], [1.0], rate=0.5)["w"], model["w"])


def test_weighted_sum_does_not_touch_its_inputs():
    models = random_models(3, torch.float64)
    kept = models[0]["w"].clone()
    total = params.weighted_sum(models, [1.0, 2.0, 3.0])
    assert torch.allclose(total["w"], models[0]["w"] + 2 * models[1]["w"] + 3 * models[2]["w"])
    assert torch.equal(models[0]["w"], kept)


def test_count_counts_tensors_only():
    assert params.count(({"w": torch.zeros(3, 2)}, 7, [torch.zeros(2)])) == 8


def test_all_finite_is_exact():
    assert params.all_finite({"w": torch.tensor([1e38, 1e38])})  # the sum overflows, no entry does
    assert not params.all_finite({"w": torch.tensor([1.0, float("nan")])})
    assert not params.all_finite({"w": torch.tensor([float("inf"), -float("inf")])})
