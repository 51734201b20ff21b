"""Brute force for what is merged layer by layer: inputs, slopes and factors of the cases' network, sample by sample."""

import torch

# The two layers of `tests.support.cases.network`.
LAYERS = ("0", "2")


def seeds(p, label, kind):
    """Slopes of the log-likelihood at the logits, as (weight, vector)."""
    unit = torch.eye(len(p), dtype=p.dtype)
    return [(float(p[k]), unit[k] - p) for k in range(len(p))] if kind == "exact" else [(1.0, unit[label] - p)]


def joint(params, layer):
    """[W, b] of a layer."""
    return torch.cat([params[f"{layer}.weight"], params[f"{layer}.bias"][:, None]], dim=1)


def inputs_of(case, theta, places):
    """What each layer gets for some samples, with a one appended: a row for each sample."""
    x = case.dataset.train_x[places]
    one = torch.ones(len(x), 1, dtype=torch.float64)
    hidden = torch.tanh(x @ theta["0.weight"].T + theta["0.bias"])
    return {"0": torch.cat([x, one], dim=1), "2": torch.cat([hidden, one], dim=1)}


def factors_of(case, theta, places, kind):
    """A and G of both layers, the slopes `exact` or `empirical`."""
    x, y = case.dataset.train_x[places], case.dataset.train_y[places]
    one = torch.ones(1, dtype=torch.float64)
    found = {name: [0.0, 0.0] for name in LAYERS}
    for sample, label in zip(x, y, strict=True):
        hidden = (theta["0.weight"] @ sample + theta["0.bias"]).detach().requires_grad_()
        logits = theta["2.weight"] @ torch.tanh(hidden) + theta["2.bias"]
        p = logits.detach().softmax(0)
        for name, given in (("0", sample), ("2", torch.tanh(hidden).detach())):
            row = torch.cat([given, one])
            found[name][0] = found[name][0] + torch.outer(row, row) / len(y)
        for weight, seed in seeds(p, label, kind):
            (slope,) = torch.autograd.grad(logits, hidden, seed, retain_graph=True)
            found["0"][1] = found["0"][1] + weight * torch.outer(slope, slope) / len(y)
            found["2"][1] = found["2"][1] + weight * torch.outer(seed, seed) / len(y)
    return found
