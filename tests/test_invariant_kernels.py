"""The Triton kernels of `deterministic`: right, and the same to the bit whatever shares a launch with a token."""

import numpy as np
import pytest
import torch
from paged_case import make_case

from twostroke.attention.interface import LayerSpec

pytest.importorskip("triton")

from twostroke.attention.invariant_triton import InvariantTritonAttention
from twostroke.attention.triton_backend import TritonAttention
from twostroke.kernels.invariant_attention import InvariantTiles, invariant_attention, invariant_tiles
from twostroke.kernels.invariant_linear import LinearTiles, invariant_linear, linear_tiles

# The interpreter of triton 3.6 relies on what numpy 2.3 announces to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = LinearTiles(16, 32, 32, warps=4, stages=1)


@pytest.mark.parametrize(("tokens", "outputs", "inputs", "bias"), [(1, 32, 32, False), (37, 70, 45, True)])
def test_linear(tokens, outputs, inputs, bias):
    torch.manual_seed(0)
    x, weight = torch.randn(tokens, inputs), torch.randn(outputs, inputs)
    added = torch.randn(outputs) if bias else None
    given = [None if t is None else t.to(DEVICE) for t in (x, weight, added)]
    found = invariant_linear(*given, SMALL)
    expected = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
    torch.testing.assert_close(found.cpu(), expected.float(), rtol=1e-5, atol=1e-5)
    residual = torch.randn(tokens, outputs)
    sum_ = residual.to(DEVICE, copy=True)
    assert invariant_linear(*given, SMALL, sum_) is sum_
    torch.testing.assert_close(sum_.cpu(), residual + expected.float(), rtol=1e-5, atol=1e-5)


@pytest.fixture
def exact_order(monkeypatch):
    """Let the interpreter's products be sums in the order of the inner dimension, as a GPU's are for every row alike.

    numpy's own depend on where in a tile a row lies.
    """
    monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.add.reduce(a[:, :, None] * b[None], axis=1, dtype=dtype))


@pytest.mark.usefixtures("exact_order")
def test_linear_does_not_depend_on_the_number_of_tokens_or_their_order():
    torch.manual_seed(0)
    x, weight = torch.randn(40, 75, device=DEVICE), torch.randn(33, 75, device=DEVICE)
    every = invariant_linear(x, weight, None, SMALL)
    for chosen in ([7], [39, 0, 7], list(range(39, 2, -1)), []):
        assert torch.equal(invariant_linear(x[chosen], weight, None, SMALL), every[chosen])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_tiles_fit_into_shared_memory(capability, dtype):
    room = (227 if capability == (9, 0) else 99) * 1024
    for outputs in (576, 4096, 28672):
        tiles = linear_tiles(capability, outputs, dtype)
        assert tiles.stages * (tiles.tokens + tiles.outputs) * tiles.inputs * dtype.itemsize <= room
    for head_dim in (64, 80, 128, 256):
        tiles = invariant_tiles(capability, head_dim, dtype)
        assert tiles.stages * 2 * tiles.positions * head_dim * dtype.itemsize <= room


SHAPES = [(1, 64, 16, 5), (3, 80, 4, 0), (3, 80, 4, 5), (4, 128, 16, 0), (20, 16, 4, 0)]
"""Group, head dimension, block size, window."""


def attend(case, num_blocks, spec, block_size):
    attention = InvariantTritonAttention([spec], num_blocks, block_size, torch.float32, torch.device(DEVICE))
    case.fill(attention)
    slots = case.step.cache_slots.clone()
    slots[slots < 0] = 0  # the dummy block takes what padding writes
    return attention.forward(0, case.q, case.k, case.v, case.step._replace(cache_slots=slots))


@pytest.mark.parametrize(("group", "head_dim", "block_size", "window"), SHAPES)
def test_attention_of_lanes_and_chunks(group, head_dim, block_size, window):
    spec = LayerSpec(2 * group, 2, head_dim, head_dim**-0.5, window, group=1)
    case, num_blocks = make_case(
        spec, lengths=[1, 0, 40, 17, 0], chunks=[(0, 1), (19, 17), (5, 0), (16, 16)], block_size=block_size, padding=3,
        device=DEVICE,
    )  # fmt: skip
    found = attend(case, num_blocks, spec, block_size).cpu()
    unread = case.answer.cpu().isnan()
    assert found.isfinite().all()
    torch.testing.assert_close(found[~unread], case.answer.cpu()[~unread].float(), rtol=1e-5, atol=1e-5)


def test_attention_finds_its_chunk_among_many():
    spec = LayerSpec(1, 1, 16, 0.25)
    case, num_blocks = make_case(spec, lengths=[3], chunks=[(3, 1)] * 70, block_size=4, device=DEVICE)
    torch.testing.assert_close(attend(case, num_blocks, spec, 4).cpu(), case.answer.float().cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("exact_order")
@pytest.mark.parametrize("window", [0, 21])
def test_a_decoded_token_is_the_same_as_part_of_a_prompt(window):
    """As it is computed anew after preemption: in a chunk of any length, beside others or alone."""
    spec = LayerSpec(3, 1, 16, 0.25, window)
    tiles = InvariantTiles(16, warps=4, stages=1)
    case, num_blocks = make_case(spec, lengths=[], chunks=[(0, 50)], block_size=4, device=DEVICE)
    attention = InvariantTritonAttention([spec], num_blocks, 4, torch.float32, torch.device(DEVICE))
    case.fill(attention)
    attention.forward(0, case.q, case.k, case.v, case.step)
    keys, values, table = attention.keys[0], attention.values[0], case.step.block_tables[0]

    def run(tokens, **changes):
        step = case.step._replace(
            **{name: torch.tensor(v, dtype=torch.int32, device=DEVICE) for name, v in changes.items()}
        )
        return invariant_attention(
            case.q[tokens], keys, values, table, step, scale=spec.scale, window=window, tiles=tiles
        )

    row = case.step.chunk_rows.item()
    whole = run(slice(0, 50))
    none = dict(chunk_rows=[], chunk_starts=[], chunk_offsets=[2])
    lanes = run([40, 33], lane_rows=[row, row], lane_lengths=[41, 34], **none)
    assert torch.equal(lanes, whole[[40, 33]])
    chunk = run(slice(30, 47), chunk_starts=[30], chunk_offsets=[0, 17])
    assert torch.equal(chunk, whole[30:47])


@pytest.mark.parametrize("kind", [InvariantTritonAttention, TritonAttention])
def test_blocks_are_copied_within_a_cache_that_was_made_anew(kind):
    """As after a sleep: the memory that the cache had before is somebody else's."""
    attention = kind([LayerSpec(2, 1, 16, 0.25)], 4, 4, torch.float32, torch.device(DEVICE))
    before = attention.keys[0]
    attention.free()
    attention.allocate()
    attention.keys[0][1] = 7.0
    attention.copy_blocks(torch.tensor([[1, 3]], dtype=torch.int32, device=DEVICE))
    assert attention.keys[0][3].eq(7.0).all()
    assert before.eq(0.0).all()
