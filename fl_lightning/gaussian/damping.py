"""How Gaussian posteriors are multiplied: the damping, and what forms with Kronecker factors need beside it."""

from dataclasses import dataclass
from typing import Literal

# How a sum of Kronecker products is solved, and how it becomes one Kronecker product again.
Solver = Literal["cg", "factored"]
Projection = Literal["factors", "nearest"]


@dataclass(frozen=True)
class Merging:
    """Settings of a product.

    Attributes:
        damping: gamma, added to every precision.
        relative: Whether gamma counts in units of the mean precision.
        everywhere: Whether gamma is in numerator and denominator of the product, or in the denominator alone.
        gradients: The damping of the factor G of Kronecker products, with `damping` that of A; None adds gamma I to the
            whole product instead.
        solver: Conjugate gradients, or the product of the factors' own solutions.
        projection: What is kept of a sum of Kronecker products.
        trust: How far from the average the product may go; see `product.merged`. None is any distance.
    """

    damping: float = 0.0
    relative: bool = True
    everywhere: bool = True
    gradients: float | None = 1.0
    solver: Solver = "cg"
    projection: Projection = "factors"
    trust: float | None = None

    def gamma(self, trace: float, size: int) -> float:
        """The damping in absolute terms, of a precision with this trace over so many parameters."""
        return self.damping * trace / size if self.relative else self.damping

    def gamma_of_gradients(self, trace: float, size: int) -> float:
        """The same for the factor G."""
        assert self.gradients is not None
        return self.gradients * trace / size if self.relative else self.gradients
