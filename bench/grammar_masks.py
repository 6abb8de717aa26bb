"""Times compiling grammars and filling token masks with llguidance and xgrammar, on this CPU, one thread.

Both follow the same tokens of a text that the grammar allows. The large vocabulary is the default model's, to which
joined pairs of its tokens were added until there are 128,256.

usage: python bench/grammar_masks.py [folder or file of the result]
"""

import json
import statistics
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import xgrammar
from tokenizers import Tokenizer

from twostroke.bench.result import Result, Run
from twostroke.model.default_model import default_model_dir

END = 2
SPECIAL = 17
LARGE = 128_256

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string"},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}},
        "address": {"type": "object", "properties": {"city": {"type": "string"}, "zip": {"type": "string"}}},
    },
    "required": ["name", "age", "email", "tags", "address"],
    "additionalProperties": False,
}
DOCUMENT = (
    '{"name": "Ada Lovelace, countess of many things", "age": 36, "email": "ada@example.org", "tags": ["a", "ccc", '
    '"bb"], "address": {"city": "London and its surroundings", "zip": "W1"}}'
)
EBNF = """root ::= expr
expr ::= term (("+" | "-") term)*
term ::= factor (("*" | "/") factor)*
factor ::= [0-9]+ | "(" expr ")"
"""
CHOICES = [f"{kind} number {n}" for kind in ("apple", "pear", "plum") for n in range(100)]

CASES = {
    "json_schema": (json.dumps(PERSON), DOCUMENT),
    "any json object": ('{"type": "object"}', DOCUMENT),
    "regex": (r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2} [a-z ]{5,60}", "2026-11-29T12:30:59 the quick brown fox jumps"),
    "ebnf": (EBNF, "(12+345)*(6-78/9)+((1))*22"),
    "choice": (json.dumps(CHOICES), "plum number 77"),
}


def tokenizer_json() -> dict[str, Any]:
    return json.loads((default_model_dir() / "tokenizer.json").read_text())


def enlarged(tokenizer: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer with joined pairs of its tokens, and the merges that make them."""
    rng = np.random.default_rng(0)
    vocab: dict[str, int] = dict(tokenizer["model"]["vocab"])
    merges: list[Any] = list(tokenizer["model"]["merges"])
    tokens = list(vocab)[SPECIAL:]
    while len(vocab) < LARGE:
        left, right = (tokens[n] for n in rng.integers(0, len(tokens), 2))
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
    return tokenizer | {"model": tokenizer["model"] | {"vocab": vocab, "merges": merges}}


class LlGuidance:
    name = "llguidance"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = llguidance.LLTokenizer(tokenizer.to_str(), eos_token=END)

    def compile(self, case: str, text: str) -> None:
        formats = {"ebnf": "gbnf", "regex": "regex", "choice": "choice"}
        grammar = llguidance.grammar_from(formats.get(case, "json_schema"), text)
        self.matcher = llguidance.LLMatcher(self.tokenizer, grammar)
        assert not self.matcher.is_error(), self.matcher.get_error()

    def fill(self, mask: np.ndarray) -> None:
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def accept(self, token: int) -> bool:
        return self.matcher.consume_token(token)


class XGrammar:
    name = "xgrammar"

    def __init__(self, tokenizer: Tokenizer) -> None:
        size = tokenizer.get_vocab_size()
        tokens = [tokenizer.id_to_token(id_) for id_ in range(size)]
        kind = xgrammar.VocabType.BYTE_LEVEL
        info = xgrammar.TokenizerInfo(tokens, kind, vocab_size=size, stop_token_ids=[END])
        self.compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    def compile(self, case: str, text: str) -> None:
        if case == "ebnf":
            compiled = self.compiler.compile_grammar(text)
        elif case == "regex":
            compiled = self.compiler.compile_regex(text)
        elif case == "choice":
            compiled = self.compiler.compile_grammar("root ::= " + " | ".join(json.dumps(c) for c in json.loads(text)))
        else:
            compiled = self.compiler.compile_json_schema(text)
        self.matcher = xgrammar.GrammarMatcher(compiled)

    def fill(self, mask: np.ndarray) -> None:
        self.matcher.fill_next_token_bitmask(mask[None])

    def accept(self, token: int) -> bool:
        return self.matcher.accept_token(token)


def measure(library: LlGuidance | XGrammar, case: str, tokenizer: Tokenizer, repeats: int = 5) -> Run:
    grammar, text = CASES[case]
    ids, size = tokenizer.encode(text).ids, tokenizer.get_vocab_size()
    mask = np.zeros(-(-size // 32), np.int32)
    compiled, masks, accepts = [], [], []
    for _ in range(repeats):
        began = time.perf_counter()
        library.compile(case, grammar)
        compiled.append(time.perf_counter() - began)
        for token in ids:
            began = time.perf_counter()
            library.fill(mask)
            filled = time.perf_counter()
            assert mask[token // 32] >> (token % 32) & 1, f"{library.name} bars token {token} in {text!r}"
            began_accept = time.perf_counter()
            assert library.accept(token)
            accepts.append(time.perf_counter() - began_accept)
            masks.append(filled - began)
    per_text = len(ids)
    return Run(
        engine=library.name,
        loop=None,
        seconds=sum(masks),
        tokens=len(masks),
        extra={
            "case": case,
            "vocabulary": size,
            "compile_ms": 1e3 * statistics.median(compiled),
            "first_mask_us": 1e6 * statistics.median(masks[::per_text]),
            "mask_us_median": 1e6 * statistics.median(masks),
            "mask_us_mean": 1e6 * statistics.fmean(masks),
            "mask_us_p99": 1e6 * float(np.quantile(masks, 0.99)),
            "mask_us_max": 1e6 * max(masks),
            "accept_us_median": 1e6 * statistics.median(accepts),
        },
    )


def main(out: Path) -> None:
    small = tokenizer_json()
    runs = []
    for settings in (small, enlarged(small)):
        tokenizer = Tokenizer.from_str(json.dumps(settings))
        for kind in (LlGuidance, XGrammar):
            began = time.perf_counter()
            library = kind(tokenizer)
            print(f"{kind.name}, {tokenizer.get_vocab_size()} tokens: ready in {time.perf_counter() - began:.2f} s")
            for case in CASES:
                runs.append(run := measure(library, case, tokenizer))
                print(f"  {case:16}", *(f"{k} {v:.1f}" for k, v in run.extra.items() if isinstance(v, float)))
    libraries = {name: metadata.version(name) for name in ("llguidance", "xgrammar")}
    workload = {"cases": list(CASES), "repeats": 5, "threads": 1, **libraries}
    print(Result(benchmark="grammar-masks", gpu=None, workload=workload, runs=tuple(runs)).write(out))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "bench/results"))
