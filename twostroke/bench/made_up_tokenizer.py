"""A tokenizer for models of random weights, which have none."""

from __future__ import annotations

from itertools import count, islice, product
from string import ascii_lowercase

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from ..text.tokenizer import Tokenizer


def made_up_tokenizer(size: int) -> Tokenizer:
    """Return a tokenizer of `size` >= 256 tokens: all bytes, then words of letters, the shorter ones first."""
    words = ("".join(letters) for length in count(2) for letters in product(ascii_lowercase, repeat=length))
    # NOTE: in the order of the bytes' own sort, so that the same size gives the same tokenizer.
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *islice(words, size)][:size]
    backend = Backend(models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, {})
