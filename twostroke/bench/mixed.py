"""`mixed`: long prompts arrive while many rows decode.

When each decoding row gets its tokens is read by streaming a few of the rows, each to a thread that only notes times.
All rows that decode get a token from every step, so a few say it for all; a thread for each would take time from what
is measured. Tokens that reach a consumer together count as one gap and gaps of zero.

A prompt's time to first token runs from the moment at which it was due to arrive to the commit of its token.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from .. import Engine
from ..errors import TwostrokeError
from ..sampling_params import SamplingParams
from ..text.handle import Handle
from .ceilings import Ceilings, measure_ceilings
from .floor import mixed_floor, mixed_floor_steps
from .load import ONE_TOKEN, need_cuda, random_prompt
from .measure import measured_between
from .mix import WARM_UP_TOKENS, Mix
from .offline import cost_of, release_memory
from .options import BenchOptions
from .result import Result, Run


def run(name: str, options: BenchOptions, say: Callable[[str], None]) -> Result:
    """Measure twostroke under each loop asked for.

    Raises:
        InvalidConfig: there is no CUDA device.
    """
    need_cuda(name)
    mix = Mix()
    mix = replace(mix, max_step_tokens=options.step_tokens(mix.max_step_tokens))
    say("ceilings")
    ceilings = measure_ceilings()
    release_memory()
    runs: list[Run] = []
    for loop in options.loops:
        say(f"twostroke, {loop} loop")
        with Engine(
            mix.model,
            impl=options.impl,
            dtype="bfloat16",
            loop=loop,
            slots=options.slots,
            max_rows=mix.rows + mix.spare_rows,
            max_step_tokens=mix.max_step_tokens,
            max_model_len=mix.max_model_len,
            prefix_cache=False,  # the same prompts come in every repetition
            seed=0,
        ) as engine:
            runs += [run_mix(engine, mix, loop, ceilings) for _ in range(options.repetitions)]
        del engine
        release_memory()
    settings = {"dtype": "bfloat16", "impl": options.impl, "slots": options.slots, "prefix_cache": False}
    facts = asdict(mix) | settings | asdict(ceilings)
    return Result(benchmark=name, gpu=torch.cuda.get_device_name(), workload=facts, runs=tuple(runs))


def run_mix(engine: Engine, mix: Mix, loop: str, ceilings: Ceilings) -> Run:
    """Let the rows decode, time what happens from the first arrival's due time to the last one's token, let all go.

    Raises:
        TwostrokeError: the rows ended before the last arrival.
    """
    rng = random.Random(0)
    handles, watchers = _start_rows(engine, mix, rng)
    try:
        watchers[-1].wait_for(WARM_UP_TOKENS)
        engine.generate([random_prompt(rng, engine.model, mix.prompt)] * 2, ONE_TOKEN, progress=False)
        prompts = [random_prompt(rng, engine.model, mix.prompt) for _ in range(mix.arrivals)]
        length = mix.row_prompt + len(watchers[0].times)
        before, start = engine.stats(), time.perf_counter()
        waits = _arrive(engine, mix, prompts, start)
        seconds, after = time.perf_counter() - start, engine.stats()
        if any(handle.done for handle in handles):
            raise TwostrokeError(f"rows of max_model_len={mix.max_model_len} ended within {seconds:.1f} s")
    finally:
        for handle in handles:
            handle.cancel()
        for watcher in watchers:
            watcher.join()
    measured = measured_between(before, after, [], seconds)
    times = [watcher.between(start, start + seconds) for watcher in watchers]
    gaps = np.concatenate([np.diff(own) for own in times])
    decoded = mix.rows * round(float(np.mean([len(own) for own in times])))
    cost, lengths = cost_of(engine.model), np.full(mix.arrivals, mix.prompt)
    asked: dict[str, Any] = {"rows": mix.rows, "length": length, "prompts": lengths} | asdict(ceilings)
    floor = mixed_floor(cost, steps=measured.steps, **asked)
    prompt_tokens = mix.arrivals * (mix.prompt + 1)
    most = mix.rows * mixed_floor_steps(seconds, cost, **asked) + prompt_tokens
    return Run(
        engine="twostroke",
        loop=loop,
        seconds=seconds,
        tokens=decoded + mix.arrivals,
        ms_per_step=1e3 * seconds / measured.steps,
        gpu_active=measured.active,
        bytes_per_s=floor.read_bytes / seconds,
        floor_seconds=floor.seconds,
        cpu_us=measured.cpu_us,
        extra={
            "inter_token_p50_ms": 1e3 * float(np.percentile(gaps, 50)),
            "inter_token_p99_ms": 1e3 * float(np.percentile(gaps, 99)),
            "first_token_p50_ms": 1e3 * float(np.percentile(waits, 50)),
            "first_token_p99_ms": 1e3 * float(np.percentile(waits, 99)),
            "total_tokens_per_s": (decoded + prompt_tokens) / seconds,
            "percent_of_floor": 100 * (decoded + prompt_tokens) / most,
        },
    )


ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


class Watcher(threading.Thread):
    """Iterates over a handle and notes when its tokens came.

    Attributes:
        times: seconds of `perf_counter`, one per token.
    """

    def __init__(self, handle: Handle) -> None:
        super().__init__(name="twostroke-watcher", daemon=True)
        self.times: list[float] = []
        self._handle = handle
        self._came = threading.Condition()
        self._ended = False
        self.start()

    def run(self) -> None:
        try:
            for delta in self._handle:
                now = time.perf_counter()
                with self._came:
                    self.times.extend([now] * len(delta.token_ids))
                    self._came.notify_all()
        finally:
            with self._came:
                self._ended = True
                self._came.notify_all()

    def wait_for(self, tokens: int) -> None:
        """Wait until so many tokens have come, or no more will."""
        with self._came:
            self._came.wait_for(lambda: len(self.times) >= tokens or self._ended)

    def between(self, start: float, end: float) -> np.ndarray:
        """The times within [start, end]."""
        times = np.array(self.times)
        return times[(times >= start) & (times <= end)]


def _start_rows(engine: Engine, mix: Mix, rng: random.Random) -> tuple[list[Handle], list[Watcher]]:
    """Submit the decoding rows; the last of them is among those watched, so that when it decodes, all do."""
    handles = [engine.submit(random_prompt(rng, engine.model, mix.row_prompt), ENDLESS) for _ in range(mix.rows)]
    places = np.linspace(0, mix.rows - 1, mix.watched).round().astype(int)
    return handles, [Watcher(handles[place]) for place in places.tolist()]


def _arrive(engine: Engine, mix: Mix, prompts: list[list[int]], start: float) -> list[float]:
    """Submit each prompt when it is due; return the seconds from then to its token, once all have theirs."""
    dues = [start + number * mix.every for number in range(len(prompts))]
    handles = []
    for due, prompt in zip(dues, prompts, strict=True):
        time.sleep(max(0.0, due - time.perf_counter()))
        handles.append(engine.submit(prompt, ONE_TOKEN))
    outputs = [handle.result() for handle in handles]
    firsts = [output.timings.first_token for output in outputs]
    return [first - due for first, due in zip(firsts, dues, strict=True) if first is not None]
