"""The linear layer: packed and plain paths give the same products."""

from __future__ import annotations

import pytest
import torch

from twostroke.model import linear
from twostroke.model.linear import InvariantLinear, Linear

CPU = torch.device("cpu")
INPUTS, OUTPUTS = 48, 80


def make_layer(bias, dtype=torch.float32, kind=Linear):
    torch.manual_seed(0)
    layer = kind(INPUTS, OUTPUTS, bias, dtype, CPU)
    for tensor in layer.tensors():
        tensor.normal_()
    return layer


def test_packing_is_available_here():
    """Without it the tests below would compare the plain path with itself."""
    assert linear.pack_weight(torch.randn(OUTPUTS, INPUTS)) is not None


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 33, 700])
def test_packed_equals_plain(rows, bias):
    layer = make_layer(bias)
    x = torch.randn(rows, INPUTS)
    plain = layer(x)
    assert torch.equal(plain, torch.nn.functional.linear(x, layer.weight, layer.bias))
    layer.pack()
    assert layer.weight is None  # a second copy would double the model's memory
    torch.testing.assert_close(layer(x), plain, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [Linear, InvariantLinear])
def test_a_layer_adds_to_the_residual_in_place(kind, bias, packed):
    layer = make_layer(bias, kind=kind)
    x, residual = torch.randn(19, INPUTS), torch.randn(19, OUTPUTS)
    expected = residual + layer(x)
    if packed:
        layer.pack()
    assert layer.add_to(residual, x) is residual
    torch.testing.assert_close(residual, expected, atol=1e-4, rtol=1e-5)


def test_a_row_does_not_depend_on_the_number_of_rows():
    layer = make_layer(bias=True)
    layer.pack()
    x = torch.randn(700, INPUTS)
    together = layer(x)
    for rows in (1, 3, 8, 33):
        torch.testing.assert_close(layer(x[:rows].contiguous()), together[:rows], atol=1e-4, rtol=1e-5)


def test_what_an_invariant_layer_adds_does_not_depend_on_the_number_of_rows():
    """To the bit, and without the packed layout, in which any layer's products on a CPU are like that."""
    layer = InvariantLinear(576, 576, False, torch.float32, CPU)
    layer.weight.normal_()
    x, residual = torch.randn(2, 40, 576)
    together = layer.add_to(residual.clone(), x)
    for rows in (1, 2, 3, 17):
        assert torch.equal(layer.add_to(residual[:rows].clone(), x[:rows]), together[:rows])


def test_packing_a_tied_layer_leaves_the_owner_its_weight():
    weight = torch.randn(OUTPUTS, INPUTS)
    kept = weight.clone()
    layer = Linear.tied(weight)
    layer.pack()
    x = torch.randn(3, INPUTS)
    torch.testing.assert_close(layer(x), x @ kept.T, atol=1e-4, rtol=1e-5)
    assert torch.equal(weight, kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_stay_plain(dtype):
    layer = make_layer(bias=True, dtype=dtype)
    layer.pack()
    assert layer.weight is not None
    assert layer(torch.randn(3, INPUTS, dtype=dtype)).dtype == dtype


class Missing:
    """An operator namespace without the private operators."""


class Failing:
    @staticmethod
    def _reorder_linear_weight(weight, rows):
        raise RuntimeError("mkldnn is not built in")


class Wrong:
    @staticmethod
    def _reorder_linear_weight(weight, rows):
        return weight

    @staticmethod
    def _linear_pointwise(x, weight, bias, attr, scalars, algorithm):
        return x @ weight.T + 1.0


@pytest.mark.parametrize("operators", [Missing, Failing, Wrong])
def test_operators_that_are_missing_fail_or_lie_leave_the_plain_path(monkeypatch, operators):
    monkeypatch.setattr(torch.ops, "mkldnn", operators())
    layer = make_layer(bias=True)
    x = torch.randn(8, INPUTS)
    plain = layer(x)
    layer.pack()
    assert layer.weight is not None
    assert torch.equal(layer(x), plain)
