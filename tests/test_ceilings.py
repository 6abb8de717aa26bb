"""What the machine can do at best: each cut of the read reads all of it once."""

import pytest
import torch

pytest.importorskip("triton")

from twostroke.bench.ceilings import READ_BYTES, READ_CUTS, measure_ceilings, read_all

pytestmark = pytest.mark.filterwarnings("ignore::Warning:triton.runtime.interpreter")
on_the_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels need CUDA")


@on_the_cpu
@pytest.mark.parametrize("cut", [READ_CUTS[0], READ_CUTS[-1]])
@pytest.mark.parametrize("programs", [1, 3])
def test_a_read_leaves_out_nothing_and_reads_nothing_twice(cut, programs):
    source = torch.randint(0, 100, (7 * cut.block,), dtype=torch.int32)
    sums = torch.full((programs,), -1, dtype=torch.int32)
    read_all(source, sums, cut)
    turns = source.view(7, cut.block).sum(1)
    assert sums.tolist() == [int(turns[program::programs].sum()) for program in range(programs)]


def test_cuts_differ_in_all_that_was_seen_to_matter_and_fit_what_is_read():
    assert all(READ_BYTES // 4 % cut.block == 0 for cut in READ_CUTS)
    assert all(len(set(values)) > 1 for values in zip(*READ_CUTS, strict=True))


@on_the_cpu
def test_the_ceiling_is_that_of_the_best_pass_in_the_best_cut(monkeypatch):
    """The fastest cut is neither the first nor the last one, and its own first pass is slow, as one that compiles."""
    best, timed = READ_CUTS[5], []

    def seconds_each(work, repetitions):
        cut = work.args[-1] if getattr(work, "args", None) else None
        timed.append(cut)
        return [9.0, 0.001 if cut == best else 0.002 if cut else 0.5]

    made = {name: getattr(torch, name) for name in ("randint", "empty", "randn")}
    for name, make in made.items():
        monkeypatch.setattr(torch, name, lambda *a, make=make, device, **k: make(*a, **k, device="meta"))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: type("", (), {"multi_processor_count": 132}))
    monkeypatch.setattr("twostroke.bench.ceilings.seconds_each", seconds_each)
    ceilings = measure_ceilings()
    assert timed == [*READ_CUTS, None]
    assert ceilings.read_bytes_per_s == READ_BYTES / 0.001
    assert ceilings.flop_per_s == 2 * 8192**3 / 0.5
