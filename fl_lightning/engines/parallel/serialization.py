"""Objects on their way to another process and back.

Both sides have some things already (the data, the model, the plan of a client): these travel as names. Tensors travel
as arrays beside the rest, which Ray keeps in shared memory: a reader gets a view of it, and no copy. Tensors
that lie on the sender's device come to lie on the receiver's, whatever the two are called.
"""

import io
import pickle
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fl_lightning import discovery

# As torch allocates: the bits of a matrix product may depend on where in memory its operands begin.
ALIGNMENT = 64


class Serialized(NamedTuple):
    """A packed object: the pickled rest, the tensors, and hashes of the plug-ins whose classes may be in it."""

    rest: bytes
    arrays: list[NDArray[Any]]
    plugins: dict[str, str]


class Layout(NamedTuple):
    """How an array becomes the tensor again that it was.

    Attributes:
        place: Of its array in the serialized object.
        shape: Of the tensor.
        stride: Of the tensor: what a matrix product does in detail depends on the order of its operands' numbers.
        dtype: Of the tensor.
        moves: Whether it lay on the sender's device.
    """

    place: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    moves: bool


def pack(value: Any, known: Mapping[str, Any], device: torch.device) -> Serialized:
    """Pack an object.

    Args:
        value: The object.
        known: What the receiver has, by the name it has it under; compared by identity.
        device: The one of which tensors are put onto the receiver's.
    """
    from ray import cloudpickle  # classes of notebooks and scripts travel with their code

    names = {id(thing): name for name, thing in known.items()}
    arrays: list[NDArray[Any]] = []

    class Packer(cloudpickle.Pickler):
        def __init__(self, file: io.BytesIO) -> None:
            super().__init__(file, protocol=5)  # type: ignore[no-untyped-call]
            self._seen: dict[int, tuple[Tensor, Layout]] = {}

        def persistent_id(self, thing: Any) -> Any:
            if (name := names.get(id(thing))) is not None:
                return name
            if type(thing) is Tensor and thing.layout == torch.strided:
                return self._layout(thing)
            return None

        def _layout(self, tensor: Tensor) -> Layout:
            if id(tensor) in self._seen:
                return self._seen[id(tensor)][1]
            on_cpu = tensor.detach().cpu()
            if not _is_dense(on_cpu):
                on_cpu = on_cpu.contiguous()
            numbers = on_cpu.as_strided((on_cpu.numel(),), (1,))
            arrays.append(numbers.view(torch.uint8).numpy() if numbers.numel() else np.empty(0, np.uint8))
            moves = tensor.device.type == device.type
            layout = Layout(len(arrays) - 1, tuple(on_cpu.shape), on_cpu.stride(), on_cpu.dtype, moves)
            self._seen[id(tensor)] = tensor, layout  # kept alive: an id is given away again
            return layout

    file = io.BytesIO()
    Packer(file).dump(value)  # type: ignore[no-untyped-call]
    return Serialized(file.getvalue(), arrays, discovery.imported_plugins())


def unpack(serialized: Serialized, known: Mapping[str, Any], device: torch.device, views: bool = False) -> Any:
    """The object again.

    Args:
        serialized: As it came.
        known: What this process has, by name.
        device: Where tensors go that lay on the sender's.
        views: Whether tensors may be views of Ray's memory, which is read-only. Otherwise they are copies.

    Raises:
        UserError: If it needs a plug-in that this process does not see, or of which it has another one.
    """
    rebuilt: dict[int, Tensor] = {}

    class Unpacker(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            discovery.ensure_imported(module, serialized.plugins.get(module))
            return super().find_class(module, name)

        def persistent_load(self, name: Any) -> Any:
            if isinstance(name, str):
                return known[name]
            layout: Layout = name
            if layout.place not in rebuilt:
                rebuilt[layout.place] = _tensor(serialized.arrays[layout.place], layout, device, views)
            return rebuilt[layout.place]

    return Unpacker(io.BytesIO(serialized.rest)).load()


def _tensor(array: NDArray[Any], layout: Layout, device: torch.device, view: bool) -> Tensor:
    # NumPy gives an empty array any address, and PyTorch's view of one has no stride to reinterpret.
    if not view or array.nbytes == 0 or array.ctypes.data % ALIGNMENT:
        numbers = torch.empty(array.nbytes, dtype=torch.uint8)
        numbers.numpy()[:] = array
    else:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not writable.*")
            numbers = torch.from_numpy(array)
    tensor = numbers.view(layout.dtype).as_strided(layout.shape, layout.stride)
    return tensor.to(device) if layout.moves else tensor


def _is_dense(tensor: Tensor) -> bool:
    """Whether its numbers fill a stretch of memory, each once, in whatever order.

    >>> _is_dense(torch.ones(2, 3).T), _is_dense(torch.ones(4, 4)[:, 1]), _is_dense(torch.ones(1).expand(3))
    (True, False, False)
    """
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size if size != 1 else 1
    return True
