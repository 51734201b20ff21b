"""Products within reach of their posteriors: the product itself where it is, nearer to the average where it is not."""

import pytest
import torch

from fl_lightning.errors import UserError
from fl_lightning.gaussian.blocks import Blocks
from fl_lightning.gaussian.damping import Merging
from fl_lightning.gaussian.input_kronecker import Inputs
from fl_lightning.gaussian.product import merged
from fl_lightning.methods.fola_extended import FolaExtended
from tests.support.cases import final, largest_difference, ragged

WEIGHTS = (0.5, 0.3, 0.2)


def posteriors(seed=0, spread=3.0):
    """Three layers with moments of very different directions and lengths."""
    stream = torch.Generator().manual_seed(seed)
    found = []
    for _ in WEIGHTS:
        mean = {
            "weight": torch.randn(2, 4, generator=stream, dtype=torch.float64),
            "bias": torch.randn(2, generator=stream, dtype=torch.float64),
        }
        root = torch.randn(5, 5, generator=stream, dtype=torch.float64)
        root *= torch.exp(spread * torch.randn(5, generator=stream, dtype=torch.float64))
        found.append(Inputs(mean, root @ root.T))
    return found


def joined(params):
    return torch.cat([params["weight"], params["bias"][:, None]], 1)


def by_hand(own, damping):
    """sum_n w_n (A_n + gamma I) solved for each row, gamma relative to the mean of the diagonal."""
    total = sum(w * e.inputs for w, e in zip(WEIGHTS, own, strict=True))
    ridge = damping * total.diagonal().mean() * torch.eye(5, dtype=torch.float64)
    right = sum(w * joined(e.mean) @ (e.inputs + ridge) for w, e in zip(WEIGHTS, own, strict=True))
    return torch.linalg.solve(total + ridge, right.T).T


def reach(own, matrix):
    average = sum(w * joined(e.mean) for w, e in zip(WEIGHTS, own, strict=True))
    distances = [float((joined(e.mean) - average).norm()) for e in own]
    return float((matrix - average).norm()) / sum(d**2 for d in distances) ** 0.5


@pytest.mark.parametrize("trust", [0.05, 0.5, 1.0])
def test_damping_is_doubled_until_the_product_is_within_reach_and_no_longer(trust):
    doubled = 0
    for seed in range(20):
        own = posteriors(seed)
        damping = 1e-4
        while reach(own, by_hand(own, damping)) > trust:
            damping *= 2
            doubled += 1
        found = merged(own, WEIGHTS, Merging(damping=1e-4, trust=trust))
        assert torch.allclose(joined(found.mean), by_hand(own, damping), rtol=1e-7, atol=1e-9)
        free = merged(own, WEIGHTS, Merging(damping=1e-4))
        assert torch.equal(found.inputs, free.inputs)  # what is kept knows nothing of the damping
    assert doubled > 20


def test_without_damping_it_starts_to_be_damped():
    own = posteriors(1)
    found = merged(own, WEIGHTS, Merging(damping=0.0, trust=1e-3))
    assert 0 < reach(own, joined(found.mean)) <= 1e-3


def test_equal_experts_stay():
    own = [posteriors()[0]] * 3
    assert reach(posteriors(), joined(own[0].mean)) > 0
    found = merged(own, WEIGHTS, Merging(damping=1e-2, trust=0.1))
    assert largest_difference(found.mean, own[0].mean) < 1e-12


def test_every_block_has_a_reach_of_its_own():
    """A block within reach is the product's; its neighbour, out of reach, is damped for itself."""
    near, far = posteriors(3, spread=0.0), posteriors(4)
    trust = 1.01 * reach(near, by_hand(near, 1e-4))
    assert reach(far, by_hand(far, 1e-4)) > trust
    rows = []
    for one, other in zip(near, far, strict=True):
        parts = []
        for key, gaussian in (("near", one), ("far", other)):
            parts.append((key, gaussian.with_mean({f"{key}.{name}": value for name, value in gaussian.mean.items()})))
        rows.append(Blocks.of({**parts[0][1].mean, **parts[1][1].mean}, parts))
    found = Blocks.merged(rows, WEIGHTS, Merging(damping=1e-4, trust=trust)).mean
    alone = {key: torch.cat([found[f"{key}.weight"], found[f"{key}.bias"][:, None]], 1) for key in ("near", "far")}
    assert torch.allclose(alone["near"], by_hand(near, 1e-4), rtol=1e-9, atol=1e-12)
    assert reach(far, alone["far"]) <= trust


@pytest.mark.parametrize("form", ["diagonal", "inputs", "kron"])
def test_trust_leads_from_the_product_to_the_average(form):
    case = ragged().changed(rounds=1)
    settings = {"curvature_form": form, "strength": 0}
    free, wide, narrow, average = (
        final(case.run(FolaExtended(**settings, **more)))
        for more in ({}, {"trust": 1e6}, {"trust": 1e-6}, {"aggregation": "average"})
    )
    assert largest_difference(free, wide) == 0
    assert largest_difference(free, average) > 1e-3
    assert largest_difference(narrow, average) < 1e-5


def test_trust_must_be_positive_and_needs_damping_on_both_sides():
    with pytest.raises(UserError, match="trust must be > 0, or null, got 0"):
        FolaExtended(trust=0.0)
    with pytest.raises(UserError, match=r"trust needs --method\.damping_place both, got denominator"):
        FolaExtended(trust=1.0, damping_place="denominator")
