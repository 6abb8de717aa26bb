"""Attention of prompt chunks in CUDA C++ for compute capability 9.0, see `streamed_prefill.cuh`."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch

from .compiler import load_library
from .ops import Rotary
from .prefill_schedule import PrefillSchedule
from .softmax_tile import LOG2_E
from .tensor_map import MAP_BYTES, address_of, check, check_size, place_in, zeroed

MAX_GROUP = 16
HEAD_DIMS = (64, 128)
ROWS = 128
"""Of a tile: pairs of a token and a query head."""
POSITIONS = 128
"""Of a tile of keys and values."""

_SOURCE = Path(__file__).with_suffix(".cu")
_SMALLEST_BOX = 16
"""Positions that are read at once, at least."""
_ROTATED_TOKENS = 64
"""Of a tile whose queries are rotated, at most: there is no room for the angles of more."""
_ROTATED_TILES = 3
"""Of a multiprocessor, at least, where queries are rotated on their way."""


def tile_tokens(heads: int, kv_heads: int) -> int:
    """Return how many tokens a tile has, in a layer of so many heads."""
    return ROWS // (heads // kv_heads)


class _Prompts(ctypes.Structure):
    """`Prompts` of the source."""

    _fields_ = [
        *((name, ctypes.c_char * MAP_BYTES) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_int) for name in ("kv_heads", "group", "tile_tokens", "block_size", "box_positions")),
        ("table_stride", ctypes.c_int),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("cosines", "sines", "weight")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("schedule", "table", "tickets", "out")),
        ("_padding", ctypes.c_char * 32),
    ]


class StreamedPrefill:
    """Launches the attention of prompt chunks, bf16. Launches run one after the other: they share a count.

    Args:
        device: a GPU of compute capability 9.0.

    Raises:
        CompilerMissing: the kernel cannot be compiled here.
    """

    def __init__(self, device: torch.device) -> None:
        self._library = load_library(_SOURCE)
        check_size(_Prompts, self._library.prompts_bytes())
        self._device = device
        self._processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._tickets = torch.zeros(2, dtype=torch.int32, device=device)

    @staticmethod
    def fits(heads: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, window: int) -> bool:
        """Whether a layer of that shape has such a kernel."""
        small = heads <= MAX_GROUP * kv_heads and head_dim in HEAD_DIMS
        return dtype == torch.bfloat16 and small and block_size % _SMALLEST_BOX == 0 and window == 0

    def rotates(self, tokens: int, heads: int, kv_heads: int) -> bool:
        """Whether queries of so many tokens are best rotated on their way; if not, a pass of its own must do it.

        A block's first queries are rotated while it has nothing else to do, so it should have some tiles.
        """
        size = tile_tokens(heads, kv_heads)
        return size <= _ROTATED_TOKENS and tokens // size * kv_heads >= _ROTATED_TILES * self._processors

    def __call__(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        table: torch.Tensor,
        schedule: PrefillSchedule,
        out: torch.Tensor,
        *,
        scale: float,
        rotary: Rotary | None = None,
        early: bool = False,
    ) -> None:
        """Do what `paged_prefill.prefill_attention` does without a window, with the same arguments.

        Args:
            rotary: how queries are changed on their way, with tiles of at most 64 tokens; None: not at all. They stay
                as they are in `q`.
            q: strides of tokens and heads are multiples of 16 bytes, and so is its address.
            schedule: the step's chunks, in tiles of `tile_tokens`.
            early: may start while the kernel ahead of it ends (programmatic dependent launch).
        """
        (tokens, heads, head_dim), (kv_heads, block_size) = q.shape, keys.shape[1:3]
        given = zeroed(_Prompts)
        given.kv_heads, given.group, given.tile_tokens = kv_heads, heads // kv_heads, schedule.tile_tokens
        given.block_size, given.box_positions = block_size, math.gcd(block_size, POSITIONS)
        given.table_stride, given.scale = table.stride(0), scale * LOG2_E
        if rotary is not None:
            assert schedule.tile_tokens <= _ROTATED_TOKENS, "their angles have no room"
            given.cosines, given.sines, given.eps = rotary.cos.data_ptr(), rotary.sin.data_ptr(), rotary.eps
            given.weight = address_of(rotary.q_norm)
        given.schedule, given.table = schedule.words.data_ptr(), table.data_ptr()
        given.tickets, given.out = self._tickets.data_ptr(), out.data_ptr()
        places = (place_in(given, _Prompts.queries.offset), ctypes.c_void_p(q.data_ptr()))
        # NOTE: the stride of what there is one of may be anything.
        strides = q.stride(0) if tokens > 1 else heads * head_dim, q.stride(1) if heads > 1 else head_dim
        sizes = (ctypes.c_uint64(size) for size in (tokens, heads, head_dim, *strides))
        box = (ctypes.c_uint32(size) for size in (given.tile_tokens, given.group))
        check(self._library.describe_queries(*places, *sizes, *box), "streamed_prefill: describe queries")
        for field, cache in ((_Prompts.keys, keys), (_Prompts.values, values)):
            self._describe(given, field.offset, cache)
        blocks = min(self._processors, kv_heads * (len(schedule.words) - 1))
        stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
        launch = (ctypes.byref(given), head_dim, blocks, int(early), stream)
        check(self._library.launch_prompts(*launch), "streamed_prefill: launch")

    def _describe(self, given: _Prompts, offset: int, cache: torch.Tensor) -> None:
        """Write the map by which the tensor memory accelerator reads a cache."""
        head_dim = cache.shape[3]
        places = (place_in(given, offset), ctypes.c_void_p(cache.data_ptr()))
        sizes = (ctypes.c_uint64(cache.numel() // head_dim), ctypes.c_uint64(head_dim))
        box = ctypes.c_uint32(given.box_positions)
        check(self._library.describe_cache(*places, *sizes, box), "streamed_prefill: describe cache")
