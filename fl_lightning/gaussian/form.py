"""What a Gaussian over parameters can do, whatever the form of its precision."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from fl_lightning.params import Params, count, flatten, zip_map


class Gaussian(ABC):
    """N(mu, Lambda^-1) over named parameters. Lambda is an operator: some forms never hold it as a matrix.

    Attributes:
        mean: mu.
    """

    mean: Params

    @abstractmethod
    def apply(self, vector: Params) -> Params:
        """Lambda v, in the floating point type of v."""

    @abstractmethod
    def solve(self, vector: Params) -> Params:
        """Lambda^-1 v, in float64."""

    @abstractmethod
    def log_determinant(self) -> Tensor:
        """The logarithm of det Lambda, in float64."""

    @abstractmethod
    def damped(self, damping: float) -> Self:
        """The Gaussian with the precision Lambda + damping I."""

    @classmethod
    @abstractmethod
    def product(cls, experts: Sequence[Self], weights: Sequence[float], damping: float = 0.0) -> Self:
        """The Gaussian proportional to prod_n q_n^w_n, after damping every expert; see `posterior.product`."""

    def quadratic(self, vector: Params) -> Tensor:
        """v^T Lambda v, in float64."""
        doubles = zip_map(lambda v: v.double(), vector)
        return torch.dot(flatten(doubles), flatten(self.apply(doubles)))

    def distance(self, params: Params) -> Tensor:
        """D(theta) = 1/2 (theta - mu)^T Lambda (theta - mu): the negative log-density without its constant."""
        return 0.5 * self.quadratic(zip_map(lambda p, m: p.double() - m.double(), params, self.mean))

    def log_density(self, params: Params) -> Tensor:
        """The logarithm of N(theta | mu, Lambda^-1)."""
        return 0.5 * (self.log_determinant() - count(self.mean) * math.log(2 * math.pi)) - self.distance(params)
