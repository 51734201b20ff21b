"""Gaussians whose precision is block-diagonal: independent Gaussians, each over some of the parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fl_lightning.gaussian.base import Gaussian
from fl_lightning.gaussian.damping import Merging
from fl_lightning.gaussian.diagonal import Diagonal
from fl_lightning.gaussian.product import merged
from fl_lightning.params import Params, count

# Between the name of a block and that of a part of its precision.
SEPARATOR = " / "


@dataclass(frozen=True)
class Blocks(Gaussian, stored_as="fl_lightning.gaussian.blocks.Blocks"):
    """Blocks of any form, mostly one for each layer.

    Attributes:
        mean: mu of all parameters, in the model's order.
        blocks: The precisions, by the name of the block, each as a Gaussian with an empty mean.
        names: Which parameters each block is over.
    """

    mean: Params
    blocks: dict[str, Gaussian]
    names: tuple[tuple[str, ...], ...]
    static: ClassVar[tuple[str, ...]] = ("names",)

    @classmethod
    def of(cls, mean: Params, parts: Sequence[tuple[str, Gaussian]]) -> Self:
        """Put together from Gaussians over disjoint parameters, which have their means."""
        names = tuple(tuple(part.mean) for _, part in parts)
        return cls(mean, {key: part.with_mean({}) for key, part in parts}, names)

    def parted(self, params: Params | None = None) -> list[tuple[str, Gaussian, Params]]:
        """Every block with its mean, and its share of some parameters."""
        whole = self.mean if params is None else params
        found = []
        for (key, block), names in zip(self.blocks.items(), self.names, strict=True):
            mean = {name: self.mean[name] for name in names} if self.mean else {}
            found.append((key, block.with_mean(mean), {name: whole[name] for name in names}))
        return found

    def apply(self, vector: Params) -> Params:
        return _ordered([block.apply(part) for _, block, part in self.parted(vector)], vector)

    def solve(self, vector: Params) -> Params:
        return _ordered([block.solve(part) for _, block, part in self.parted(vector)], vector)

    def log_determinant(self) -> Tensor:
        return torch.stack([block.log_determinant() for _, block, _ in self.parted()]).sum()

    def damped(self, damping: float) -> Self:
        return replace(self, blocks={key: block.damped(damping) for key, block in self.blocks.items()})

    @classmethod
    def product(cls, posteriors: Sequence[Self], weights: Sequence[float], damping: float = 0.0) -> Self:
        return cls._blockwise(posteriors, lambda own: type(own[0]).product(own, weights, damping))

    @classmethod
    def merged(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> Self:
        """Block by block, so that relative damping is relative to the block, and each goes as far as it may."""
        return cls._blockwise(posteriors, lambda own: merged(own, weights, merging))

    @classmethod
    def summed(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> Self:
        return cls._blockwise(posteriors, lambda own: type(own[0]).summed(own, weights, merging))

    @classmethod
    def damped_posteriors(cls, posteriors: Sequence[Self], weights: Sequence[float], merging: Merging) -> list[Self]:
        columns = [type(own[0]).damped_posteriors(own, weights, merging) for own in _columns(posteriors)]
        return [
            cls.of(posterior.mean, list(zip(posterior.blocks, row, strict=True)))
            for posterior, row in zip(posteriors, zip(*columns, strict=True), strict=True)
        ]

    @classmethod
    def _blockwise(cls, posteriors: Sequence[Self], combine: Callable[[Sequence[Any]], Gaussian]) -> Self:
        like = posteriors[0]
        found = [combine(own) for own in _columns(posteriors)]
        mean = _ordered([block.mean for block in found], like.mean)
        return cls.of(mean, list(zip(like.blocks, found, strict=True)))

    @classmethod
    def alikeness(cls, posteriors: Sequence[Self]) -> dict[str, float]:
        return {}  # the entries of factors are not those of the precision

    def diagonal(self) -> Params:
        return _ordered([block.diagonal() for _, block, _ in self.parted()], self.mean)

    def trace(self) -> float:
        return sum(block.trace() for _, block, _ in self.parted())

    def largest_eigenvalue(self) -> float:
        return max(block.largest_eigenvalue() for _, block, _ in self.parted())

    def parts(self) -> Params:
        return {
            f"{key}{SEPARATOR}{name}": part
            for key, block in self.blocks.items()
            for name, part in block.parts().items()
        }

    def with_parts(self, parts: Params) -> Self:
        def own(key: str, block: Gaussian) -> Gaussian:
            return block.with_parts({name: parts[f"{key}{SEPARATOR}{name}"] for name in block.parts()})

        return replace(self, blocks={key: own(key, block) for key, block in self.blocks.items()})

    def prior(self, exact: bool) -> Gaussian:
        """Products with all factors in every step cost more than the step itself: the diagonal, unless exact."""
        return self if exact else Diagonal(self.mean, self.diagonal())

    def notes(self) -> dict[str, float]:
        """The largest of each over the blocks."""
        notes: dict[str, float] = {}
        for block in self.blocks.values():
            for name, value in block.notes().items():
                notes[name] = max(value, notes.get(name, value))
        return notes

    def numbers_sent(self) -> int:
        return count(self.mean) + sum(block.numbers_sent() for block in self.blocks.values())


def _columns(posteriors: Sequence[Blocks]) -> list[list[Gaussian]]:
    """The posteriors' Gaussians of each block."""
    rows = [[block for _, block, _ in posterior.parted()] for posterior in posteriors]
    return [list(column) for column in zip(*rows, strict=True)]


def _ordered(parts: Sequence[Params], like: Params) -> Params:
    found: Params = {}
    for part in parts:
        found |= part
    return {name: found[name] for name in like}
