"""The small problems of `fl_lightning.testing`, and the engines on which our own tests run them."""

from fl_lightning.engines.functional import Functional
from fl_lightning.engines.lightning import Lightning
from fl_lightning.testing.cases import Case, equal_bits, final, largest_difference, network, ragged

__all__ = ["ENGINES", "Case", "equal_bits", "final", "largest_difference", "network", "ragged"]

ENGINES = {"loop": Functional(chunk=1), "vmap": Functional(chunk=4), "lightning": Lightning()}
