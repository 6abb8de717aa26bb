"""What new weights cost: the write itself, which the accounting calls by its name, and nothing that could stay."""

import time

import pytest
from engines import MODES, running
from watching import PATIENCE

from twostroke import SamplingParams
from twostroke.model.thin import ThinDecoder

PROMPTS = [[5, 6, 7], list(range(20, 50))]
PARAMS = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
SLOW = 0.03


def tokens_of(engine):
    return [output.token_ids for output in engine.generate(PROMPTS, PARAMS, progress=False)]


@pytest.mark.parametrize(("mode", "impl"), [*((mode, "native") for mode in MODES), ("async", "transformers")])
def test_copies_of_the_weights_are_what_can_be_written(mode, impl):
    """Of another engine or of the same one; a copy does not follow what is written later."""
    with running(mode, impl=impl, num_blocks=64, seed=1) as other:
        expected, foreign = tokens_of(other), other.model.copy_weights()
        assert tokens_of(other) == expected
    with running(mode, impl=impl, num_blocks=64) as engine:
        before, own = tokens_of(engine), engine.model.copy_weights()
        assert before != expected
        engine.update_weights(foreign)
        assert tokens_of(engine) == expected
        engine.update_weights(own)
        assert tokens_of(engine) == before


@pytest.mark.parametrize("mode", MODES)
def test_the_accounting_knows_the_write_amid_requests_and_at_rest(mode, monkeypatch):
    with running(mode, num_blocks=64) as engine:
        weights, write = engine.model.copy_weights(), engine.model.write_weights
        monkeypatch.setattr(engine.model, "write_weights", lambda tensors: (time.sleep(SLOW), write(tensors)))
        handle = engine.submit([5], SamplingParams(temperature=0, max_tokens=400, ignore_eos=True))
        engine.update_weights(weights)
        output = handle.result(PATIENCE)
        assert [version for version, _ in output.weight_versions] in ([0, 1], [1])
        amid = engine.stats()
        assert amid.idle_by_cause["weights"] >= SLOW
        engine.update_weights(weights)
        tokens_of(engine)
        rested = engine.stats()
        assert rested.idle_by_cause["weights"] - amid.idle_by_cause["weights"] >= SLOW
        assert rested.idle_seconds - amid.idle_seconds >= SLOW, "nobody asked for anything meanwhile"
        assert sum(rested.idle_by_cause.values()) == pytest.approx(rested.gap_seconds + rested.idle_seconds)


def test_new_weights_leave_what_was_chosen_for_their_storage(monkeypatch):
    """Thin products read addresses: to choose them anew would keep the loop's thread for nothing."""
    chosen = []
    monkeypatch.setattr(ThinDecoder, "made_for", lambda decoder: chosen.append(decoder) or [])
    with running("async", num_blocks=64) as engine:
        engine.update_weights(engine.model.copy_weights())
        assert engine.weight_version == 1
    assert len(chosen) == 1
