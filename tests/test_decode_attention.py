"""The one kernel of decode lanes against the plain rotation, cache write and attention, and its schedule.

The cache is full of NaN wherever a sequence has nothing of its own, so a read too far shows.
"""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_case import make_case

from twostroke.attention.interface import LayerSpec
from twostroke.attention.torch_backend import TorchAttention
from twostroke.kernels import ops
from twostroke.kernels.ops import Rotary

pytest.importorskip("triton")

from twostroke.attention.triton_backend import TritonAttention
from twostroke.kernels.decode_schedule import (
    BEGIN,
    END,
    LANE,
    RECORD,
    ROW,
    SPLIT,
    SPLITS,
    DecodeSchedule,
    make_schedule,
)
from twostroke.kernels.paged_decode import (
    DecodeTiles,
    DecodeWorkspace,
    decode_attention,
    decode_tiles,
    extra_programs,
)

# The interpreter of triton 3.6 relies on what numpy 2.3 announces to drop.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAN = float("nan")
TILE = 16
TILES = DecodeTiles(TILE, warps=4, stages=2, programs=4, min_share=1, ahead=0)


def records(lengths, *, extra, window=0, tile=TILE, min_share=1, rounds=1):
    """Make a schedule and return the records in use, as a list of lists."""
    lane_lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    rows = torch.arange(100, 100 + len(lengths), dtype=torch.int32, device=DEVICE)
    schedule = DecodeSchedule.empty(len(lengths), extra, torch.device(DEVICE))
    lines = len(schedule.words)
    schedule = schedule._replace(words=schedule.words.new_full((lines + 100, RECORD), -1))
    make_schedule(schedule, rows, lane_lengths, window=window, tile=tile, min_share=min_share, rounds=rounds)
    used = int(schedule.words[0, 0])
    assert used < lines
    assert used <= max(len(lengths) + extra, rounds * extra)
    assert (schedule.words[1 + used :] == -1).all()
    return schedule.words[1 : 1 + used].tolist()


BATCHES = {
    "one": [700],
    "edges": [0, 1, 2, TILE, TILE + 1, TILE + 2, 2 * TILE + 1],
    "dead": [0] * 5,
    "equal": [225] * 12,
    "long and short": [70 * TILE + 1, 10 * TILE + 1],
    "long among short": [20] * 15 + [2_000] + [20] * 15,
    "ragged": [(37 * i * i) % 800 for i in range(50)],
    "long among tiny": [60 * TILE + 1] + [TILE + 1] * 31,
}


def check_records(lengths, *, extra, window, min_share, rounds):
    """Every lane is cut into all that it sees, longest lanes first; those that are cut have a place to meet at."""
    shares = {}
    used = records(lengths, extra=extra, window=window, min_share=min_share, rounds=rounds)
    for place, record in enumerate(used):
        assert record[ROW] == 100 + record[LANE]
        shares.setdefault(record[LANE], []).append((place, record))
    assert sorted(shares) == list(range(len(lengths)))
    for lane, parts in shares.items():
        length = lengths[lane]
        position = max(length - window, 0) if window else 0
        for split, (place, record) in enumerate(parts):
            assert place == parts[0][0] + split
            assert (record[SPLIT], record[SPLITS]) == (split, len(parts) if length else 0)
            if length > 1 and window != 1:
                assert record[BEGIN] == position < record[END]
            position = max(record[END], position)
        assert position == max(length - 1, 0)
        if len(parts) > 1:
            (first, share), (last, _) = parts[0], parts[-1]
            assert first < last < 2 * extra
            assert 2 * (share[END] - share[BEGIN]) > min_share * TILE
    tiles = [-(-sum(part[END] - part[BEGIN] for _, part in shares[record[LANE]]) // TILE) for record in used]
    assert tiles == sorted(tiles, reverse=True)


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("extra", [1, 2, 7, 33])
@pytest.mark.parametrize("window", [0, 1, 40])
@pytest.mark.parametrize("min_share", [1, 4])
@pytest.mark.parametrize("rounds", [1, 2])
def test_records_cut_what_each_lane_sees(lengths, extra, window, min_share, rounds):
    check_records(lengths, extra=extra, window=window, min_share=min_share, rounds=rounds)


@given(
    lengths=st.lists(st.sampled_from([0, 1, TILE + 1, 500, 40_000]) | st.integers(0, 3_000), min_size=1, max_size=80),
    extra=st.integers(1, 200),
    window=st.just(0) | st.integers(1, 2_000),
    min_share=st.integers(1, 8),
    rounds=st.sampled_from([1, 2]),
)
@settings(max_examples=100, deadline=None)
def test_records_cut_what_lanes_of_any_batch_see(lengths, extra, window, min_share, rounds):
    check_records(lengths, extra=extra, window=window, min_share=min_share, rounds=rounds)


def test_work_is_shared_out_by_tokens():
    used = records(BATCHES["long among short"], extra=33)
    sizes = [record[END] - record[BEGIN] for record in used]
    assert sum(record[LANE] == 15 for record in used) >= 20
    assert max(sizes) <= 1.5 * 2_570 / 33 + TILE
    assert [record[SPLITS] for record in records(BATCHES["equal"], extra=3)] == [1] * 12


def test_no_share_begins_when_all_others_end():
    """60 lanes over 132 places: with shares of the mean size they would take 133, and all but one be idle meanwhile."""
    lengths = [750 + (37 * i * i) % 1_000 for i in range(60)]
    mean = sum(-(-(length - 1) // TILE) for length in lengths) / 132
    used = records(lengths, extra=132, min_share=4)
    sizes = [-(-(record[END] - record[BEGIN]) // TILE) for record in used]
    assert 120 <= len(used) <= 132
    assert max(sizes) <= 1.4 * mean
    assert len(records([1_000, 900], extra=2)) == 2


def test_uneven_lanes_are_cut_into_two_rounds_of_shares_where_a_program_takes_two():
    uneven, even = [500 + 40 * i for i in range(40)], [1_280] * 40
    assert len(records(uneven, extra=50, rounds=1)) < 60
    assert 90 <= len(records(uneven, extra=50, rounds=2)) <= 100
    assert records(even, extra=50, rounds=1) == records(even, extra=50, rounds=2)


def test_one_lane_alone_is_shared_out_over_the_gpu():
    tiles = decode_tiles((9, 0), 128, torch.bfloat16, crowded=False)
    used = records([32_000], extra=extra_programs(8, 132, tiles), tile=tiles.positions, min_share=tiles.min_share)
    assert 132 <= 8 * len(used) <= 3 * 132


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("crowded", [False, True])
def test_tiles_suit_the_matrix_units(capability, dtype, crowded):
    for head_dim in (64, 80, 128, 256):
        assert decode_tiles(capability, head_dim, dtype, crowded=crowded).positions >= 16


def random_rotary(tokens, head_dim, norms):
    inv_freq = 10_000.0 ** (-torch.arange(head_dim // 2, device=DEVICE) / (head_dim // 2))
    cos, sin = ops.rotary_tables(torch.randint(0, 4_000, (tokens,), device=DEVICE), inv_freq, 1.0)
    q_norm, k_norm = (torch.randn(head_dim, device=DEVICE) if norm else None for norm in norms)
    return Rotary(cos, sin, q_norm, k_norm, 1e-5)


def run_kernel(case, keys, values, rotary, spec, workspace, *, extra):
    """Attend with a share of one tile at the least; return the output."""
    step = case.step
    schedule = DecodeSchedule.empty(step.num_lanes, extra, torch.device(DEVICE))
    make_schedule(schedule, step.lane_rows, step.lane_lengths, window=spec.window, tile=TILE, min_share=1, rounds=1)
    out = torch.full(case.q.shape, NAN, device=DEVICE)
    decode_attention(
        case.q, case.k, case.v, rotary, keys, values, step.block_tables[spec.group], step.cache_slots[spec.group],
        schedule, out, workspace, scale=spec.scale, tiles=TILES,
    )  # fmt: skip
    return out


def expected_of(case, spec, num_blocks, block_size, rotary):
    """Return (keys, values, output) of the plain backend."""
    plain = TorchAttention([spec], num_blocks, block_size, torch.float32, torch.device(DEVICE))
    case.fill(plain)
    q, k, v = case.q.clone(), case.k.clone(), case.v.clone()
    out = (
        plain.forward(0, q, k, v, case.step) if rotary is None else plain.forward_rotary(0, q, k, v, rotary, case.step)
    )
    return plain.keys[0], plain.values[0], out


def workspace_for(spec, extra):
    made = DecodeWorkspace.zeros(2 * extra * spec.heads, spec.head_dim, torch.device(DEVICE))
    made.partial.fill_(NAN)
    made.log_sum.fill_(NAN)
    return made


LENGTHS = [1, TILE, TILE + 1, 0, TILE + 2, 2 * TILE + 1, 0, 150]


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size", "window"),
    [(2, 1, 64, 16, 5), (1, 3, 80, 4, 0), (2, 4, 128, 16, 0), (1, 16, 16, 4, 40), (1, 2, 256, 16, 1)],
)
@pytest.mark.parametrize("norms", [None, (False, False), (True, True), (False, True)])
def test_equals_rotating_writing_and_attending(kv_heads, group, head_dim, block_size, window, norms):
    """F09, F10 among it: dead lanes write nothing and come out as zeros, whatever lies in the cache."""
    spec = LayerSpec(kv_heads * group, kv_heads, head_dim, head_dim**-0.5, window, group=1)
    case, num_blocks = make_case(spec, lengths=LENGTHS, chunks=[], block_size=block_size, device=DEVICE)
    rotary = None if norms is None else random_rotary(len(LENGTHS), head_dim, norms)
    keys, values, expected = expected_of(case, spec, num_blocks, block_size, rotary)
    inputs = [x.clone() for x in (case.q, case.k, case.v)]
    workspace, outs = workspace_for(spec, 7), []
    for _ in range(2):
        cache = TorchAttention([spec], num_blocks, block_size, torch.float32, torch.device(DEVICE))
        case.fill(cache)
        outs.append(run_kernel(case, cache.keys[0], cache.values[0], rotary, spec, workspace, extra=7))
        assert not workspace.arrivals.any()
        torch.testing.assert_close(cache.keys[0][1:], keys[1:], rtol=1e-5, atol=1e-5, equal_nan=True)
        torch.testing.assert_close(cache.values[0][1:], values[1:], rtol=0, atol=0, equal_nan=True)
        assert cache.keys[0][0].isnan().all()
    dead = case.step.lane_lengths == 0
    assert torch.equal(outs[0][dead], torch.zeros_like(outs[0][dead]))
    torch.testing.assert_close(outs[0][~dead], expected[~dead], rtol=1e-5, atol=1e-5)
    assert torch.equal(outs[0], outs[1])
    assert all(torch.equal(x, before) for x, before in zip((case.q, case.k, case.v), inputs, strict=True))


def test_the_longest_lane_of_these_is_shared_out():
    lane_records = [record for record in records(LENGTHS, extra=7) if record[LANE] == len(LENGTHS) - 1]
    assert len(lane_records) > 2


@pytest.mark.skipif(DEVICE == "cuda", reason="the order of a GPU's programs is its own")
def test_the_order_of_arrival_changes_nothing(monkeypatch):
    from triton.runtime.interpreter import interpreter_builder

    spec = LayerSpec(4, 2, 16, 0.25)
    case, num_blocks = make_case(spec, lengths=[3, 200, 90, 0], chunks=[], block_size=4)
    cache = TorchAttention([spec], num_blocks, 4, torch.float32, torch.device("cpu"))
    case.fill(cache)
    rotary, workspace = random_rotary(4, 16, (True, True)), workspace_for(spec, 9)
    arguments = (case, cache.keys[0], cache.values[0], rotary, spec, workspace)
    forwards = run_kernel(*arguments, extra=9)
    set_grid_idx = interpreter_builder.set_grid_idx

    def backwards(x, y, z):
        set_grid_idx(x, interpreter_builder.grid_dim[1] - 1 - y, z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", backwards)
    assert torch.equal(run_kernel(*arguments, extra=9), forwards)
    assert not workspace.arrivals.any()


@pytest.mark.parametrize("lengths", [[9, 2, 0, 70], [3], []])
@pytest.mark.parametrize("window", [0, 6])
def test_mixed_steps_equal_the_plain_backend(lengths, window):
    """Lanes and chunks of one step; layers of two kinds, whose schedules differ."""
    specs = [LayerSpec(4, 2, 16, 0.25), LayerSpec(4, 2, 16, 0.25, window), LayerSpec(4, 2, 16, 0.25, window)]
    chunks = [(5, 4), (0, 19)]
    case, num_blocks = make_case(specs[0], lengths=lengths, chunks=chunks, block_size=4, padding=2, device=DEVICE)
    rotary = random_rotary(len(case.q), 16, (True, False))
    plain, fused = (
        kind(specs, num_blocks, 4, torch.float32, torch.device(DEVICE)) for kind in (TorchAttention, TritonAttention)
    )
    for layer in range(len(specs)):
        case.fill(plain, layer)
        case.fill(fused, layer)
        outs = [
            attention.forward_rotary(layer, case.q.clone(), case.k.clone(), case.v.clone(), rotary, case.step)
            for attention in (plain, fused)
        ]
        torch.testing.assert_close(outs[1][:-2], outs[0][:-2], rtol=1e-5, atol=1e-5)
        for one, other in ((fused.keys, plain.keys), (fused.values, plain.values)):
            torch.testing.assert_close(one[layer][1:], other[layer][1:], rtol=1e-5, atol=1e-5, equal_nan=True)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from twostroke.kernels.paged_decode import decode_kernel

sizes = dict(KV_HEADS=2, GROUP=4, GROUP_PAD=16, HEAD_DIM=64, DIM_PAD=64, BLOCK_SIZE=16, TILE=64, ROTARY=True,
             Q_NORM=True, K_NORM=True, MEMBERS=4, CHUNK=16, PDL=True, AHEAD=2, LINE_DIMS=64)
kinds = {"table_ptr": "*i32", "slots_ptr": "*i64", "schedule_ptr": "*i32", "arrivals_ptr": "*i32", "eps": "fp32",
         "scale": "fp32"} | dict.fromkeys(("cos_ptr", "sin_ptr", "partial_ptr", "log_sum_ptr"), "*fp32")
names = decode_kernel.arg_names
other = lambda name: "i32" if name.endswith("stride") else "*bf16"
signature = {name: "constexpr" if name in sizes else kinds.get(name, other(name)) for name in names}
constants = {(names.index(name),): value for name, value in sizes.items()}
made = compile(ASTSource(decode_kernel, signature, constants), target=GPUTarget("cuda", 90, 32),
               options={"num_warps": 4, "num_stages": 4, "launch_pdl": True})
wait, go = (made.asm["ptx"].index("griddepcontrol." + word) for word in ("wait", "launch_dependents"))
assert wait < go < made.asm["ptx"].index("st.global")
assert "atom.global.gpu.acq_rel" in made.asm["ptx"]
"""


@pytest.mark.skipif(DEVICE == "cuda", reason="the tests that run it there compile it")
def test_what_the_interpreter_cannot_run_compiles_for_hopper():
    """Dependents may start only after the wait, or what is older than the kernel before them might not be done."""
    code = "import os; del os.environ['TRITON_INTERPRET']\n" + COMPILE
    subprocess.run([sys.executable, "-c", code], check=True)


def gpu_case(spec, lengths):
    case, num_blocks = make_case(
        spec, lengths=lengths, chunks=[], block_size=16, max_length=0, dtype=torch.bfloat16, device="cuda"
    )
    return case, num_blocks, random_rotary(len(lengths), spec.head_dim, (True, True))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA device")
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (16, 8, 128), (9, 3, 64), (8, 8, 80)])
@pytest.mark.parametrize("window", [0, 300])
def test_bf16_on_the_device(heads, kv_heads, head_dim, window):
    """Against the plain backend in float32, which gets what the three steps before attention round to."""
    spec = LayerSpec(heads, kv_heads, head_dim, head_dim**-0.5, window)
    case, num_blocks, rotary = gpu_case(spec, [1, 255, 256, 0, 257, 9_000, 31, 0])
    rotary = rotary._replace(q_norm=rotary.q_norm.bfloat16(), k_norm=rotary.k_norm.bfloat16())
    q, k = case.q.clone(), case.k.clone()
    ops.rotate_(q, k, *rotary)
    plain = TorchAttention([spec], num_blocks, 16, torch.float32, torch.device("cuda"))
    case.fill(plain)
    expected = plain.forward(0, q.float(), k.float(), case.v.float(), case.step)
    fused = TritonAttention([spec], num_blocks, 16, torch.bfloat16, torch.device("cuda"))
    case.fill(fused)
    out = fused.forward_rotary(0, case.q, case.k, case.v, rotary, case.step)
    assert out.isfinite().all()
    assert (out - expected).norm() <= 1e-2 * expected.norm()
    written = fused.keys[0][1:].float()
    alive = ~plain.keys[0][1:].isnan()
    assert torch.equal(written.isnan(), ~alive)
    assert (written - plain.keys[0][1:])[alive].norm() <= 1e-3 * plain.keys[0][1:][alive].norm()


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICE != "cuda" or torch.cuda.get_device_capability() < (9, 0), reason="needs programmatic dependent launch"
)
def test_early_launches_change_nothing():
    """A captured chain of layers whose queries come from the layer before, bit for bit, again and again."""
    specs = [LayerSpec(32, 8, 128, 128**-0.5, window) for window in (0, 0, 200, 0, 200, 0)]
    case, num_blocks, rotary = gpu_case(specs[0], [3_000, 1, 700, 0, 64, 9_000] + [40] * 26)
    rotary = rotary._replace(q_norm=None, k_norm=None)
    weight = torch.randn(4096, 48 * 128, device="cuda", dtype=torch.bfloat16) / 64
    outs = []
    for early in (False, True):
        attention = TritonAttention(specs, num_blocks, 16, torch.bfloat16, torch.device("cuda"))
        attention._early = early
        for layer in range(len(specs)):
            case.fill(attention, layer)

        def chain(attention=attention):
            x = torch.cat((case.q, case.k, case.v), 1)
            for layer in range(len(specs)):
                mixed = attention.forward_rotary(layer, *x.split((32, 8, 8), 1), rotary, case.step)
                x = (mixed.flatten(1) @ weight).view(-1, 48, 128)
            return x

        chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain()
        for _ in range(20):
            graph.replay()
            torch.cuda.synchronize()
            outs.append(out.clone())
    assert outs[0].isfinite().all()
    assert all(torch.equal(out, outs[0]) for out in outs)
