"""Attention of decode lanes in CUDA C++ for compute capability 9.0, see `streamed_decode.cuh`."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch

from .compiler import load_library
from .decode_schedule import DecodeSchedule
from .ops import Rotary
from .paged_decode import DecodeTiles, DecodeWorkspace
from .softmax_tile import LOG2_E
from .tensor_map import MAP_BYTES, address_of, check, check_size, place_in, zeroed

UNIT = 16
MAX_GROUP = 8
HEAD_DIMS = (64, 128)
TILES = tuple(
    DecodeTiles(UNIT, warps=warps, stages=stages, programs=warps, min_share=4, ahead=0, rounds=2)
    for warps, stages in ((4, 6), (8, 2))
)
"""How work is cut, for four warps a multiprocessor and for eight: into shares of units, one a warp; measured, see
bench/NOTES.md."""

_SOURCE = Path(__file__).with_suffix(".cu")
_LINE = 64
"""Numbers of a line in shared memory."""


def streamed_tiles(lanes: int, kv_heads: int, processors: int) -> DecodeTiles:
    """Return those of `TILES` for so many lanes on a device of so many multiprocessors.

    If each of eight warps had about one lane of one kv head, those with long ones would be left alone in the end. Four
    have two each then, a long one and a short one.
    """
    (four, eight), shares = TILES, lanes * kv_heads
    about_one_each = 0.8 * eight.warps * processors < shares <= 2 * four.warps * processors
    return four if about_one_each else eight


class _Attention(ctypes.Structure):
    """`Attention` of the source."""

    _fields_ = [
        ("keys", ctypes.c_char * MAP_BYTES),
        ("values", ctypes.c_char * MAP_BYTES),
        *((name, ctypes.c_int) for name in ("kv_heads", "group", "block_units", "table_stride", "most_records")),
        *((name, ctypes.c_int) for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head", "zero")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "cosines", "sines", "q_weight", "k_weight")),
        *((name, ctypes.c_void_p) for name in ("key_cache", "value_cache", "table", "slots", "schedule")),
        *((name, ctypes.c_void_p) for name in ("partial", "log_sum", "arrivals", "tickets", "out")),
        ("_padding", ctypes.c_char * 64),
    ]


class StreamedDecode:
    """Launches the attention of decode lanes, bf16.

    Args:
        device: a GPU of compute capability 9.0.

    Raises:
        CompilerMissing: the kernel cannot be compiled here.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = load_library(_SOURCE)
        check_size(_Attention, self._library.attention_bytes())
        self._device = device
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count

    @staticmethod
    def fits(heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
        """Whether a layer of that shape has such a kernel."""
        small = heads <= MAX_GROUP * kv_heads and head_dim in HEAD_DIMS
        return dtype == torch.bfloat16 and small and block_size % UNIT == 0

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: Rotary | None,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        slots: torch.Tensor,
        schedule: DecodeSchedule,
        out: torch.Tensor,
        workspace: DecodeWorkspace,
        *,
        scale: float,
        tiles: DecodeTiles,
        early: bool = False,
    ) -> None:
        """Do what `paged_decode.decode_attention` does, with the same arguments; `tiles` are of `TILES`."""
        kv_heads, block_size, head_dim = keys.shape[1:]
        given = zeroed(_Attention)
        given.kv_heads, given.group, given.block_units = kv_heads, q.shape[1] // kv_heads, block_size // UNIT
        given.table_stride, given.most_records = table.stride(0), len(schedule.words) - 1
        (given.q_token, given.q_head, _), (given.k_token, given.k_head, _) = q.stride(), k.stride()
        given.v_token, given.v_head, _ = v.stride()
        given.scale = scale * LOG2_E
        given.q, given.k, given.v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        if rotary is not None:
            given.cosines, given.sines, given.eps = rotary.cos.data_ptr(), rotary.sin.data_ptr(), rotary.eps
            given.q_weight, given.k_weight = address_of(rotary.q_norm), address_of(rotary.k_norm)
        given.key_cache, given.value_cache = keys.data_ptr(), values.data_ptr()
        given.table, given.slots, given.schedule = table.data_ptr(), slots.data_ptr(), schedule.words.data_ptr()
        given.partial, given.log_sum = workspace.partial.data_ptr(), workspace.log_sum.data_ptr()
        given.arrivals, given.tickets = workspace.arrivals.data_ptr(), workspace.tickets.data_ptr()
        given.out = out.data_ptr()
        for field, cache in ((_Attention.keys, keys), (_Attention.values, values)):
            self._describe(given, field.offset, cache)
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        shape = (head_dim, tiles.warps, tiles.stages, self._processors, int(early))
        check(self._library.launch_attention(ctypes.byref(given), *shape, stream), "streamed_decode: launch")

    def _describe(self, given: _Attention, offset: int, cache: torch.Tensor) -> None:
        """Write the map by which the tensor memory accelerator reads a cache."""
        blocks, kv_heads, block_size, head_dim = cache.shape
        places = (place_in(given, offset), ctypes.c_void_p(cache.data_ptr()))
        lines = head_dim // _LINE
        sizes = (ctypes.c_uint64(blocks * kv_heads * block_size * lines), ctypes.c_uint32(UNIT * lines))
        check(self._library.describe_cache(*places, *sizes), "streamed_decode: describe")
