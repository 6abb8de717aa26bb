"""Compiled layers of a transformers model: layers that are alike share what is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import fx, nn
from transformers import PreTrainedModel

from ..errors import UnsupportedModel, counted
from .joined_linear import adjoin, join_linears

BACKEND = "inductor"


class CompiledLayers:
    """The decoder layers of a model, each run through one compiled function, until `undo`.

    A layer's weights are inputs of what is compiled, and guards tell layers apart that compute something else. Linear
    layers that read the same input become one product.

    Until `settle` is called, the layers take every size that equals the number of tokens for a number of tokens, and so
    compile one graph for any number, and another one for a single token.

    Raises:
        UnsupportedModel: the model has no list of layers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._layers = _layers_of(model)
        # NOTE: torch keeps what it compiled, and counts it, by code object. Models must not use up each other's count.
        own = FunctionType(_run_layer.__code__.replace(), _run_layer.__globals__)
        self._run = torch.compile(own, backend=_compile_graph, fullgraph=True)
        for layer in self._layers:
            adjoin(layer)
            layer.forward = partial(self._run_marked, layer)

    def settle(self) -> None:
        """Expect that all is compiled."""
        for layer in self._layers:
            layer.forward = partial(self._run, layer)

    def undo(self) -> None:
        """Let the layers run as transformers wrote them."""
        for layer in self._layers:
            del layer.forward

    def _run_marked(self, layer: nn.Module, hidden: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        tokens = hidden.shape[1]
        for tensor in _tensors((hidden, arguments, options)):
            for dim, size in enumerate(tensor.shape):
                if size == tokens > 1:
                    torch._dynamo.maybe_mark_dynamic(tensor, dim)
        return self._run(layer, hidden, *arguments, **options)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _tensors(part)


def _compile_graph(graph: fx.GraphModule, inputs: list[Any]) -> Any:
    join_linears(graph)
    return torch._dynamo.lookup_backend(BACKEND)(graph, inputs)


def _run_layer(layer: nn.Module, *arguments: Any, **options: Any) -> Any:
    return type(layer).forward(layer, *arguments, **options)


def _layers_of(model: PreTrainedModel) -> nn.ModuleList:
    count = model.config.get_text_config().num_hidden_layers
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UnsupportedModel(f"it has no list of {counted(count, 'layer')}")
