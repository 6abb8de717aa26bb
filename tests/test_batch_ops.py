"""The batch's operations: plain PyTorch against a model in Python, Triton (interpreted) against plain PyTorch."""

import numpy as np
import pytest
import torch

from twostroke.device import layout
from twostroke.device.batch_state import BatchState
from twostroke.device.cpu import CpuDevice
from twostroke.kernels import batch as kernel_layout
from twostroke.kernels.batch import TorchBatchOps
from twostroke.plan import ROW_RECORD, Flag, Plan

R, LANES, TOKENS, WIDTH, BLOCK = 6, 8, 64, 10, 4


def make_ops(name):
    if name == "torch":
        return TorchBatchOps()
    pytest.importorskip("triton")
    from twostroke.kernels.batch_triton import TritonBatchOps

    return TritonBatchOps()


@pytest.fixture(params=["torch", "triton"])
def ops(request):
    return make_ops(request.param)


def make_state(groups=1):
    device = CpuDevice()
    state = BatchState(
        device, max_rows=R, max_lanes=LANES, max_tokens=TOKENS, table_width=WIDTH, block_size=BLOCK, num_groups=groups
    )
    device.close()
    return state


def make_words(joins=(), blocks=(), lanes=(), chunks=(), tokens=(), lane_rows=(), step=0):
    plan = Plan(
        step=step,
        lane_rows=np.array(lane_rows, np.int32),
        chunks=np.array(chunks, np.int32).reshape(-1, 4),
        prompt_tokens=np.array(tokens, np.int32),
        joins=np.array([record(**join) for join in joins], ROW_RECORD),
        block_deltas=np.array(blocks, np.int32).reshape(-1, 4),
        lane_deltas=np.array(lanes, np.int32).reshape(-1, 2),
    )
    words = np.full(600, -99, np.int32)
    used = layout.pack(plan, words)
    assert (words[used:] == -99).all()
    return torch.from_numpy(words)


def record(row, **values):
    out = np.zeros((), ROW_RECORD)
    out["row"], out["stop_ids"], out["max_outputs"] = row, -1, 100
    for name, value in values.items():
        out[name] = value
    return out


def test_the_two_statements_of_the_header_agree():
    for place in layout.Header:
        if place.name != "STEP":
            assert getattr(kernel_layout, place.name) == place
    assert layout.HEADER_WORDS == kernel_layout.HEADER_WORDS
    for flag in Flag:
        assert getattr(kernel_layout, f"FLAG_{flag.name}") == flag


def test_an_empty_plan_is_a_header_and_changes_nothing(ops):
    state, before = make_state(), make_state()
    ops.apply_deltas(make_words(), state)
    for name, value in vars(before).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(state, name), value), name


def test_deltas_reach_rows_tables_and_lanes(ops):
    state = make_state(groups=2)
    stops = [7, 9] + [-1] * (state.stop_ids.shape[0] - 2)
    words = make_words(
        joins=[
            dict(
                row=2, temperature=0.5, top_k=3, top_p=0.9, min_p=0.25, seed_low=0xFFFFFFFF, seed_high=5, stop_ids=stops
            ),
            dict(row=0, outputs=4, min_outputs=6, max_outputs=8),
        ],
        blocks=[[0, 2, 0, 11], [1, 2, 9, 12], [1, 0, 3, 13]],
        lanes=[[0, 2], [3, 0]],
    )
    ops.apply_deltas(words, state)
    assert state.done.tolist() == [0, 1, 0, 1, 1, 1, 1]
    assert state.temperature[2] == 0.5
    assert state.top_p[2] == np.float32(0.9)
    assert state.min_p[2] == 0.25
    assert (state.top_k[2], state.seed_low[2], state.seed_high[2]) == (3, -1, 5)
    assert state.stop_ids[:, 2].tolist() == stops
    assert (state.outputs[0], state.min_outputs[0], state.max_outputs[0]) == (4, 6, 8)
    assert state.block_tables[0, 2, 0] == 11
    assert state.block_tables[1, 2, 9] == 12
    assert state.block_tables[1, 0, 3] == 13
    assert int((state.block_tables != 0).sum()) == 3
    assert state.lane_to_row.tolist() == [2, R, R, 0, R, R, R, R]


def test_more_deltas_than_one_pass_of_the_kernel(ops):
    """Any number of deltas goes through the same fixed grid: 6 rows x 10 blocks, and all lanes."""
    state = make_state()
    blocks = [[0, row, index, 1 + row * WIDTH + index] for row in range(R) for index in range(WIDTH)]
    words = make_words(
        joins=[dict(row=row) for row in range(R)], blocks=blocks, lanes=[[i, i % R] for i in range(LANES)]
    )
    ops.apply_deltas(words, state)
    assert state.block_tables[0, :R].reshape(-1).tolist() == list(range(1, R * WIDTH + 1))
    assert state.lane_to_row.tolist() == [0, 1, 2, 3, 4, 5, 0, 1]


def living_state(ops, groups=1):
    """Rows 1 and 3 decode at positions 5 and 8, row 4 is dead at 6; lanes 0..2 are theirs, lanes 3.. padding."""
    state = make_state(groups)
    ops.apply_deltas(
        make_words(
            joins=[
                dict(row=1, length=5, last_token=41, outputs=1),
                dict(row=3, length=8, last_token=43, outputs=1),
                dict(row=4, length=6, last_token=44, outputs=1, done=1),
            ],
            blocks=[[0, 1, 0, 21], [0, 1, 1, 22], [0, 3, 2, 23], [0, 4, 1, 24]],
            lanes=[[0, 1], [1, 3], [2, 4]],
        ),
        state,
    )
    return state


def test_lanes_carry_over_the_last_token_and_dead_or_padded_lanes_touch_only_the_dummy_block(ops):
    """F09, F10: padding writes to the dummy block only; A18: a row that is done yields nothing more."""
    state = living_state(ops)
    state.input_ids.fill_(-5)
    step = ops.prepare(make_words(lane_rows=[1, 3, 4]), state, 4, 0, 4, 4)
    assert step.input_ids.tolist() == [41, 43, 0, 0]
    assert step.positions.tolist() == [5, 8, 0, 0]
    assert step.cache_slots.tolist() == [[22 * BLOCK + 1, 23 * BLOCK, 0, 0]]
    assert step.lane_lengths.tolist() == [6, 9, 0, 0]
    assert step.lane_rows.tolist() == [1, 3, 4, R]
    assert state.length.tolist()[:5] == [0, 6, 0, 9, 6]
    assert step.sample_index is None


def test_chunks_bring_their_tokens_and_positions_behind_the_lanes(ops):
    state = living_state(ops)
    blocks = [[0, 0, 0, 31], [0, 0, 1, 32], [0, 5, 1, 33]]
    words = make_words(
        joins=[dict(row=0), dict(row=5)],
        blocks=blocks,
        chunks=[[0, 2, 3, 0], [5, 4, 2, 1]],
        tokens=[60, 61, 62, 70, 71],
        lane_rows=[1, 3],
    )
    ops.apply_deltas(words, state)
    state.input_ids.fill_(-5)
    step = ops.prepare(words, state, 2, 2, 7, 3)
    assert step.input_ids.tolist() == [41, 43, 60, 61, 62, 70, 71]
    assert step.positions.tolist() == [5, 8, 2, 3, 4, 4, 5]
    slots = [22 * BLOCK + 1, 23 * BLOCK, 31 * BLOCK + 2, 31 * BLOCK + 3, 32 * BLOCK, 33 * BLOCK, 33 * BLOCK + 1]
    assert step.cache_slots.tolist() == [slots]
    assert step.chunk_rows.tolist() == [0, 5]
    assert step.chunk_starts.tolist() == [2, 4]
    assert step.chunk_offsets.tolist() == [2, 5, 7]
    assert step.sample_index.tolist() == [0, 1, 6]
    assert state.sample_rows[:3].tolist() == [1, 3, 5]
    assert state.length[[0, 5]].tolist() == [5, 6]


def test_a_padded_step_is_the_exact_one_with_the_dummy_row_behind_it(ops):
    """F09, F10: room for 6 lanes, 5 chunks, 12 tokens and 8 outputs; 2, 2, 7 and 3 are in use."""
    words = make_words(
        joins=[dict(row=0), dict(row=5)],
        blocks=[[0, 0, 0, 31], [0, 0, 1, 32], [0, 5, 1, 33], [1, 5, 1, 34]],
        lanes=[[2, R]],
        chunks=[[0, 2, 3, 0], [5, 4, 2, 1]],
        tokens=[60, 61, 62, 70, 71],
        lane_rows=[1, 3],
    )
    steps = []
    for sizes in ((2, 2, 7, 3), (6, 5, 12, 8)):
        state = living_state(ops, groups=2)
        ops.apply_deltas(words, state)
        for name in ("input_ids", "positions", "cache_slots", "lane_lengths", "sample_index", "sample_rows"):
            getattr(state, name).fill_(-5)
        steps.append((ops.prepare(words, state, *sizes), state))
    (exact, before), (padded, after) = steps
    for name in ("input_ids", "positions", "cache_slots"):
        used, padding = getattr(padded, name)[..., :7], getattr(padded, name)[..., 7:]
        assert torch.equal(used, getattr(exact, name)), name
        assert padding.shape[-1] == 5
        assert not padding.any(), name
    assert padded.lane_rows.tolist() == [1, 3, R, R, R, R]
    assert padded.lane_lengths.tolist() == [6, 9, 0, 0, 0, 0]
    assert padded.chunk_rows.tolist() == [0, 5, R, R, R]
    assert padded.chunk_starts.tolist() == [2, 4, 0, 0, 0]
    assert padded.chunk_offsets.tolist() == [2, 5, 7, 7, 7, 7]
    assert padded.sample_index.tolist() == [0, 1, 6, 0, 0, 0, 0, 0]
    assert after.sample_rows[:8].tolist() == [1, 3, 5, R, R, R, R, R]
    assert torch.equal(before.length, after.length)


def test_advance_tells_tokens_stops_lengths_errors_and_the_dead_apart(ops):
    state = make_state()
    stop = [9] + [-1] * (state.stop_ids.shape[0] - 1)
    joins = [
        dict(row=0, outputs=1, max_outputs=9, stop_ids=stop),  # goes on
        dict(row=1, outputs=1, max_outputs=9, stop_ids=stop),  # samples its stop id
        dict(row=2, outputs=3, max_outputs=4, stop_ids=stop),  # last token by length
        dict(row=3, outputs=3, max_outputs=4, stop_ids=stop),  # both
        dict(row=4, outputs=1, max_outputs=9, last_token=77),  # not a number
        dict(row=5, outputs=1, max_outputs=9, last_token=78, done=1),  # dead
    ]
    ops.apply_deltas(make_words(joins=joins), state)
    state.sample_rows[:7] = torch.arange(7)
    state.tokens[:7] = torch.tensor([5, 9, 6, 9, 1, 9, 3])
    state.errors[:7] = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    output = torch.full((8, 2), -3, dtype=torch.int32)
    ops.advance(state, 7, output)
    T, S, L, E = Flag.TOKEN, Flag.STOP, Flag.LENGTH, Flag.ERROR
    assert output[:7, 1].tolist() == [T, T | S, T | L, T | S | L, E, 0, 0]
    assert output[:7, 0].tolist() == [5, 9, 6, 9, 0, 0, 0]
    assert output[7].tolist() == [-3, -3]
    assert state.done.tolist() == [0, 1, 1, 1, 1, 1, 1]
    assert state.outputs[:6].tolist() == [2, 2, 4, 4, 1, 1]
    assert state.last_token[:6].tolist() == [5, 9, 6, 9, 77, 78]


def test_triton_equals_torch_on_random_steps():
    rng = np.random.default_rng(0)
    states = {name: (make_ops(name), make_state(groups=2)) for name in ("torch", "triton")}
    for turn in range(20):
        sizes = (3, 2, 14, 4) if turn % 2 else (6, 4, 40, 8)
        rows = rng.permutation(R)
        joins = [
            dict(row=row, length=rng.integers(0, 20), last_token=rng.integers(0, 99), done=rng.integers(0, 2))
            for row in rows[:4]
        ]
        blocks = [[g, row, i, rng.integers(1, 99)] for g in range(2) for row in rows[:4] for i in range(WIDTH)]
        lane_rows = [*rows[:3], R]
        lanes = [[i, row] for i, row in enumerate(lane_rows)]
        chunks = [[rows[4], 3, 9, 1], [rows[5], 0, 2, 0]]
        words = make_words(joins, blocks, lanes, chunks, rng.integers(0, 99, 11), lane_rows[:3])
        outputs = []
        picks = torch.from_numpy(rng.integers(0, 99, LANES)).int()
        for ops, state in states.values():
            ops.apply_deltas(words, state)
            step = ops.prepare(words, state, *sizes)
            state.tokens.copy_(picks)
            output = torch.zeros(LANES, 2, dtype=torch.int32)
            ops.advance(state, sizes[3], output)
            outputs.append([*step[:-2], output])
        for a, b in zip(*outputs, strict=True):
            assert torch.equal(a, b)
        for name, value in vars(states["torch"][1]).items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, getattr(states["triton"][1], name)), name
