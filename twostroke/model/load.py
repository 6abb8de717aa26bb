"""From a model's name to a model that is ready to run."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidConfig, TwostrokeError, UnsupportedModel, shown
from ..kernels import compiler
from .config import DecoderConfig, dtype_name
from .decoder import Decoder
from .interface import Model
from .presets import PRESETS
from .weights import load_checkpoint, randomize

DEFAULT_MODEL = "smollm2-135m"
IMPLEMENTATIONS = ("auto", "native", "transformers")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model and what its files say about using it.

    Attributes:
        model: the model, its weights in place.
        directory: the model's files, tokenizer included; None for a preset.
        eos_ids: the tokens that end a text.
        impl: `native` or `transformers`.
        name: the name that was asked for.
    """

    model: Model
    directory: Path | None
    eos_ids: tuple[int, ...]
    impl: str
    name: str


def load_model(
    name: str | os.PathLike[str],
    *,
    impl: str = "auto",
    device: torch.device,
    dtype: str | torch.dtype = "auto",
    seed: int = 0,
    compile: bool | str = "auto",
    deterministic: bool = False,
) -> LoadedModel:
    """Load a model.

    Args:
        name: `smollm2-135m`, a preset (random weights), a directory with config.json and safetensors, a .gguf file, or
            a model id of the Hugging Face hub; tried in this order.
        impl: `native`, `transformers`, or `auto`: native where it implements the model.
        device: where the weights go.
        dtype: `auto`, `float32`, `bfloat16`, `float16` or the torch dtype. `auto` is float32 on the CPU; elsewhere the
            checkpoint's if that has two bytes, else bfloat16.
        seed: of the random weights of a preset.
        compile: compile the layers of a model that transformers runs; `auto`: on CUDA.
        deterministic: logits do not depend on the batch, to the bit; for the native decoder only.

    Raises:
        InvalidConfig: for an argument that makes no sense, a model that is not found, or files that cannot be used.
        UnsupportedModel: if impl is `native` and the native decoder does not implement the model.
    """
    try:
        return _load(name, impl, device, dtype, seed, compile, deterministic)
    except TwostrokeError:
        raise
    except Exception as error:  # the files are anybody's, and those who read them raise whatever they like
        raise InvalidConfig(
            f"model={shown(os.fspath(name))} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def model_files(name: str | os.PathLike[str]) -> tuple[Path | None, dict[str, Any]]:
    """Return the directory of a model, None for a preset, and its configuration; files are fetched where need be.

    Raises:
        InvalidConfig: the model is not found, or its configuration cannot be read.
    """
    directory = None if name in PRESETS else _find_directory(name)
    return directory, dict(PRESETS[str(name)]) if directory is None else _read_json(directory / "config.json")


def lasting_name(name: str | os.PathLike[str]) -> str:
    """Return a model's name as it holds in any working folder: a folder's or file's real path; else the name itself."""
    if name != DEFAULT_MODEL and name not in PRESETS:
        with suppress(ValueError):  # of what cannot be a path, such as a NUL
            if os.path.exists(path := os.path.expanduser(name)):
                return os.path.realpath(path)
    return os.fspath(name)


def max_positions(config: Mapping[str, Any], impl: str = "auto") -> int:
    """Return the most positions of a model, from the content of its `config.json`.

    Raises:
        UnsupportedModel: neither kind of model can run it, or it does not say.
    """
    if (native := _native_config(config, impl)) is not None:
        return native.max_positions
    from . import adapter

    return adapter.max_positions(dict(config))


def _load(
    name: str | os.PathLike[str],
    impl: str,
    device: torch.device,
    dtype: str | torch.dtype,
    seed: int,
    compile: bool | str,
    deterministic: bool,
) -> LoadedModel:
    if impl not in IMPLEMENTATIONS:
        raise InvalidConfig(f"impl={impl!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
    directory, config = model_files(name)
    weights_dtype = _resolve_dtype(dtype, config, device)
    decoder_config = _native_config(config, impl)
    if decoder_config is not None and compile is True:
        raise InvalidConfig("compile=True: the native decoder has nothing to compile; impl='transformers' has")
    if decoder_config is None and deterministic:
        raise InvalidConfig(
            f"deterministic=True: model={shown(os.fspath(name))} runs in transformers, whose sums depend on the batch; "
            "the native decoder's need not"
        )
    if compile == "auto":
        compile = device.type == "cuda"
    if not deterministic:
        _compile_ahead(device)
    if decoder_config is not None:
        model: Model = _load_native(decoder_config, directory, device, weights_dtype, seed, deterministic)
    else:
        model = _load_transformers(config, directory, device, weights_dtype, seed, bool(compile))
    chosen = "native" if decoder_config is not None else "transformers"
    return LoadedModel(model, directory, _eos_ids(config, directory), chosen, os.fspath(name))


def _compile_ahead(device: torch.device) -> None:
    """Have kernels compiled while the weights are loaded."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) == compiler.CAPABILITY:
        compiler.compile_ahead()


def _native_config(config: Mapping[str, Any], impl: str) -> DecoderConfig | None:
    """The native decoder's configuration, or None where the transformers kind is to run."""
    if impl == "transformers":
        return None
    try:
        return DecoderConfig.from_dict(config)
    except UnsupportedModel:
        if impl == "native":
            raise
        return None


def _load_native(
    config: DecoderConfig,
    directory: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    deterministic: bool,
) -> Decoder:
    decoder = Decoder(config, dtype, device, deterministic=deterministic)
    if directory is None:
        randomize(decoder, seed)
    else:
        load_checkpoint(decoder, directory)
    decoder.pack()
    return decoder


def _load_transformers(
    config: Mapping[str, Any],
    directory: Path | None,
    device: torch.device,
    dtype: torch.dtype,
    seed: int,
    compile: bool,
) -> Model:
    # Imported here: a native model must not pay for importing transformers.
    from .adapter import TransformersModel

    if directory is None:
        return TransformersModel.from_config(dict(config), device=device, dtype=dtype, seed=seed, compile=compile)
    return TransformersModel.from_directory(directory, device=device, dtype=dtype, compile=compile)


def _find_directory(name: str | os.PathLike[str]) -> Path:
    """The directory with the model's files, made or fetched where need be."""
    if name == DEFAULT_MODEL:
        from .default_model import default_model_dir

        return default_model_dir()
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidConfig(f"model={os.fspath(name)!r}: the directory has no config.json")
        return path
    if path.suffix == ".gguf":
        return _convert_gguf(path)
    if path.is_file():
        known = (path.parent / "config.json").is_file()
        raise InvalidConfig(
            f"model={os.fspath(name)!r} is a file, and no GGUF file: "
            + (f"the model is its folder, {str(path.parent)!r}" if known else "a model is a folder with config.json")
        )
    # A hub id is "name" or "owner/name"; anything else was meant as a path.
    if not isinstance(name, str) or path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InvalidConfig(f"model={os.fspath(name)!r}: no such directory")
    return _fetch_from_hub(name)


def _convert_gguf(path: Path) -> Path:
    if not path.is_file():
        raise InvalidConfig(f"model={str(path)!r}: no such file")
    from .gguf import convert_gguf

    return convert_gguf(path)


def _fetch_from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:  # the client's errors come from several libraries, and many have advice in their tail
        reason = str(error).strip().partition("\n")[0]
        raise InvalidConfig(
            f"model={name!r} is no known name ({_known_names(name)}), no folder and no GGUF file, "
            f"and the Hugging Face hub did not deliver it: {type(error).__name__}: {reason}"
        ) from error


def _known_names(name: str) -> str:
    """The one that was meant, if it can be told; else all."""
    known = (DEFAULT_MODEL, *PRESETS)
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"these are {', '.join(known)}"


def _resolve_dtype(dtype: str | torch.dtype, config: Mapping[str, Any], device: torch.device) -> torch.dtype:
    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        stored = dtype_name(config)
        return torch.float16 if stored == "float16" else torch.bfloat16
    for name, known in _DTYPES.items():
        if dtype in (name, known):
            return known
    raise InvalidConfig(f"dtype={dtype!r}: expected one of auto, {', '.join(_DTYPES)}")


def _eos_ids(config: Mapping[str, Any], directory: Path | None) -> tuple[int, ...]:
    """The EOS ids, from generation_config.json if it has any: of the sampling defaults there nothing is taken."""
    found = config.get("eos_token_id")
    if directory is not None and (directory / "generation_config.json").is_file():
        stated = _read_json(directory / "generation_config.json").get("eos_token_id")
        found = found if stated is None else stated
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        raise InvalidConfig(f"eos_token_id must be a token id or a list of them, got {found!r}")
    return tuple(dict.fromkeys(ids))


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"{file}: not readable as JSON ({error})") from error
    if not isinstance(content, dict):
        raise InvalidConfig(f"{file}: expected an object, got {type(content).__name__}")
    return content
