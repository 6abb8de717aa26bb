"""The engine: what callers hold. It delegates to the inbox, the loop, delivery, and the parts that `build` made."""

from __future__ import annotations

import atexit
import contextlib
import os
import random
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .build import build
from .config import EngineConfig
from .device.streams import Device
from .errors import EngineClosed, EngineDead, InvalidRequest, TwostrokeError
from .inbox import Command, Inbox
from .loop import AsyncLoop, SyncLoop
from .progress import Progress
from .prompts import Prompt, as_prompts, encode_prompt
from .request import SEED_BITS, Request, Sample, SamplingParams
from .text.delivery import Delivery
from .text.handle import Handle
from .text.output import RequestOutput


@dataclass(frozen=True)
class EngineStats:
    """A look at an engine.

    Attributes:
        waiting, running: samples in the queue, and in the batch.
        num_blocks: blocks of the cache, the dummy block included. free_blocks: those that nobody has.
        preemptions: how often a sample was put back, in all.
        steps: steps done.
        active: share of the working time in which the compute stream ran a step, 0 to 1.
        busy_seconds, gap_seconds, idle_seconds: time of the compute stream in steps, between steps while there was
            work, and with nothing to do.
        cache_bytes: bytes of the KV cache. slot_host_bytes, slot_device_bytes: bytes of one slot's buffers.
        graphs: CUDA graphs captured.
    """

    waiting: int
    running: int
    num_blocks: int
    free_blocks: int
    preemptions: int
    steps: int
    active: float
    busy_seconds: float
    gap_seconds: float
    idle_seconds: float
    cache_bytes: int
    slot_host_bytes: int
    slot_device_bytes: int
    graphs: int


class Engine:
    """An inference engine for one model on one device. A context manager; safe to use from any thread.

    Args:
        model: `smollm2-135m` (the embedded default), a preset with random weights (`llama-3.1-8b`, `llama-3.2-1b`,
            `qwen3-8b`, `qwen3-0.6b`, `tiny`), a model directory, a GGUF file, or a hub id.
        impl: `native`, `transformers`, or `auto`: native where it covers the model.
        device: `auto`, `cpu`, `cuda`, `cuda:1`, ...
        dtype: `auto`, `float32`, `bfloat16`, `float16`. auto: float32 on the CPU, the checkpoint's or bfloat16 on CUDA.
        loop: `async`, or `sync`, the reference without overlap.
        slots: steps that can be in flight at once under `async`.
        max_rows: most samples that run at once. max_step_tokens: most tokens of one step.
        max_chunk_tokens: most tokens of one prompt in one step; None is up to what the step has room for.
        block_size: KV positions of a block. num_blocks: blocks of the cache, the dummy block included; or cache_bytes;
            with neither, the cache takes what memory allows, up to what max_rows samples of full length need.
        max_model_len: most tokens of a sample, prompt and output. None: what the model and the cache allow.
        attention: `auto`, `triton` (CUDA only), or `torch`, the plain PyTorch form.
        graphs: capture decode steps in CUDA graphs. Without CUDA there is nothing to capture.
        seed: of the generator that gives seeds to unseeded requests, and of random weights; None is unpredictable.

    Raises:
        InvalidConfig: an argument is out of range. UnsupportedModel: the model cannot run here.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = "smollm2-135m",
        *,
        impl: str = "auto",
        device: str | Device = "auto",
        dtype: str | torch.dtype = "auto",
        loop: str = "async",
        slots: int = 2,
        max_rows: int = 256,
        max_step_tokens: int = 2048,
        max_chunk_tokens: int | None = None,
        block_size: int = 16,
        num_blocks: int | None = None,
        cache_bytes: int | None = None,
        max_model_len: int | None = None,
        attention: str = "auto",
        graphs: bool = True,
        seed: int | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name != "self"}
        self.config = EngineConfig(**arguments)
        self.config.validate()
        self._parts = parts = build(self.config)
        self.limits = parts.limits
        self.tokenizer = parts.tokenizer
        self._seeds = random.Random(seed)
        self._lock = threading.Lock()
        self._requests = 0
        self._inbox = Inbox()
        self._owner = _LoopOwner(self._inbox)
        self._delivery = Delivery(parts.tokenizer, self._fail)
        make_loop = AsyncLoop if loop == "async" else SyncLoop
        self._loop = make_loop(parts.scheduler, parts.runner, parts.slots, self._inbox, self._delivery.put)
        self._thread = threading.Thread(target=self._run, name="twostroke-loop", daemon=True)
        self._thread.start()
        _close_at_exit(self)

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sample, prompt and output."""
        return self.limits.max_model_len

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts together; return their outputs in the order of the prompts.

        Args:
            prompts: strings, lists of token ids, or lists of chat messages ({"role": ..., "content": ...}); or one.
            params: for all prompts, or one for each.
            progress: show one progress bar on stderr; None: if stderr is a terminal.

        Raises:
            InvalidRequest: a prompt or a parameter was refused; nothing was started.
            EngineDead, EngineClosed: the engine ended before the requests.
        """
        listed = as_prompts(prompts)
        each = _params_for(params, len(listed))
        requests = [self._make_request(None, prompt, own) for prompt, own in zip(listed, each, strict=True)]
        handles: list[Handle] = []
        try:
            for index, request in enumerate(requests):
                handles.append(self._start(request, index))
            with Progress(len(handles), progress) as bar:
                return [bar.count(handle.result()) for handle in handles]
        finally:
            for handle in handles:
                handle.cancel()

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None) -> Handle:
        """Start a request and return its handle at once.

        Args:
            prompt: a string, a list of token ids, or a list of chat messages.
            request_id: must differ from those of all live requests; None: the engine makes one.

        Raises:
            InvalidRequest: the prompt, a parameter or the id was refused.
            EngineDead, EngineClosed: the engine has ended.
        """
        return self._start(self._make_request(request_id, prompt, params))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None) -> Handle:
        """Start a request to iterate over, with `for` or `async for`; see `submit` for arguments and errors."""
        handle = self.submit(prompt, params, request_id=request_id)
        handle.begin_stream()
        return handle

    def stats(self) -> EngineStats:
        """Return a look at the engine now."""
        parts = self._parts
        scheduler, activity, slot = parts.scheduler.stats(), parts.runner.activity, parts.slots[0]
        return EngineStats(
            waiting=scheduler.waiting,
            running=scheduler.running,
            num_blocks=parts.num_blocks,
            free_blocks=scheduler.free_blocks,
            preemptions=scheduler.preemptions,
            steps=activity.steps,
            active=activity.active,
            busy_seconds=activity.busy_seconds,
            gap_seconds=activity.gap_seconds,
            idle_seconds=activity.idle_seconds,
            cache_bytes=parts.cache_bytes,
            slot_host_bytes=slot.host_bytes,
            slot_device_bytes=slot.device_bytes,
            graphs=parts.graphs,
        )

    def close(self) -> None:
        """Cancel what is running, hand over every output, and stop all threads. Safe to call twice."""
        self._inbox.close(EngineClosed("the engine is closed"), last=lambda scheduler: scheduler.abandon())
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._delivery.close()
        self._delivery.fail(EngineClosed("the engine was closed before the request ended"))
        self._parts.device.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _make_request(self, request_id: str | None, prompt: Prompt, params: SamplingParams | None) -> Request:
        ids = encode_prompt(prompt, self.tokenizer)
        with self._lock:
            self._requests += 1
            name = f"request-{self._requests}" if request_id is None else request_id
            seed = self._seeds.getrandbits(SEED_BITS)
        if not isinstance(name, str) or not name:
            raise InvalidRequest(f"request_id={request_id!r} must be a string that is not empty")
        return Request.create(name, ids, SamplingParams() if params is None else params, seed, self.limits)

    def _start(self, request: Request, index: int = 0) -> Handle:
        sample = Sample(request)
        handle = Handle(sample, self._owner)
        if not self._delivery.register(handle, index):
            raise InvalidRequest(f"request_id={request.id!r} is in use by a request that has not ended")
        try:
            self._inbox.put(lambda scheduler: scheduler.submit(sample))
        except TwostrokeError:
            self._delivery.forget(handle)
            raise
        return handle

    def _run(self) -> None:
        """The loop's thread."""
        try:
            with torch.inference_mode():
                self._loop.run()
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the engine: every waiting caller gets the error now, later calls at once."""
        dead = EngineDead(f"the engine failed: {type(error).__name__}: {error}")
        dead.__cause__ = error
        self._inbox.close(dead)
        self._delivery.fail(dead)


class _LoopOwner:
    """What handles ask of the loop. After the loop's end every request has its outcome, so nothing is left to do."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox

    def cancel(self, sample: Sample) -> None:
        self._leave(lambda scheduler: scheduler.cancel(sample))

    def stream(self, sample: Sample) -> None:
        self._leave(lambda scheduler: scheduler.stream(sample))

    def _leave(self, command: Command) -> None:
        with contextlib.suppress(TwostrokeError):
            self._inbox.put(command)


def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    listed = list(params)
    if len(listed) != count:
        raise InvalidRequest(f"params has {len(listed)} entries for {count} prompts")
    return listed


def _close_at_exit(engine: Engine) -> None:
    """Close a forgotten engine before the interpreter takes its threads down in the middle of a step."""
    reference = weakref.ref(engine)

    def close() -> None:
        if (alive := reference()) is not None:
            alive.close()

    atexit.register(close)
