"""Filling a decoder: from safetensors files, tensor by tensor into place, or at random."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open

from ..errors import InvalidConfig
from .linear import Linear

if TYPE_CHECKING:
    from .decoder import Decoder

_SINGLE_FILE = "model.safetensors"
_INDEX_FILE = "model.safetensors.index.json"
_NAMES_SHOWN = 8


def load_checkpoint(decoder: Decoder, directory: Path) -> None:
    """Copy the safetensors of `directory` into the decoder.

    One tensor at a time is read and copied into its part of a merged matrix, so the host never holds a second copy of
    the model.

    Raises:
        InvalidConfig: if the files are missing or unreadable, or if a tensor is missing, unexpected or misshapen; the
            message names it.
    """
    targets = _targets(decoder)
    found: set[str] = set()
    for file in weight_files(directory):
        found |= _load_file(file, targets, decoder.device)
    missing = targets.keys() - found
    unexpected = {name for name in found - targets.keys() if not _harmless(name, decoder)}
    if missing or unexpected:
        raise InvalidConfig(
            f"{directory}: the tensors do not fit model_type={decoder.config.model_type!r}; "
            f"missing: {listed(missing)}; unexpected: {listed(unexpected)}"
        )


@torch.no_grad()
def randomize(decoder: Decoder, seed: int) -> None:
    """Fill the decoder on its device: matrices normal with the configuration's standard deviation, biases 0, norms 1.

    The same seed gives the same weights on the same kind of device.
    """
    generator = torch.Generator(device=decoder.device).manual_seed(seed)
    linears = [linear for block in decoder.blocks for linear in block.linears]
    if not decoder.config.tied:
        linears.append(decoder.head)
    matrices = [decoder.embedding] + [linear.weight for linear in linears if linear.weight is not None]
    for matrix in matrices:
        matrix.normal_(0.0, decoder.config.initializer_range, generator=generator)
    for linear in linears:
        if linear.bias is not None:
            linear.bias.zero_()


def weight_shapes(decoder: Decoder) -> dict[str, torch.Size]:
    """The shapes of a checkpoint's tensors, by their Hugging Face names."""
    plan = type(decoder)(decoder.config, decoder.dtype, torch.device("meta"))
    return {name: target.shape for name, target in _targets(plan).items()}


def spare_names(decoder: Decoder, names: Iterable[str]) -> set[str]:
    """Those of `names` that say nothing new."""
    return {name for name in names if _harmless(name, decoder)}


def write_weights(decoder: Decoder, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copy checked tensors into the storage that the decoder's weights have; packed ones are packed anew.

    What was made for the storage, and not for the values, stays: graphs, and the choice of thin products.
    """
    decoder.unpack()
    targets = _targets(decoder)
    for name in tensors.keys() & targets.keys():
        targets[name].copy_(tensors[name], non_blocking=True)
    decoder.repack()


def copy_weights(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Return copies of all weights, by their Hugging Face names."""
    decoder.unpack()
    copies = {name: target.clone() for name, target in _targets(decoder).items()}
    decoder.repack()
    return copies


def _targets(decoder: Decoder) -> dict[str, torch.Tensor]:
    """Where each tensor of a checkpoint goes, by its Hugging Face name."""
    config = decoder.config
    targets = {"model.embed_tokens.weight": decoder.embedding, "model.norm.weight": decoder.final_norm}
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for index, block in enumerate(decoder.blocks):
        at = f"model.layers.{index}"
        targets[f"{at}.input_layernorm.weight"] = block.attention_norm
        targets[f"{at}.post_attention_layernorm.weight"] = block.mlp_norm
        for name, norm in (("q_norm", block.q_norm), ("k_norm", block.k_norm)):
            if norm is not None:
                targets[f"{at}.self_attn.{name}.weight"] = norm
        targets |= _parts(block.qkv, f"{at}.self_attn", {"q_proj": queries, "k_proj": keys, "v_proj": keys})
        targets |= _parts(block.output, f"{at}.self_attn", {"o_proj": config.hidden_size})
        inner = config.intermediate_size
        targets |= _parts(block.gate_up, f"{at}.mlp", {"gate_proj": inner, "up_proj": inner})
        targets |= _parts(block.down, f"{at}.mlp", {"down_proj": config.hidden_size})
    if not config.tied:
        targets |= _parts(decoder.head, "", {"lm_head": config.vocab_size})
    return targets


def _parts(linear: Linear, prefix: str, rows: dict[str, int]) -> dict[str, torch.Tensor]:
    """The projections merged into `linear`, in the order of its output rows."""
    parts = {}
    for kind, whole in (("weight", linear.weight), ("bias", linear.bias)):
        if whole is not None:
            for name, part in zip(rows, whole.split(list(rows.values())), strict=True):
                parts[f"{prefix}.{name}.{kind}".lstrip(".")] = part
    return parts


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint.

    Raises:
        InvalidConfig: there are none, or some are missing.
    """
    index = directory / _INDEX_FILE
    if (directory / _SINGLE_FILE).is_file():
        return [directory / _SINGLE_FILE]
    if not index.is_file():
        raise InvalidConfig(f"{directory}: found neither {_SINGLE_FILE} nor {_INDEX_FILE}; other formats are not read")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        files = [directory / name for name in sorted(names)]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidConfig(f"{index}: not an index of safetensors files ({error})") from error
    if absent := [file.name for file in files if not file.is_file()]:
        raise InvalidConfig(f"{directory}: {_INDEX_FILE} names files that are not there: {listed(absent)}")
    return files


def _load_file(file: Path, targets: dict[str, torch.Tensor], device: torch.device) -> set[str]:
    """Copy what the file has for `targets`; the names of all its tensors."""
    try:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            names = set(tensors.keys())
            for name in sorted(names & targets.keys()):
                _fill(targets[name], tensors.get_tensor(name), name, file)
    except SafetensorError as error:
        raise InvalidConfig(f"{file}: not a readable safetensors file ({error})") from error
    return names


def _fill(target: torch.Tensor, tensor: torch.Tensor, name: str, file: Path) -> None:
    if target.shape != tensor.shape:
        raise InvalidConfig(
            f"{file}: {name} has shape {list(tensor.shape)}, the configuration asks for {list(target.shape)}"
        )
    if not tensor.is_floating_point():
        raise InvalidConfig(f"{file}: {name} has dtype {tensor.dtype}; quantized weights are not implemented")
    target.copy_(tensor)


def _harmless(name: str, decoder: Decoder) -> bool:
    """Whether a tensor says nothing new: stored inverse frequencies, and a tied head's second name."""
    return name.endswith("rotary_emb.inv_freq") or (decoder.config.tied and name == "lm_head.weight")


def listed(names: Iterable[str]) -> str:
    """Names for a message, cut short if they are many."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _NAMES_SHOWN} more" if len(ordered) > _NAMES_SHOWN else ""
    return (", ".join(ordered[:_NAMES_SHOWN]) or "none") + more
