"""Compiled layers of a transformers model: layers that are alike share what is compiled."""

from __future__ import annotations

from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModel

BACKEND = "inductor"


class CompiledLayers:
    """The decoder layers of a model, each run through one compiled function, until `undo`.

    A layer's weights are inputs of what is compiled, and guards tell layers apart that compute something else. The
    number of tokens is dynamic: one graph serves them all, and another one a single token.

    Raises:
        UnsupportedModel: the model has no list of layers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = _layers_of(model)
        # NOTE: torch keeps what it compiled, and counts it, by code object. Models must not use up each other's count.
        own = FunctionType(_run_layer.__code__.replace(), _run_layer.__globals__)
        run = torch.compile(own, backend=BACKEND, fullgraph=True, dynamic=True)
        for layer in self._layers:
            layer.forward = partial(run, layer)

    def undo(self) -> None:
        """Let the layers run as transformers wrote them."""
        for layer in self._layers:
            del layer.forward


def _run_layer(layer: nn.Module, *arguments: Any, **options: Any) -> Any:
    return type(layer).forward(layer, *arguments, **options)


def _layers_of(model: PreTrainedModel) -> nn.ModuleList:
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModel(f"it has no list of {count} layers")
