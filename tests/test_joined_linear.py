"""Linear layers that read the same input become one product, which gives what they gave."""

import pytest
import torch
from torch import fx, nn

from twostroke.model.joined_linear import adjoin, join_linears, joined_linear


class Layer(nn.Module):
    """Projections as in a decoder layer; `k` and `v` are thinner than `q`, and `out` takes inputs of the same size."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False), nn.Linear(8, 4, bias=False)
        self.out = nn.Linear(8, 8, bias=False)
        self.gate, self.up, self.biased = nn.Linear(8, 6, bias=False), nn.Linear(8, 6, bias=False), nn.Linear(8, 6)

    def forward(self, x):
        mixed = self.out(torch.cat([self.k(x), self.v(x)], -1) * self.q(x))
        return self.gate(mixed) * self.up(mixed) + self.biased(mixed)


def traced(layer, x):
    """Return what a backend of torch.compile gets."""
    graphs = []

    def keep(graph, inputs):
        graphs.append((graph, inputs))
        return graph

    with torch.no_grad():
        torch.compile(layer, backend=keep, fullgraph=True)(x)
    return graphs[0]


def products(graph: fx.GraphModule) -> list[str]:
    names = [node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"]
    return [name for name in names if "linear" in name]


@pytest.mark.parametrize("side_by_side", [True, False])
@torch.no_grad()
def test_products_of_one_input_are_joined_and_others_are_not(side_by_side):
    layer, x = Layer(), torch.randn(1, 5, 8)
    expected = layer(x)
    if side_by_side:
        adjoin(layer)
        torch.testing.assert_close(layer(x), expected)
    graph, inputs = traced(layer, x)
    assert products(graph) == ["linear"] * 7
    join_linears(graph)
    assert sorted(products(graph)) == ["joined_linear.default"] * 2 + ["linear"] * 2
    graph.graph.lint()
    [found] = graph(*inputs)
    torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_weights_side_by_side_are_read_in_place(monkeypatch):
    layer, x = Layer(), torch.randn(3, 8)
    apart = [layer.q.weight, layer.k.weight, layer.v.weight]
    expected = joined_linear(x, apart)
    adjoin(layer)
    assert len({weight.untyped_storage().data_ptr() for weight in apart}) == 1
    monkeypatch.setattr(torch, "cat", None)
    torch.testing.assert_close(joined_linear(x, apart), expected)


@pytest.mark.parametrize("order", [(1, 0), (0, 2), (0, 0)])
@torch.no_grad()
def test_weights_in_another_order_are_not_taken_for_one_matrix(order):
    layer, x = Layer(), torch.randn(3, 8)
    adjoin(layer)
    several = [layer.q, layer.k, layer.v]
    weights = [several[index].weight for index in order]
    expected = torch.cat([x @ weight.T for weight in weights], -1)
    torch.testing.assert_close(joined_linear(x, weights), expected)


def test_what_the_compiler_is_told_of_the_operator_is_true():
    layer = Layer().requires_grad_(False)
    torch.library.opcheck(joined_linear, (torch.randn(3, 8), [layer.q.weight, layer.k.weight]))
