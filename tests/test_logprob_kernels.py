"""Log-probabilities on their own: PyTorch against float64, Triton (interpreted without a GPU) against PyTorch."""

import math
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
import torch
from sampling_case import every_combination, kept_tokens, make_state, random_logits, run, typical_rows

from twostroke.logprob_record import LOGPROB_RECORD, MAX_LOGPROBS, RECORD_WORDS
from twostroke.sampling.logprobs import write_logprobs
from twostroke.sampling.sampler import sample

POISON = -77
pytestmark = pytest.mark.filterwarnings("ignore::Warning:triton.runtime.interpreter")


@pytest.fixture(
    params=[
        "torch",
        pytest.param(
            "triton", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="compiled kernels need CUDA")
        ),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def where(request):
    if request.param != "torch":
        pytest.importorskip("triton")
    return request.param


def records_of(where, logits, wanted, targets, chances=None):
    """The records, one row for each position; rows are given in reverse, so that none is its own position."""
    count = len(logits)
    device = "cuda" if where == "cuda" else "cpu"
    out = torch.full((count, RECORD_WORDS), POISON, dtype=torch.int32, device=device)
    rows = torch.arange(count - 1, -1, -1, dtype=torch.int32, device=device)
    column = torch.tensor([*reversed(wanted)], dtype=torch.int32, device=device)
    target = torch.tensor(targets, dtype=torch.int32, device=device)
    arguments = logits.to(device), rows, column, target, None if chances is None else chances.to(device), out
    if where == "triton":
        from twostroke.kernels.logprobs import write_records

        write_records(*arguments, MAX_LOGPROBS)
    else:
        write_logprobs(*arguments)
    return out.cpu().numpy().view(LOGPROB_RECORD)[:, 0]


def check(record, logits, wanted, target):
    """A record is what float64 gives; ids in the order of the definition."""
    exact = logits.astype(np.float64)
    logprobs = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    assert record["logprob"] == pytest.approx(logprobs[target], abs=1e-5)
    assert record["rank"] == 1 + (exact > exact[target]).sum()
    order = [i for i in np.argsort(-exact, kind="stable") if np.isfinite(exact[i])][: wanted - 1]
    assert record["ids"].tolist() == order + [-1] * (MAX_LOGPROBS - len(order))
    assert record["logprobs"][: len(order)] == pytest.approx(logprobs[order], abs=1e-5)


@pytest.mark.parametrize("vocab", [3, 1000, 4097, 9001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records_are_those_of_the_definition(where, vocab, dtype):
    """Ties and forbidden tokens included, for any number of most likely tokens."""
    logits = random_logits(9, vocab, seed=vocab).to(dtype)
    wanted = [1, 2, 3, 6, 11, 21, 1, 21, 4]
    targets = [int(row.float().argmax()) if place % 2 else place % vocab for place, row in enumerate(logits)]
    targets = [t if logits[i, t].isfinite() else int(logits[i].argmax()) for i, t in enumerate(targets)]
    records = records_of(where, logits, wanted, targets)
    for place, record in enumerate(records):
        check(record, logits[place].float().numpy(), wanted[place], targets[place])
        assert record["sampling_logprob"] == 0


def test_rows_that_do_not_ask_are_left_alone(where):
    logits = random_logits(4, 5000, seed=1)
    records = records_of(where, logits, [0, 3, 0, 1], [1, 2, 3, 4], torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    assert (records[[0, 2]].view(np.int32) == POISON).all()
    assert records["sampling_logprob"][[1, 3]].tolist() == [-2.0, -4.0]


def test_c05_all_but_one_forbidden_and_bad_logits(where):
    """A certain token has log-probability 0; of bad logits nothing looks like a probability."""
    logits = torch.full((4, 6000), -math.inf)
    logits[0, 5123] = 3.0
    logits[2] = 0.0
    logits[2, 17] = math.nan
    logits[3] = 0.0
    logits[3, 5500] = math.inf
    records = records_of(where, logits, [5] * 4, [5123, 0, 0, 0])
    assert records[0]["logprob"] == 0
    assert records[0]["ids"].tolist() == [5123] + [-1] * 19
    assert np.isnan(records["logprob"][1:]).all()
    assert (records["ids"][1:] == -1).all()


def test_the_chance_of_a_token_is_that_among_the_kept_ones(where):
    """Every combination of filters and temperatures, in float64 by sorting."""
    vocab = 600
    rows = every_combination(vocab)[::7] + typical_rows(vocab)[::5]
    logits = random_logits(len(rows), vocab, seed=5)
    device = "cuda" if where == "cuda" else "cpu"
    chances = torch.full((len(rows),), 9.0, device=device)

    def sampler(logits, positions, state, tokens, errors):
        if where == "triton":
            from twostroke.kernels.sample import sample_rows

            sample_rows(logits, positions, *state, tokens, errors, typical=True, chances=chances)
        else:
            sample(logits, positions, state, tokens, errors, typical=True, chances=chances)

    tokens, _ = run(sampler, logits.to(device), range(len(rows)), make_state(rows, device))
    plain, _ = run(partial(sample, typical=True), logits.to(device), range(len(rows)), make_state(rows, device))
    assert tokens == plain
    for token, chance, x, row in zip(tokens, chances.tolist(), logits.numpy(), rows, strict=True):
        if row.temperature == 0:
            assert chance == 0
            continue
        x = np.where(np.isin(np.arange(vocab), row.stop_ids) & (row.outputs < row.min_outputs), -np.inf, x)
        scaled = x.astype(np.float64) / np.float32(row.temperature)
        kept = np.where(kept_tokens(x, row), scaled, -np.inf)
        exact = kept[token] - kept.max() - np.log(np.exp(kept - kept.max()).sum())
        assert chance == pytest.approx(exact, abs=2e-5)


LAUNCHES = """
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature
from twostroke.kernels import logprobs

class Launches:
    def __init__(self, kernel):
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind, self.kinds = create_function_from_signature(kernel.signature, kernel.params, backend), set()

    def __getitem__(self, grid):
        return lambda *arguments, **sizes: self.kinds.add(str(self.bind(*arguments, **sizes, debug=False)[1]))

kernels = logprobs._survey, logprobs._join = Launches(logprobs._survey), Launches(logprobs._join)
words, logits, records = torch.zeros(64, dtype=torch.int32), torch.zeros(8, 64), torch.zeros(8, 43, dtype=torch.int32)
for at in range(5):
    for targets in (words[at : at + 8], words[at : at + 24].view(8, 3)[:, 2]):
        logprobs.write_records(logits, words[at : at + 8], words[:9], targets, None, records, 20)
assert [len(kernel.kinds) for kernel in kernels] == [1, 1], [kernel.kinds for kernel in kernels]
"""


def test_where_rows_and_targets_lie_in_a_step_is_nothing_to_compile_for():
    """They begin behind the sampled positions, at another place in each step."""
    pytest.importorskip("triton")
    code = "import os; os.environ.pop('TRITON_INTERPRET', None)\n" + LAUNCHES
    subprocess.run([sys.executable, "-c", code], check=True)
