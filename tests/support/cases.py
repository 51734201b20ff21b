"""The small problems of `fl_lightning.testing`, and the engines on which our own tests run them."""

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.testing.cases import Case, equal_bits, final, largest_difference, network, ragged

__all__ = ["ENGINES", "SITUATIONS", "Case", "equal_bits", "final", "largest_difference", "network", "ragged"]

ENGINES = {"loop": Functional(chunk=1), "vmap": Functional(chunk=4), "lightning": Lightning()}
# In which every method is compared with its brute force.
SITUATIONS = {
    "full": {},
    "partial": {"fraction": 0.5, "rounds": 6},
    "uniform": {"weighting": "uniform"},
    "partial and uniform": {"fraction": 0.5, "rounds": 6, "weighting": "uniform"},
    "stragglers": {"straggler_fraction": 0.5, "epochs": 4},
    "decays and momentum": {"weight_decay": 0.01, "lr_decay": 0.5, "momentum": 0.5},
}
