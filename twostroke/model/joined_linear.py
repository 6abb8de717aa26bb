"""One product for linear layers that read the same input, such as the projections to queries, keys and values.

Two halves that do not know of each other: `adjoin` moves weights of a module side by side in memory, so that together
they are one matrix; `join_linears` lets a traced graph multiply by several weights at once.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional


@torch.library.custom_op("twostroke::joined_linear", mutates_args=())
def joined_linear(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return x @ weight.T of all weights behind one another: [..., inputs] -> [..., sum of outputs].

    One product if the weights, each [outputs, inputs], lie side by side in memory; else one for each.
    """
    if not _adjoining(weights):
        return torch.cat([functional.linear(x, weight) for weight in weights], dim=-1)
    inputs = weights[0].shape[1]
    joined = weights[0].as_strided((sum(weight.shape[0] for weight in weights), inputs), (inputs, 1))
    return functional.linear(x, joined)


@joined_linear.register_fake
def _shape_of_joined_linear(x: torch.Tensor, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], sum(weight.shape[0] for weight in weights))


def _adjoining(weights: Sequence[torch.Tensor]) -> bool:
    return all(
        a.data_ptr() + a.nbytes == b.data_ptr()
        and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
        and a.is_contiguous()
        for a, b in pairwise(weights)
    )


def join_linears(graph: fx.GraphModule) -> None:
    """Replace the linear layers without bias of a traced graph that read the same input, in place.

    Only those whose weights are inputs of the graph, since these exist before the first of the products.
    """
    readers: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.graph.nodes:
        if node.op == "call_function" and node.target is functional.linear and _is_plain(node):
            readers[node.args[0]].append(node)
    for x, nodes in readers.items():
        if len(nodes) > 1:
            _join(graph.graph, x, nodes)
    graph.recompile()


def _is_plain(node: fx.Node) -> bool:
    weight, bias = (*node.args[1:], None)[:2]
    return not node.kwargs and bias is None and isinstance(weight, fx.Node) and weight.op == "placeholder"


def _join(graph: fx.Graph, x: fx.Node, nodes: list[fx.Node]) -> None:
    weights: list[Any] = [node.args[1] for node in nodes]
    sizes = [weight.meta["example_value"].shape[0] for weight in weights]
    with graph.inserting_before(nodes[0]):
        joined = graph.call_function(torch.ops.twostroke.joined_linear.default, (x, weights))
        parts = graph.call_function(torch.split, (joined, sizes), {"dim": -1})
        for index, node in enumerate(nodes):
            node.replace_all_uses_with(graph.call_function(operator.getitem, (parts, index)))
    for node in nodes:
        graph.erase_node(node)


def adjoin(layer: nn.Module) -> None:
    """Move the weights of linear layers that one module holds and that take inputs of one size side by side."""
    for module in layer.modules():
        alike: defaultdict[tuple[object, ...], list[nn.Parameter]] = defaultdict(list)
        for child in module.children():
            if type(child) is nn.Linear and child.bias is None:
                alike[child.in_features, child.weight.dtype, child.weight.device].append(child.weight)
        for weights in alike.values():
            if len(weights) > 1:
                joined = torch.cat([weight.data for weight in weights])
                for weight, part in zip(weights, joined.split([len(weight) for weight in weights]), strict=True):
                    weight.data = part
