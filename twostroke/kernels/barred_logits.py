"""Reading a row's logits in Triton, with the stop ids barred that may not come yet."""

# mypy: allow-untyped-defs

import triton
import triton.language as tl

_INFINITY = tl.constexpr(float("inf"))


@triton.jit
def load_logits(row_logits, ids, vocab):
    """Logits as float32; -inf beyond the vocabulary."""
    return tl.load(row_logits + ids, mask=ids < vocab, other=-_INFINITY).to(tl.float32)


@triton.jit
def bar(x, ids, stop_ids, stop_stride, num_barred):
    """Logits with -inf at the first `num_barred` stop ids."""
    for place in range(0, num_barred):
        x = tl.where(ids == tl.load(stop_ids + place * stop_stride), -_INFINITY, x)
    return x


@triton.jit
def num_barred(outputs, min_outputs, row, NUM_STOPS: tl.constexpr):
    return tl.where(tl.load(outputs + row) < tl.load(min_outputs + row), NUM_STOPS, 0)


@triton.jit
def gaps(row_logits, ids, vocab, stop_ids, stop_stride, num_barred, best):
    return best - bar(load_logits(row_logits, ids, vocab), ids, stop_ids, stop_stride, num_barred)
