"""Rotary embedding settings: reading them from a configuration, and the inverse frequencies they stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InvalidConfig, UnsupportedModel

_DEFAULT_THETA = 10_000.0
_TYPE_FIELDS = {
    "default": frozenset[str](),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "mscale",
            "mscale_all_dim",
            "beta_fast",
            "beta_slow",
            "truncate",
        }
    ),
}
_COMMON_FIELDS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """How positions turn queries and keys.

    Attributes:
        rope_type: `default`, `linear`, `llama3` or `yarn`.
        theta: base of the wavelengths.
        factor: by how much long wavelengths are stretched.
        original_positions: positions of the training before the context was extended (llama3, yarn).
        low_freq_factor: llama3: wavelengths over original_positions / low_freq_factor are stretched in full.
        high_freq_factor: llama3: wavelengths under original_positions / high_freq_factor are left alone.
        beta_fast: yarn: turns within original_positions above which a dimension is left alone.
        beta_slow: yarn: turns below which a dimension is stretched in full.
        truncate: yarn: whether the bounds of the ramp are rounded outwards to whole dimensions.
        attention_factor: factor on cosine and sine.
    """

    rope_type: str = "default"
    theta: float = _DEFAULT_THETA
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> RopeSettings:
        """Read the settings of a Hugging Face config.json, in the form of transformers 5 or the one before it.

        Raises:
            UnsupportedModel: for a rope type or a rope field that is not implemented; the message names it.
            InvalidConfig: for a missing field or a value that is no number.
        """
        scaling = _scaling_fields(config)
        rope_type = scaling.get("rope_type") or scaling.get("type") or "default"
        _refuse_unimplemented(config, scaling, rope_type)
        theta = _number(scaling.get("rope_theta", config.get("rope_theta")), "rope_theta", _DEFAULT_THETA)
        if rope_type == "default":
            return cls(theta=theta)
        if rope_type == "linear":
            return cls(rope_type, theta, factor=_required(scaling, "factor"))
        original = _original_positions(config, scaling)
        if rope_type == "llama3":
            return _llama3_settings(scaling, theta, original)
        return _yarn_settings(config, scaling, theta, original)

    def inverse_frequencies(self, head_dim: int) -> torch.Tensor:
        """Radians per position of each pair of dimensions, float32 [head_dim / 2], on the CPU."""
        plain = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.rope_type == "linear":
            return plain / self.factor
        if self.rope_type == "llama3":
            return self._blend(plain, self._llama3_kept(plain))
        if self.rope_type == "yarn":
            return self._blend(plain, 1.0 - self._yarn_ramp(head_dim))
        return plain

    def _blend(self, plain: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """The stretched frequencies where `kept` is 0, the plain ones where it is 1, between them elsewhere."""
        return plain / self.factor * (1.0 - kept) + plain * kept

    def _llama3_kept(self, plain: torch.Tensor) -> torch.Tensor:
        """Llama 3.1: a ramp over the turns that a pair makes within the original context."""
        turns = self.original_positions * plain / (2 * math.pi)
        return ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0.0, 1.0)

    def _yarn_ramp(self, head_dim: int) -> torch.Tensor:
        """YaRN (arXiv 2309.00071, section 3.2): 0 where a pair turns often, 1 where it hardly turns."""
        low, high = (self._yarn_dimension(turns, head_dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low if high != low else 0.001
        return ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)

    def _yarn_dimension(self, turns: float, head_dim: int) -> float:
        """The (fractional) pair that makes `turns` turns within the original context."""
        return head_dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


def _scaling_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, Mapping):
        raise InvalidConfig(f"rope settings must be an object, got {scaling!r}")
    return {field: value for field, value in scaling.items() if value is not None}


def _refuse_unimplemented(config: Mapping[str, Any], scaling: dict[str, Any], rope_type: object) -> None:
    if not isinstance(rope_type, str) or rope_type not in _TYPE_FIELDS:
        raise UnsupportedModel(f"the native decoder does not implement rope_type={rope_type!r}")
    unknown = scaling.keys() - _COMMON_FIELDS - _TYPE_FIELDS[rope_type]
    if unknown:
        fields = ", ".join(f"{field}={scaling[field]!r}" for field in sorted(unknown))
        raise UnsupportedModel(f"the native decoder does not know the rope field {fields} of rope_type={rope_type!r}")
    for partial in (scaling.get("partial_rotary_factor"), config.get("partial_rotary_factor")):
        if partial is not None and partial != 1.0:
            raise UnsupportedModel(f"the native decoder does not implement partial_rotary_factor={partial!r}")


def _llama3_settings(scaling: dict[str, Any], theta: float, original: int) -> RopeSettings:
    low, high = _required(scaling, "low_freq_factor"), _required(scaling, "high_freq_factor")
    if not low < high:
        raise InvalidConfig(f"the rope field low_freq_factor={low} must be below high_freq_factor={high}")
    return RopeSettings(
        "llama3",
        theta,
        factor=_required(scaling, "factor"),
        original_positions=original,
        low_freq_factor=low,
        high_freq_factor=high,
    )


def _yarn_settings(config: Mapping[str, Any], scaling: dict[str, Any], theta: float, original: int) -> RopeSettings:
    positions = _number(config.get("max_position_embeddings"), "max_position_embeddings")
    factor = _number(scaling.get("factor"), "factor", positions / original)
    return RopeSettings(
        "yarn",
        theta,
        factor=factor,
        original_positions=original,
        beta_fast=_number(scaling.get("beta_fast"), "beta_fast", 32.0),
        beta_slow=_number(scaling.get("beta_slow"), "beta_slow", 1.0),
        truncate=bool(scaling.get("truncate", True)),
        attention_factor=_yarn_attention_factor(scaling, factor),
    )


def _yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """YaRN, section 3.4: scores grow by the square of 0.1 ln(factor) + 1; DeepSeek weighs it with mscale."""
    if "attention_factor" in scaling:
        return _number(scaling["attention_factor"], "attention_factor")

    def temperature(mscale: float) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all:
        return temperature(_number(mscale, "mscale")) / temperature(_number(mscale_all, "mscale_all_dim"))
    return temperature(1.0)


def _original_positions(config: Mapping[str, Any], scaling: dict[str, Any]) -> int:
    # The field outside the rope settings wins, as in transformers.
    field = "original_max_position_embeddings"
    return int(_number(config.get(field) or scaling.get(field) or config.get("max_position_embeddings"), field))


def _required(scaling: dict[str, Any], field: str) -> float:
    if field not in scaling:
        raise InvalidConfig(f"the rope settings lack {field}: {scaling!r}")
    return _number(scaling[field], field)


def _number(value: object, field: str, default: float | None = None) -> float:
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise InvalidConfig(f"the rope field {field} must be a positive number, got {value!r}")
    return float(value)
