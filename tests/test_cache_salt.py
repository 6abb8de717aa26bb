"""F11: what requests of one `cache_salt` leave in the prefix cache, those of another never find."""

from __future__ import annotations

import numpy as np
import pytest
from engines import MODES, running
from watching import quiet

from twostroke import SamplingParams
from twostroke.cache.prefix_cache import PrefixCache

PROMPT = list(range(7, 48))


def salted(salt, **options):
    return SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, cache_salt=salt, **options)


def chain_of(cache, tokens, namespace):
    chain = []
    cache.extend(chain, np.array(tokens, np.int32), len(tokens) // 2, namespace=namespace)
    return chain


def test_namespaces_have_no_digest_in_common():
    """Nor where a namespace is spelled like the tokens, or like the digest, that stand before a block elsewhere."""
    cache, tokens = PrefixCache(2), [1, 2, 3, 4, 5, 6]
    plain = chain_of(cache, tokens, b"")
    spelled = np.array(tokens[:2], np.int32).tobytes()
    seen = set(plain)
    for namespace in (b"a", b"b", b"namespace", spelled, plain[0]):
        for part in (tokens, tokens[2:]):
            chain = chain_of(cache, part, namespace)
            assert chain == chain_of(cache, part, namespace)
            assert not seen & set(chain)
            seen |= set(chain)


@pytest.mark.parametrize("mode", MODES)
def test_only_the_same_salt_is_found(mode):
    """Also with several samples; the tokens are the same in any case."""
    with running(mode, num_blocks=200, block_size=4) as engine:
        salts = [None, "a", "b", "a", None, "b"]
        outputs = [engine.generate([PROMPT], salted(salt, n=2))[0] for salt in salts]
        quiet(engine)
    hits = [output.cached_tokens for output in outputs]
    assert hits[:3] == [0, 0, 0]
    assert hits[3:] == [40] * 3
    assert len({tuple(sample.token_ids) for output in outputs for sample in output.outputs}) == 1


@pytest.mark.parametrize("mode", MODES)
def test_preempted_samples_find_their_own_blocks_on_device_and_host(mode):
    prompts = [[*PROMPT[:20], number] for number in range(4)]
    params = [salted(salt, min_tokens=0) for salt in ("a", "a", "b", None)]
    with running(mode, num_blocks=200, block_size=4) as engine:
        expected = [engine.generate([prompt], own)[0].token_ids for prompt, own in zip(prompts, params, strict=True)]
    with running(mode, num_blocks=14, block_size=4, offload_bytes=1 << 22) as engine:
        for _ in range(2):
            outputs = engine.generate(prompts, params)
            assert [output.token_ids for output in outputs] == expected
        assert engine.generate([prompts[0]], salted("c"))[0].cached_tokens == 0
        quiet(engine)
