"""The parts of a posterior's precision, each by its eigenvectors and eigenvalues.

With H = U diag(s) U^T the precision P = m/T H + tau I has the same eigenvectors for every tau, so that variances,
draws and determinants for another prior cost no new decomposition. A layer's H is diag(s), or G (x) A with factors
G = U_G diag(s_G) U_G^T and A alike, whose eigenvalues are all products; a dense block has any H.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fl_lightning.metrics.uncertainty.linearised import Layer
from fl_lightning.params import Params, flatten, unflatten


class Features(NamedTuple):
    """The Jacobian of the logits in the eigenvectors of a block.

    Attributes:
        gradients: Samples x classes x rows; or with `squares` None, samples x classes x eigenvectors.
        squares: Samples x columns: of a layer that is used at one place, the Jacobian is an outer product, and only the
            squares of its second factor matter.
    """

    gradients: Tensor
    squares: Tensor | None

    def covariance(self, inverse: Tensor) -> Tensor:
        """J P^-1 J^T, samples x classes x classes, given 1/P in the eigenvectors."""
        return (self.gradients * self._weights(inverse)) @ self.gradients.mT

    def variance(self, inverse: Tensor) -> Tensor:
        """Its diagonal, samples x classes."""
        return (self.gradients.square() * self._weights(inverse)).sum(2)

    def variances(self, inverses: Tensor) -> Tensor:
        """The same for several P, stacked: several x samples x classes."""
        squares, inverses = self.gradients.square(), inverses.to(self.gradients.dtype)
        if self.squares is None:
            return torch.einsum("bkd,gd->gbk", squares, inverses.flatten(1))
        return torch.einsum("bkr,gbr->gbk", squares, torch.einsum("bc,grc->gbr", self.squares, inverses))

    def _weights(self, inverse: Tensor) -> Tensor:
        if self.squares is None:
            return inverse.to(self.gradients.dtype).reshape(1, 1, -1)
        return (self.squares @ inverse.to(self.squares.dtype).T).unsqueeze(1)


@dataclass(frozen=True)
class LayerBlock:
    """The parameters M = [W, b] of one linear or convolutional layer.

    Attributes:
        weight: Name of W.
        bias: Name of b, or None.
        spectrum: Eigenvalues of H, outputs x inputs, in float64.
        out_basis: U_G; None is the identity.
        in_basis: U_A; None is the identity.
    """

    weight: str
    bias: str | None
    spectrum: Tensor
    out_basis: Tensor | None = None
    in_basis: Tensor | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.weight,) if self.bias is None else (self.weight, self.bias)

    def features(self, found: Mapping[str, Layer]) -> Features:
        rows, gradients = found[self.weight]
        rows = rows if self.in_basis is None else rows @ self.in_basis.to(rows.dtype)
        gradients = gradients if self.out_basis is None else gradients @ self.out_basis.to(gradients.dtype)
        if rows.shape[1] == 1:
            return Features(gradients.squeeze(2), rows.squeeze(1).square())
        return Features(torch.einsum("bkso,bsi->bkoi", gradients, rows).flatten(2), None)

    def offset(self, coordinates: Tensor, like: Params) -> Params:
        """Coordinates in the eigenvectors as an offset of the parameters."""
        value = coordinates
        value = value if self.out_basis is None else self.out_basis @ value
        value = value if self.in_basis is None else value @ self.in_basis.T
        if self.bias is None:
            return {self.weight: value.view(like[self.weight].shape)}
        return {self.weight: value[:, :-1].reshape(like[self.weight].shape), self.bias: value[:, -1]}


@dataclass(frozen=True)
class DenseBlock:
    """Any parameters, with every correlation between them.

    Attributes:
        names: Of the parameters; rows of the basis are in the order of `flatten`.
        spectrum: Eigenvalues of H, in float64.
        basis: U, eigenvectors in its columns.
        layers: The weights and biases of the layers that they belong to.
    """

    names: tuple[str, ...]
    spectrum: Tensor
    basis: Tensor
    layers: tuple[tuple[str, str | None], ...]

    def features(self, found: Mapping[str, Layer]) -> Features:
        pieces = torch.split(self.basis, self._sizes(found))
        basis = dict(zip(self.names, pieces, strict=True))
        total: list[Tensor] = []
        for weight, bias in self.layers:
            rows, gradients = found[weight]
            plain = rows if bias is None else rows[..., :-1]
            own = basis[weight].to(rows.dtype)
            if rows.shape[1] == 1:  # one side at a time: the Jacobian itself would be classes times as large
                image = torch.einsum("bi,oid->bod", plain.squeeze(1), own.view(gradients.shape[3], plain.shape[2], -1))
                image = image if bias is None else image + basis[bias].to(rows.dtype)
                total.append(gradients.squeeze(2) @ image)
                continue
            total.append(torch.einsum("bkso,bsi->bkoi", gradients, plain).flatten(2) @ own)
            if bias is not None:
                total.append(gradients.sum(2) @ basis[bias].to(rows.dtype))
        return Features(torch.stack(total).sum(0), None)

    def _sizes(self, found: Mapping[str, Layer]) -> list[int]:
        sizes = {}
        for weight, bias in self.layers:
            rows, gradients = found[weight]
            inputs = rows.shape[2] - (bias is not None)
            sizes[weight] = gradients.shape[3] * inputs
            if bias is not None:
                sizes[bias] = gradients.shape[3]
        return [sizes[name] for name in self.names]

    def offset(self, coordinates: Tensor, like: Params) -> Params:
        """Coordinates in the eigenvectors as an offset of the parameters."""
        return unflatten(self.basis @ coordinates, {name: like[name] for name in self.names})


Block = LayerBlock | DenseBlock


def diagonal_block(weight: str, bias: str | None, curvature: Params) -> LayerBlock:
    """A layer whose parameters are independent of each other."""
    spectrum = curvature[weight].double().flatten(1)
    if bias is not None:
        spectrum = torch.cat([spectrum, curvature[bias].double()[:, None]], dim=1)
    return LayerBlock(weight, bias, spectrum)


def kron_block(weight: str, bias: str | None, inputs: Tensor, gradients: Tensor) -> LayerBlock:
    """A layer with the Kronecker factors A and G."""
    by_input, in_basis = torch.linalg.eigh(inputs.double())
    by_output, out_basis = torch.linalg.eigh(gradients.double())
    spectrum = torch.outer(by_output.clamp(min=0), by_input.clamp(min=0))  # rounding leaves small negative ones
    return LayerBlock(weight, bias, spectrum, out_basis, in_basis)


def dense_block(matrix: Tensor, layers: tuple[tuple[str, str | None], ...], like: Params) -> DenseBlock:
    """Parameters with a full matrix in the order of `flatten`."""
    mine = {name for layer in layers for name in layer if name is not None}
    names = tuple(name for name in like if name in mine)
    assert len(flatten({name: like[name] for name in names})) == len(matrix)
    spectrum, basis = torch.linalg.eigh(matrix.double())
    return DenseBlock(names, spectrum.clamp(min=0), basis, layers)
