"""Kernels that start while the one ahead of them ends."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sampling_case import Row, make_state

pytest.importorskip("triton")

from twostroke.kernels import sample
from twostroke.kernels.early import CAPABILITY, early
from twostroke.kernels.norm import finish_norm

able = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < CAPABILITY,
    reason="needs programmatic dependent launch",
)


def test_nothing_starts_early_where_it_cannot():
    assert early(torch.device("cpu")) == {"PDL": False}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests that run them there compile them")
def test_all_keep_to_the_rule():
    """They wait on every path, write only behind that, and let the next one start right behind it."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("early_kernels.py")
    run = subprocess.run([sys.executable, str(script)], env=environment, check=True, capture_output=True, text=True)
    assert run.stdout == ""


def captured(work):
    """Run `work` so that it compiles, then capture it; returns its graph and what it gave there."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        given = work()
    return graph, given


@pytest.mark.gpu
@able
def test_each_of_a_chain_sees_all_that_the_one_ahead_wrote():
    values = torch.randn(256, 1024, device="cuda", dtype=torch.bfloat16)
    squares = torch.full((16, 256), 60.0, device="cuda")
    alone = [values]
    for _ in range(100):
        alone.append(finish_norm(alone[-1], squares, 0.0))
        torch.cuda.synchronize()

    def chain():
        made = [values]
        for _ in range(100):
            made.append(finish_norm(made[-1], squares, 0.0))
        return made

    graph, made = captured(chain)
    for _ in range(20):
        for tensor in made[1:]:
            tensor.zero_()
        graph.replay()
        assert all(map(torch.equal, made, alone))


@pytest.mark.gpu
@able
@pytest.mark.parametrize("typical", [False, True])
def test_tokens_are_those_of_kernels_that_start_one_after_the_other(typical, monkeypatch):
    kinds = [{}, {"temperature": 0.0}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.9, "typical_p": 0.8}]
    rows = [Row(seed=seed, **kinds[seed % len(kinds)]) for seed in range(240)]
    state, places = make_state(rows, "cuda"), torch.arange(240, dtype=torch.int32, device="cuda")
    logits = torch.empty(240, 151_936, device="cuda", dtype=torch.bfloat16)
    tokens, errors = torch.zeros(2, 240, dtype=torch.int32, device="cuda")

    def draw():
        sample.sample_rows(logits, places, *state, tokens, errors, typical)

    graph, _ = captured(draw)
    monkeypatch.setattr(sample, "early", lambda _: {"PDL": False})
    late_graph, _ = captured(draw)
    for _ in range(20):
        logits.normal_()
        late_graph.replay()
        expected = tokens.clone()
        tokens.zero_()
        graph.replay()
        assert torch.equal(tokens, expected)
