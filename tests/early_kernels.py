"""Compiles for an H200, which need not be there, every kernel that may start early; prints what breaks their rule.

Run by `test_early.py` in a process of its own, since Triton's interpreter is chosen when a kernel is defined.
"""

import re

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from twostroke.kernels import band, batch_triton, bracket, decode_schedule, draw, embed, norm, sample, typical


def each(names, kind):
    return dict.fromkeys(names.split(), kind)


KINDS = {
    **each("temperatures top_ps min_ps typical_ps bests nears fars radii centers spreads chances", "*fp32"),
    **each("split_values split_weights inner_weights inv_freq_ptr cos_ptr sin_ptr squares_ptr", "*fp32"),
    **each("input_ids positions cache_slots sample_index ids_ptr positions_ptr", "*i64"),
    **each("logits band embedding_ptr weight_ptr residual_ptr normed_ptr values_ptr", "*bf16"),
    **each("vocab lanes sampled block_size num_splits dummy_row num_tokens num_sampled", "i32"),
    **each("extra window min_share", "i32"),
    **each("eps factor", "fp32"),
}
"""Of parameters; the others are strides or pointers to int32."""

STOPS, SPLITS = dict(NUM_STOPS=32), dict(SPLIT=4096, SPLITS=64)
LAYER = dict(WIDTH=1024, BLOCK=1024)
FIRST = [
    (batch_triton._apply_deltas, dict(FIELDS=48, FIELDS_PADDED=64, PROGRAMS=8, BLOCK=128), {}),
    (batch_triton._prepare_lanes, dict(GROUPS=2, BLOCK=128), {}),
    (batch_triton._prepare_chunks, dict(GROUPS=2, CHUNKS_PADDED=256, BLOCK=128), {}),
    (embed.embed_kernel, dict(**LAYER, HALF=64, HALF_PAD=64), {}),
    (norm.finish_norm_kernel, dict(**LAYER, PARTS=32, PARTS_PAD=32), {}),
    (sample._survey, dict(**STOPS, SPLIT=4096), {}),
    (bracket.find_bracket, dict(**STOPS, SPLITS=64), {"num_warps": 8}),
    (band.collect_band, dict(**STOPS, SPLIT=4096), {}),
    (typical.find_typical, dict(**STOPS, **SPLITS), {"num_warps": 16}),
    (draw.draw, dict(**STOPS, **SPLITS, TYPICAL=False, CHANCES=True), {"num_warps": 16, "maxnreg": 64}),
]
"""They wait before all else."""
LATER = [
    (batch_triton._advance, dict(STOP_IDS=32, STOP_IDS_PADDED=32, BLOCK=128), {}),
    (decode_schedule.schedule_kernel, dict(TILE=16, LANES_PAD=256, BLOCK=32, ROUNDS=2, UNEVEN=10), {}),
]
"""Before they wait they read what is older than the kernel ahead."""


def kind(name):
    return KINDS.get(name, "i32" if name.endswith("stride") else "*i32")


def ptx_of(kernel, sizes, options):
    names, sizes = kernel.arg_names, sizes | {"PDL": True}
    signature = {name: "constexpr" if name in sizes else kind(name) for name in names}
    constants = {(names.index(name),): value for name, value in sizes.items()}
    source = ASTSource(kernel, signature, constants)
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options | {"launch_pdl": True}).asm["ptx"]


def faults(ptx, first):
    """What of the rule a kernel breaks."""
    body = ptx[ptx.index(".entry") :]
    waits, goes = (body.count("griddepcontrol." + word) for word in ("wait", "launch_dependents"))
    if (waits, goes) != (1, 1):
        return f"it waits {waits} times and lets the next one start {goes} times"
    before, rest = body.split("griddepcontrol.wait")
    between, _ = rest.split("griddepcontrol.launch_dependents")
    written = re.findall(r"\b(?:st|atom|red)\.global\S*", before)
    read = re.findall(r"\bld\.global\S*", before if first else "")
    ways_round = re.findall(r"\bbra\b.*", before) if first else re.findall(r"\bret\b", before)
    touched = re.findall(r"\b(?:ld|st|atom|red)\.global\S*|\bbra\b.*", between)
    return [*written, *read, *ways_round, *touched]


if __name__ == "__main__":
    for place, (kernel, sizes, options) in enumerate(FIRST + LATER):
        if found := faults(ptx_of(kernel, sizes, options), first=place < len(FIRST)):
            print(f"{kernel.__name__}: {found}")
