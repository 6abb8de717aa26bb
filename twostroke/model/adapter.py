"""Any causal language model of the transformers library, unmodified, over paged attention."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import is_accelerate_available
from transformers.utils import logging as transformers_logging

from ..attention.interface import Attention, LayerSpec
from ..errors import UnsupportedModel, counted
from ..kernels.step import StepInputs
from .compiled import CompiledLayers
from .hook import IMPLEMENTATION, AttentionCall, attending, max_positions_of
from .probe import (
    SegmentAttention,
    change_of,
    check_config,
    check_logits,
    find_layers,
    interleave,
    probe_tokens,
    set_attention,
)

logger = logging.getLogger(__name__)


class StepAttention:
    """A hook's handler for one forward pass: takes the calls, in the order of the layers, to paged attention."""

    def __init__(self, attention: Attention, step: StepInputs) -> None:
        self.attention = attention
        self.step = step
        self.layer = 0

    def __call__(self, call: AttentionCall) -> torch.Tensor:
        q, k, v = (_token_major(x) for x in (call.query, call.key, call.value))
        out = self.attention.forward(self.layer, q, k, v, self.step)
        self.layer += 1
        return out[None]


def _token_major(x: torch.Tensor) -> torch.Tensor:
    """Turn [1, heads, T, head_dim] into [T, heads, head_dim] with a contiguous last dimension."""
    x = x[0].transpose(0, 1)
    return x if x.stride(-1) == 1 else x.contiguous()


class TransformersModel:
    """A model of the transformers library behind the interface `model.interface.Model`.

    transformers looks attention up by name. The model is first run under its own eager attention and under the probe,
    and refused if the two differ; after that it runs under `hook.IMPLEMENTATION`, whose calls go to paged attention.
    All tokens of a step make one sequence of a batch of one: what must not mix, attention keeps apart.

    Args:
        model: on its device, in its dtype, with `attn_implementation="eager"`; this object becomes its only user.
        compile: compile the decoder layers, here and now. Where that fails, or changes the logits, they run as
            transformers wrote them, and the log says why.

    Raises:
        UnsupportedModel: the model needs something that paged attention does not do, or would answer differently.
    """

    def __init__(self, model: PreTrainedModel, *, compile: bool = False) -> None:
        self._model = model.eval().requires_grad_(False)
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.vocab_size: int = model.config.get_text_config().vocab_size
        self.weight_bytes = _weight_bytes(model)
        self._compiled: CompiledLayers | None = None
        state = model.state_dict()
        first = {(tensor.data_ptr(), tensor.shape): name for name, tensor in reversed(state.items())}
        self._names = list(first.values())
        with quiet_transformers():
            self.layers: list[LayerSpec] = find_layers(model)
            self.max_positions = _max_positions(model.config)
            self._verify()
            if compile:
                self._compile()

    @classmethod
    def from_directory(
        cls, directory: Path | str, *, device: torch.device | str, dtype: torch.dtype, compile: bool = False
    ) -> TransformersModel:
        """Load a model saved in transformers' layout. Code that lies beside the weights is never run.

        With accelerate installed the weights go straight to the device, else through one copy in host memory.

        Raises:
            UnsupportedModel: also if the files lack some of the weights.
            OSError: the directory has no readable model.
        """
        device = torch.device(device)
        placement = {"device_map": {"": device}} if device.type != "cpu" and is_accelerate_available() else {}
        with quiet_transformers(), _named_refusals(directory):
            config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
            _check_model_class(config)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                attn_implementation="eager",
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
                **placement,
            )
        model, report = loaded
        _check_weights(config.model_type, report)
        return cls(model.to(device), compile=compile)

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        *,
        device: torch.device | str,
        dtype: torch.dtype,
        seed: int,
        compile: bool = False,
    ) -> TransformersModel:
        """Make a model with random weights, on the device, from the content of a `config.json`.

        Raises:
            UnsupportedModel: transformers does not know the model type, or see the class.
        """
        device = torch.device(device)
        parsed = _parse(config)
        random = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with quiet_transformers(), _named_refusals(parsed.model_type), device, random:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(
                parsed, dtype=dtype, attn_implementation="eager", trust_remote_code=False
            )
        return cls(model, compile=compile)

    def tensors(self) -> list[torch.Tensor]:
        return [*self._model.parameters(), *self._model.buffers()]

    def weight_shapes(self) -> dict[str, torch.Size]:
        """Of two names for one tensor, as a tied head has, the first."""
        return {name: tensor.shape for name, tensor in self._own_tensors().items()}

    def spare_names(self, names: Iterable[str]) -> set[str]:
        return set(names) & (self._model.state_dict().keys() - self._own_tensors().keys())

    def copy_weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self._own_tensors().items()}

    @torch.no_grad()
    def write_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        own = self._own_tensors()
        for name in tensors.keys() & own.keys():
            own[name].copy_(tensors[name], non_blocking=True)

    def _own_tensors(self) -> dict[str, torch.Tensor]:
        """The model's parameters and stored buffers by name, each tensor once."""
        state = self._model.state_dict()
        return {name: state[name] for name in self._names}

    def free(self) -> None:
        self._model.to("meta")

    def forward(self, step: StepInputs, attention: Attention) -> torch.Tensor:
        """Return logits [S, vocab_size] in `dtype`, at `step.sample_index` (every token if that is None)."""
        try:
            return self._run(step, attention)
        except Exception as error:  # whatever torch's compiler raises, now or at another number of tokens
            if self._compiled is None:
                raise
            self._give_up_compiling(_one_line(error))
        return self._run(step, attention)

    @torch.no_grad()
    def _run(self, step: StepInputs, attention: Attention) -> torch.Tensor:
        with attending(StepAttention(attention, step)):
            output = self._model(
                input_ids=step.input_ids[None],
                position_ids=step.positions[None],
                use_cache=False,
                logits_to_keep=0 if step.sample_index is None else step.sample_index,
            )
        return output.logits[0].to(self.dtype)

    @torch.no_grad()
    def _verify(self) -> None:
        tokens = self._probe_tokens()
        set_attention(self._model, "eager")
        # NOTE: with a cache, as in generation: a model that takes K and V of another layer may need it for that.
        expected = self._model(input_ids=tokens, use_cache=True).logits
        set_attention(self._model, IMPLEMENTATION)
        check_logits(self._model.config.model_type, self._probe(tokens), expected)

    def _compile(self) -> None:
        """Compile the layers for many tokens and for one, and compare logits with those before."""
        tokens = self._probe_tokens()
        several = [tokens, tokens[:1, :1]]
        expected = [self._probe(tokens) for tokens in several]
        try:
            self._compiled = CompiledLayers(self._model)
        except UnsupportedModel as error:
            self._give_up_compiling(_one_line(error))
            return
        for tokens, logits in zip(several, expected, strict=True):
            if change := change_of(self._probe(tokens), logits):
                self._give_up_compiling(f"compiled layers change the logits by {change:.2g} (relative)")
        if self._compiled is not None:
            self._compiled.settle()

    def _give_up_compiling(self, reason: str) -> None:
        logger.warning("%s: not compiled: %s", self._model.config.model_type, reason)
        if self._compiled is not None:
            self._compiled.undo()
            self._compiled = None

    def _probe_tokens(self) -> torch.Tensor:
        return probe_tokens(self.layers, self.vocab_size, self.max_positions).to(self.device)

    def _probe(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.forward(interleave(tokens), SegmentAttention(self.layers, self.dtype, self.device))


def _one_line(error: Exception) -> str:
    """A short text of an error; those of torch's compiler fill a screen."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300)


def max_positions(config: dict[str, Any]) -> int:
    """Return the most positions of a model, from the content of its `config.json`; raises as `from_config` does."""
    return _max_positions(_parse(config))


def _parse(config: dict[str, Any]) -> PretrainedConfig:
    model_type = config.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(f"{model_type}: transformers does not know this model_type")
    with quiet_transformers(), _named_refusals(str(model_type)):
        parsed = AutoConfig.for_model(**config)
        _check_model_class(parsed)
    return parsed


def _check_model_class(config: PretrainedConfig) -> None:
    check_config(config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"{config.model_type}: transformers has no causal language model of this type")


def _check_weights(name: str, report: dict[str, Any]) -> None:
    """transformers gives weights that the files lack random values; here that is an error."""
    missing = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if missing:
        raise UnsupportedModel(
            f"{name}: the files lack {counted(len(missing), 'weight')} of the model, {missing[0]} first"
        )
    if report["unexpected_keys"]:
        logger.warning("%s: weights that the model does not use: %s", name, sorted(report["unexpected_keys"]))


def _max_positions(config: PretrainedConfig) -> int:
    positions = max_positions_of(config)
    if positions is None:
        raise UnsupportedModel(f"{config.model_type}: its configuration does not say how many positions it has")
    return positions


def _weight_bytes(model: PreTrainedModel) -> int:
    """A step reads few rows of an embedding; a tied one is counted where it makes the logits."""
    read = {
        id(weight): weight.nbytes
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for weight in module.parameters(recurse=False)
    }
    return sum(read.values())


@contextmanager
def _named_refusals(name: Path | str) -> Iterator[None]:
    """Say which model it was when transformers refuses a configuration, or wants to run code that came with it."""
    try:
        yield
    except UnsupportedModel:
        raise
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"{name}: {type(error).__name__}: {error}") from error


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and warnings, not its errors, out of the user's log."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
