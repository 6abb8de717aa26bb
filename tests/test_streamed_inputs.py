"""What the attention of decode lanes in CUDA C++ reads and when, and numbers that few steps have; by emulated warps."""

from __future__ import annotations

import ctypes

import pytest
import torch
from emulation import ahead_of_a_gap, emulated
from paged_case import make_case
from streamed_case import NAN, Streamed, assert_near, plain, random_rotary

from twostroke.attention.interface import LayerSpec
from twostroke.attention.torch_backend import TorchAttention
from twostroke.kernels.ops import Rotary

# The interpreter of triton 3.6 relies on what numpy 2.3 announces to drop.
pytestmark = [emulated, pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")]

OPTIONS = {"chunks": [], "block_size": 16, "dtype": torch.bfloat16}


def test_what_the_kernel_ahead_writes_is_read_when_it_is_done(launcher, streamed_library):
    """All but the schedule, the table of blocks and the weights of norms. Queries, keys and values differ in layout."""
    spec, lengths = LayerSpec(6, 3, 64, 64**-0.5), [1, 17, 0, 150, 33, 400]
    case, num_blocks = make_case(spec, lengths=lengths, **OPTIONS)
    rotary = random_rotary(len(lengths), 64, (True, True), "cpu")
    _, _, expected = plain(case, spec, num_blocks, 16, rotary)
    case.q, case.k = case.q.contiguous(), case.k.contiguous()
    case.v = case.v.transpose(0, 1).contiguous().transpose(0, 1)
    run = Streamed(launcher("cpu"), case, spec, num_blocks, 16, extra=9)
    written = [case.q, case.k, case.v, rotary.cos, rotary.sin, case.step.cache_slots]
    kept = [tensor.clone() for tensor in written]
    for tensor, copy in zip(written, kept, strict=True):
        assert tensor.stride() == copy.stride()
        places = (ctypes.c_void_p(x.data_ptr()) for x in (tensor, copy))
        streamed_library.copy_late(*places, ctypes.c_uint64(copy.nbytes))
        tensor.fill_(NAN if tensor.is_floating_point() else 1 << 30)
    out, alive = run(rotary), case.step.lane_lengths > 0
    assert_near(out[alive], expected[alive])


@pytest.mark.parametrize("group", [1, 3, 5])
def test_nothing_behind_the_inputs_is_read(launcher, group):
    """By threads whose query head there is not, or warps whose share there is not, among it."""
    spec = LayerSpec(2 * group, 2, 64, 64**-0.5)
    case, num_blocks = make_case(spec, lengths=[5, 40], **OPTIONS)
    rotary = random_rotary(2, 64, (True, True), "cpu")
    _, _, expected = plain(case, spec, num_blocks, 16, rotary)
    case.q, case.k, case.v = (ahead_of_a_gap(x) for x in (case.q, case.k, case.v))
    slots, tables = (ahead_of_a_gap(x) for x in (case.step.cache_slots, case.step.block_tables))
    case.step = case.step._replace(cache_slots=slots, block_tables=tables)
    run = Streamed(launcher("cpu"), case, spec, num_blocks, 16, extra=2)
    run.schedule = run.schedule._replace(words=ahead_of_a_gap(run.schedule.words))
    assert_near(run(Rotary(*map(ahead_of_a_gap, rotary[:4]), rotary.eps)), expected)


@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_of_any_size(launcher, sign):
    """Whose powers of two, and those of their differences, are beyond what a number can be."""
    spec = LayerSpec(4, 2, 64, 32.0)
    case, num_blocks = make_case(spec, lengths=[900, 3], **OPTIONS)
    for keys in (case.k, *(keys for keys, _ in case.sequences.values())):
        keys.abs_()
    case.q.abs_().mul_(sign)
    _, _, expected = plain(case, spec, num_blocks, 16, None)
    run = Streamed(launcher("cpu"), case, spec, num_blocks, 16, extra=11)
    out = run(None)
    assert int(run.schedule.words[0, 0]) > 8
    assert_near(out, expected)


def test_keys_are_stored_as_transformers_rounds_them(launcher):
    """The norm's quotient, its product with the weight, and the rotation: each once."""
    spec = LayerSpec(2, 2, 128, 128**-0.5)
    case, num_blocks = make_case(spec, lengths=[3, 20], **OPTIONS)
    rotary = random_rotary(2, 128, (True, True), "cpu")
    stored = TorchAttention([spec], num_blocks, 16, torch.bfloat16, case.q.device)
    case.fill(stored)
    stored.forward_rotary(0, *(x.clone() for x in (case.q, case.k, case.v)), rotary, case.step)
    run = Streamed(launcher("cpu"), case, spec, num_blocks, 16, extra=2)
    run(rotary)
    torch.testing.assert_close(run.cache.keys[0], stored.keys[0], rtol=0, atol=0, equal_nan=True)
