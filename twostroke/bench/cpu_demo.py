"""`cpu-demo`: SmolLM2 on the CPU, beside transformers' padded `generate` and its continuous batching.

The same eight chat prompts, the same number of tokens each (end of sequence ignored), greedy, fp32, and the same number
of threads for all. Each engine runs alone, once to warm up, then for the figures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from .. import Engine
from ..errors import TwostrokeError
from ..model.load import DEFAULT_MODEL
from ..sampling_params import SamplingParams
from .measure import Measured, measure
from .options import BenchOptions
from .result import Result, Run, compared, usable_cores
from .workload import CHATS

NEW_TOKENS = 64
MAX_STEP_TOKENS = 2048
PEER_CACHE: dict[str, Any] = {"num_blocks": 64, "max_batch_tokens": 512}
PEER_PAGE_SIZE = 32
"""Settings under which transformers' continuous batching is fastest here; its defaults make it a third slower."""

TokenLists = list[list[int]]


def run(name: str, options: BenchOptions, say: Callable[[str], None]) -> Result:
    """Measure both loops of twostroke, then the two peers, in this process, one after the other."""
    threads = usable_cores()
    torch.set_num_threads(threads)
    runs: list[Run] = []
    prompts: TokenLists = []
    for loop in options.loops:
        measured: dict[str, list[Run]] = {}
        for case, settings in options.cases().items():
            say(f"twostroke, {case}, {loop} loop")
            repeated = _twostroke(loop, options, settings)
            prompts = [output.prompt_token_ids for output in repeated[0].outputs]
            measured[case] = [one.as_run(loop) for one in repeated]
        runs += compared(measured)
    say("transformers, padded and continuous batching")
    runs += _transformers(prompts, options.repetitions)
    workload = {
        "model": DEFAULT_MODEL,
        "dtype": "float32",
        "requests": len(prompts),
        "prompt_tokens": sum(map(len, prompts)),
        "new_tokens": NEW_TOKENS,
        "temperature": 0.0,
        "threads": threads,
        "prefix_cache": False,
        **options.facts(MAX_STEP_TOKENS),
    }
    return Result(benchmark=name, gpu=None, workload=workload, runs=tuple(runs))


def _twostroke(loop: str, options: BenchOptions, settings: dict[str, Any]) -> list[Measured]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with Engine(
        DEFAULT_MODEL,
        **settings,
        device="cpu",
        dtype="float32",
        loop=loop,
        slots=options.slots,
        max_step_tokens=options.step_tokens(MAX_STEP_TOKENS),
        prefix_cache=False,  # the same prompts come in the warm-up and in every repetition
    ) as engine:
        measure(engine, CHATS, params)
        return [measure(engine, CHATS, params) for _ in range(options.repetitions)]


def _transformers(prompts: TokenLists, repetitions: int) -> Iterator[Run]:
    import transformers

    from ..model.default_model import default_model_dir

    # It would warn, at each call, that it does not know the end token that never comes.
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(default_model_dir(), dtype=torch.float32).eval()
    # transformers fills a missing end token in from here; -1 is a token that never comes.
    model.generation_config.eos_token_id = -1
    for name, answer in (("generate", _padded), ("generate_batch", _continuous)):
        engine = f"transformers {transformers.__version__} {name}"
        answer(model, prompts)
        for _ in range(repetitions):
            start = time.perf_counter()
            outputs = answer(model, prompts)
            seconds = time.perf_counter() - start
            _check_complete(engine, outputs, len(prompts))
            yield Run(engine=engine, loop=None, seconds=seconds, tokens=sum(map(len, outputs)))


def _check_complete(engine: str, outputs: TokenLists, requests: int) -> None:
    """A peer that did less than it was asked for must not look fast."""
    lengths = [len(output) for output in outputs]
    if lengths != [NEW_TOKENS] * requests:
        raise TwostrokeError(f"{engine} answered {requests} requests of {NEW_TOKENS} tokens with {lengths} tokens")


def _padded(model: Any, prompts: TokenLists) -> TokenLists:
    """Left-pad the prompts into one batch."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=0, padding_side="left")
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left")
    settings = _generation_settings()
    with torch.inference_mode():
        outputs = model.generate(input_ids=ids, attention_mask=mask, generation_config=settings)
    tokens: TokenLists = outputs[:, ids.shape[1] :].tolist()
    return tokens


def _continuous(model: Any, prompts: TokenLists) -> TokenLists:
    """Continuous batching over a paged cache."""
    from transformers.generation import ContinuousBatchingConfig

    # NOTE: 5.17 calls it `block_size`, 5.24 `page_size`.
    name = "page_size" if hasattr(ContinuousBatchingConfig(), "page_size") else "block_size"
    config = ContinuousBatchingConfig(**PEER_CACHE | {name: PEER_PAGE_SIZE})
    outputs = model.generate_batch(prompts, generation_config=_generation_settings(), continuous_batching_config=config)
    return [list(output.generated_tokens) for output in outputs.values()]


def _generation_settings() -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
