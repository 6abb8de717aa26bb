"""New weights for a model that runs: where they come from, and whether they fit."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..errors import InvalidConfig, InvalidWeights, shown
from .weights import listed, weight_files

Weights = Mapping[str, torch.Tensor] | str | os.PathLike[str]
"""A state dict, a safetensors file, or a directory with the files of a checkpoint."""

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def read_weights(weights: Weights) -> dict[str, torch.Tensor]:
    """Return the tensors of `weights` by name; those of files in host memory.

    Raises:
        InvalidWeights: they are neither a mapping nor files that can be read.
    """
    if isinstance(weights, Mapping):
        for name, tensor in weights.items():
            if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
                raise InvalidWeights(
                    f"weights: {shown(name)} must be a name with a tensor, not {type(tensor).__name__}"
                )
        return dict(weights)
    if not isinstance(weights, str | os.PathLike):
        raise InvalidWeights(f"weights={shown(weights)} must be a state dict, or the path of safetensors")
    tensors: dict[str, torch.Tensor] = {}
    try:
        path = Path(weights).expanduser()
        for file in [path] if path.is_file() else weight_files(path):
            with safe_open(file, framework="pt", device="cpu") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # no mapping
    except (InvalidConfig, SafetensorError, OSError, RuntimeError, ValueError) as error:  # also ~nobody, and a NUL
        raise InvalidWeights(f"weights={shown(os.fspath(weights))} cannot be read: {error}") from error
    return tensors


def check_weights(
    tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], spare: Iterable[str], *, partial: bool
) -> None:
    """Check tensors against the model's.

    Args:
        shapes: of every tensor of the model, by its name.
        spare: names that may come along and say nothing new.
        partial: some may be missing.

    Raises:
        InvalidWeights: a name is unknown or missing, or a tensor has a wrong shape or dtype; the message names it.
    """
    unexpected, missing = tensors.keys() - shapes.keys() - set(spare), shapes.keys() - tensors.keys()
    if unexpected or (missing and not partial):
        raise InvalidWeights(
            f"the weights do not fit the model; missing: {listed(() if partial else missing)}; "
            f"unexpected: {listed(unexpected)}"
        )
    for name in tensors.keys() & shapes.keys():
        tensor = tensors[name]
        if tensor.shape != shapes[name]:
            raise InvalidWeights(f"{name} has shape {list(tensor.shape)}, the model's has {list(shapes[name])}")
        if tensor.dtype not in _DTYPES or tensor.layout != torch.strided or tensor.device.type == "meta":
            raise InvalidWeights(f"{name} is a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}")
