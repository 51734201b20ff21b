"""A posterior on disk: one safetensors file. Reading executes no code, and a damaged file is refused.

Tensors: `mean.NAME` and `buffer.NAME`, the network's state; for every block `block.I.spectrum` (the eigenvalues of H,
per sample) and its eigenvectors: `block.I.out_basis` and `block.I.in_basis` of a layer M = [W, b], or `block.I.basis`;
`member.J.NAME` and `member_buffer.J.NAME` of an ensemble. The header's `about` is JSON: form, number of samples, prior
precision, temperature, and which parameters the blocks belong to.
"""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as as_bytes
from torch import Tensor, nn

from fl_lightning.errors import UserError, require
from fl_lightning.metrics.uncertainty.eigenblocks import Block, DenseBlock, LayerBlock
from fl_lightning.metrics.uncertainty.posterior import Member, Posterior, Scaling
from fl_lightning.models.task import Task, Weights
from fl_lightning.system.atomic import write_atomically
from fl_lightning.system.checksums import header_checksum, tensor_checksum

FILE = "posterior.safetensors"
FORMAT = "fl_lightning posterior 1"
NUMBERS = (
    "form",
    "samples",
    "loss",
    "prior_precision",
    "temperature",
    "logit_temperature",
    "seed",
    "draws",
    "glm_draws",
)
# Files of earlier versions do not say it: there was one.
SOURCE = "source"


def save(posterior: Posterior, path: Path | str) -> Path:
    """Write a posterior, as a whole or not at all."""
    path = Path(path)
    tensors = {f"mean.{name}": value for name, value in posterior.weights.params.items()}
    tensors |= {f"buffer.{name}": value for name, value in posterior.weights.buffers.items()}
    blocks = []
    for place, block in enumerate(posterior.blocks):
        values = {item.name: getattr(block, item.name) for item in fields(block)}
        tensors |= {f"block.{place}.{name}": value for name, value in values.items() if isinstance(value, Tensor)}
        blocks.append({name: value for name, value in values.items() if not isinstance(value, Tensor)})
    for place, (weights, _) in enumerate(posterior.members):
        tensors |= {f"member.{place}.{name}": value for name, value in weights.params.items()}
        tensors |= {f"member_buffer.{place}.{name}": value for name, value in weights.buffers.items()}
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    about = {name: getattr(posterior, name) for name in (*NUMBERS, SOURCE)}
    about |= {"blocks": blocks, "scaling": posterior.scaling, "shares": [share for _, share in posterior.members]}
    header = {"format": FORMAT, "about": json.dumps(about), "tensors": str(tensor_checksum(tensors))}
    write_atomically(path, as_bytes(tensors, metadata={**header, "checksum": header_checksum(header)}))
    return path


def load(path: Path | str, model: nn.Module | Task) -> Posterior:
    """Read a posterior.

    Args:
        path: The file.
        model: A network of the same architecture; its own weights do not matter.

    Raises:
        UserError: If there is no such file, it is damaged, or of another network.
    """
    path = Path(path)
    task = model if isinstance(model, Task) else Task(model)
    about, tensors = _read(path)
    params, buffers = _named(tensors, "mean."), _named(tensors, "buffer.")
    expected = {name: list(value.shape) for name, value in task.initial.params.items()}
    found = {name: list(value.shape) for name, value in params.items()}
    require(
        found == expected,
        f"{path} is the posterior of another model: expected {_in_words(expected)}, got {_in_words(found)}; "
        "give the model that it was made for",
    )
    tensors = {name: value.to(task.device) for name, value in tensors.items()}

    def weights(params: str, buffers: str) -> Weights:
        return Weights(
            {name: tensors[f"{params}{name}"].to(like.dtype) for name, like in task.initial.params.items()},
            {name: tensors[f"{buffers}{name}"] for name in task.initial.buffers},
        )

    require(set(buffers) == set(task.initial.buffers), f"{path} is the posterior of another model: its buffers differ")
    blocks = tuple(_block(place, one, tensors) for place, one in enumerate(about["blocks"]))
    members = tuple(
        Member(weights(f"member.{place}.", f"member_buffer.{place}."), share)
        for place, share in enumerate(about["shares"])
    )
    scaling = Scaling(*(tuple(values) for values in about["scaling"]))
    numbers = {name: about[name] for name in (*NUMBERS, SOURCE) if name in about or name != SOURCE}
    return Posterior(task, weights("mean.", "buffer."), blocks=blocks, members=members, scaling=scaling, **numbers)


def _block(place: int, about: dict[str, Any], tensors: dict[str, Tensor]) -> Block:
    own = _named(tensors, f"block.{place}.")
    if "names" in about:
        layers = tuple((weight, bias) for weight, bias in about["layers"])
        return DenseBlock(tuple(about["names"]), own["spectrum"], own["basis"], layers)
    bases = {name: own.get(name) for name in ("out_basis", "in_basis")}
    return LayerBlock(about["weight"], about["bias"], own["spectrum"], **bases)


def _named(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    require(
        path.is_file(),
        f"expected a saved posterior, got {path}, where there is none; make it with `fl-lightning uncertainty RUN` or "
        "--uncertainty.final_round true",
    )
    try:
        with safe_open(path, framework="pt") as file:
            header = dict(file.metadata() or {})
            require(header.get("format") == FORMAT, f"{path} holds a posterior of another version; make it again")
            # Copies: in the file's memory tensors begin anywhere, and the rounding of matrix products depends on that.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); make it again with `fl-lightning uncertainty RUN`") from None
    found = header.pop("checksum", None)
    require(
        found == header_checksum(header) and header["tensors"] == str(tensor_checksum(tensors)),
        f"{path} is damaged (its checksum does not match); make it again with `fl-lightning uncertainty RUN`",
    )
    return json.loads(header["about"]), tensors


def _in_words(shapes: dict[str, list[int]]) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in shapes.items()) or "nothing"
