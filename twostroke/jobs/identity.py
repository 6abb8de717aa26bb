"""What decides what the output of a batch will be: by it a journal tells its own batch from another."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..engine import Engine
from ..errors import shown
from ..model.load import lasting_name

DECIDING = ("model", "impl", "dtype", "max_model_len", "deterministic", "seed")
"""Arguments of the engine that decide what an answer is. The others may differ when a batch goes on."""

_DEFAULTS = {name: inspect.signature(Engine).parameters[name].default for name in DECIDING}

_FLAGS = {"seed": "engine_seed", "model_name": "served_model_name"}
"""What a command calls a part of the identity, where that is another name."""


def identity(
    engine: Mapping[str, Any], errors: Path | None, model_name: str, limit: int | None, shard: str, digest: str
) -> dict[str, Any]:
    """The identity of a batch, by name.

    Args:
        engine: arguments of `Engine`.
        errors: where errors go; None: to the output.
        model_name: what lines call the model.
        limit, shard: what part of the input is answered.
        digest: of the input.
    """
    own = {"errors": errors, "model_name": model_name, "limit": limit, "shard": shard, "input": digest}
    return settled({**{name: engine.get(name) for name in DECIDING}, **own})


def settled(found: Mapping[str, Any]) -> dict[str, Any]:
    """The identity without what may be written in several ways: defaults, and paths.

    A journal may have been begun before they were settled, so what it says goes through this too.
    """
    result: dict[str, Any] = {name: _DEFAULTS.get(name) if value is None else value for name, value in found.items()}
    if "model" in result:
        written = os.fspath(result["model"])
        result["model"] = lasting_name(written)
        if result.get("model_name") == written:  # it has no other name than its own
            result["model_name"] = result["model"]
    if errors := result.get("errors"):
        result["errors"] = os.path.realpath(errors)
    return result


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """Say of the first part that differs what it is now, and what it was; None if none does."""
    ours, theirs = settled(ours), settled(theirs)
    for name in dict.fromkeys((*ours, *theirs)):
        if ours.get(name) != theirs.get(name):
            if name == "input":
                return "the input differs from what it was"
            flag = _FLAGS.get(name, name)
            return f"{flag}={shown(ours.get(name))}, and was {flag}={shown(theirs.get(name))}"
    return None
