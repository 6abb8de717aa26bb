"""The engine: a front whose loop runs here. It delegates to the inbox, the loop, delivery, and what `build` made."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .build import Parts, build
from .config import EngineConfig
from .device.streams import Device
from .front import Front
from .inbox import Inbox
from .lifecycle import Lifecycle
from .maintenance import Maintenance
from .model.weight_source import Weights
from .prompts import Prompt, as_prompts
from .request import Sample
from .rollout import Rollout, StopGroup
from .sampling_params import SamplingParams
from .scheduler.committed import Committed
from .scheduler.scheduler import Scheduler
from .text.delivery import Delivery


@dataclass(frozen=True)
class EngineStats:
    """A look at an engine.

    Attributes:
        waiting, running: samples in the queue, and in the batch.
        free_blocks: blocks of the cache that nobody has. cached_blocks: those of them whose content can be used again.
        prefix_hit_tokens: tokens that were taken from the prefix cache and not computed, in all. host_hit_tokens: those
            of them that came back from host memory.
        host_blocks: blocks that lie in host memory. offloaded_blocks, returned_blocks: copied there and back, in all.
        block_save_seconds, block_load_seconds, block_compute_seconds: what the engine knows of how long it takes to
            copy a block there, back, and to compute it, by which it chooses; 0 while it knows nothing, or without
            `offload_bytes`.
        preemptions: how often a sample was put back, in all.
        steps: steps done.
        generated_tokens: tokens that they sampled, in all. prompt_tokens: tokens of prompts that they computed, in all.
        active: share of the working time in which the compute stream ran a step, 0 to 1.
        busy_seconds, gap_seconds, idle_seconds: time of the compute stream in steps, between steps while there was
            work, and with nothing to do.
        resting_seconds: how long there has been nothing to do by now, which `idle_seconds` has from the next step on.
        idle_by_cause: seconds between steps by what the compute stream waited for: `plan`, `h2d`, `commit`, `launch`,
            `capture`, `weights`, `nothing`; see `device.step_times.gap_parts`.
        cpu_seconds: seconds of the loop's thread by phase: `plan`, `fill`, `queue`, `wait`, `commit`.
        paused: after a `pause`, from its begin on. asleep: between `sleep` and `wake`.
        weight_version: see `Engine.weight_version`.
    """

    waiting: int
    running: int
    free_blocks: int
    cached_blocks: int
    prefix_hit_tokens: int
    host_hit_tokens: int
    host_blocks: int
    offloaded_blocks: int
    returned_blocks: int
    block_save_seconds: float
    block_load_seconds: float
    block_compute_seconds: float
    preemptions: int
    steps: int
    generated_tokens: int
    prompt_tokens: int
    active: float
    busy_seconds: float
    gap_seconds: float
    idle_seconds: float
    resting_seconds: float
    idle_by_cause: Mapping[str, float]
    cpu_seconds: Mapping[str, float]
    paused: bool
    asleep: bool
    weight_version: int


class Engine(Front):
    """An inference engine for one model on one device. A context manager.

    Safe to use from any thread of the process that made it; in a forked child, calls raise `EngineClosed`.

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
        compile: compile the layers of a model that transformers runs, once for all that are alike; `auto`: on CUDA.
            Where that fails, the log says why, and they run as they are. The native decoder has nothing to compile.
        deterministic: the logits of a token depend on its sequence alone, to the bit, and not on what else is in a
            step, on chunks, or on preemption. It takes time. For the native decoder.
        prefix_cache: reuse the blocks of the KV cache whose tokens, and all before them, another request had too.
        offload_bytes: host memory (pinned, on CUDA) for blocks of the prefix cache that are evicted, those of preempted
            requests among them; they come back when that takes less than to compute them again. None or 0 is none.
        policy: in which order requests get their turn: `fcfs`, first come, first served; `priority`, see
            `SamplingParams.priority`; `shortest`, short prompts first.
        patience: seconds after which a waiting request goes before new ones that have one level of priority more, or a
            prompt of 1,000 tokens less; so nobody waits for ever. None is 30.
        max_waiting: most requests that may wait before they begin to run; more are refused with `QueueFull`. None is
            any number.
        max_prompt_ms: most milliseconds that prompts may add to a step in which others decode; what fits is learned
            from the times of earlier steps. None is any time: a step takes as many prompt tokens as it has room for.
        max_ledgers: most samples that run at once with penalties, biases, bad words, allowed tokens, or no repeated
            n-grams, whose history the device keeps. None: as many as rows, if 1/16 of the cache's memory holds them.
        seed: of the generator that gives seeds to unseeded requests, and of random weights. None: the former are
            unpredictable, the latter those of seed 0.

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
        compile: bool | str = "auto",
        deterministic: bool = False,
        prefix_cache: bool = True,
        offload_bytes: int | None = None,
        policy: str = "fcfs",
        patience: float | None = None,
        max_waiting: int | None = None,
        max_prompt_ms: float | None = None,
        max_ledgers: int | None = None,
        seed: int | None = None,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "__class__")}
        self.config = EngineConfig(**arguments)
        self.config.validate()
        self._parts = parts = self._build()
        self.model = parts.loaded.model
        self.report = parts.report
        self._life = life = Lifecycle(parts, loop, self._delivery_maker(parts))
        self._maintenance = Maintenance(parts, life.calls)
        super().__init__(
            parts.tokenizer,
            parts.limits,
            seed,
            life.delivery,
            InboxCommands(life.inbox, parts.scheduler),
            parts.constraints,
        )
        # A forgotten engine is closed when it is collected, or before the exit takes its threads down amid a step.
        weakref.finalize(self, life.close_forgotten)

    def _build(self) -> Parts:
        return build(self.config)

    def _delivery_maker(self, parts: Parts) -> Callable[..., Any]:
        """Return what makes the receiver of the loop's output, given whom to tell of its failure."""
        return partial(Delivery, parts.tokenizer)

    def stats(self) -> EngineStats:
        """Return a look at the engine now."""
        parts = self._parts
        scheduler, activity = parts.scheduler.stats(), parts.runner.activity
        return EngineStats(
            waiting=scheduler.waiting,
            running=scheduler.running,
            free_blocks=scheduler.free_blocks,
            cached_blocks=scheduler.cached_blocks,
            prefix_hit_tokens=scheduler.prefix_hit_tokens,
            host_hit_tokens=scheduler.host_hit_tokens,
            host_blocks=scheduler.host_blocks,
            offloaded_blocks=scheduler.offloaded_blocks,
            returned_blocks=scheduler.returned_blocks,
            block_save_seconds=scheduler.block_save_seconds,
            block_load_seconds=scheduler.block_load_seconds,
            block_compute_seconds=scheduler.block_compute_seconds,
            preemptions=scheduler.preemptions,
            steps=activity.steps,
            generated_tokens=activity.sampled_tokens,
            prompt_tokens=activity.prompt_tokens,
            active=activity.active,
            busy_seconds=activity.busy_seconds,
            gap_seconds=activity.gap_seconds,
            idle_seconds=activity.idle_seconds,
            resting_seconds=activity.resting_seconds,
            idle_by_cause=dict(activity.idle),
            cpu_seconds=dict(activity.cpu),
            paused=self._maintenance.paused,
            asleep=self._maintenance.asleep,
            weight_version=self.weight_version,
        )

    def rollout(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | None = None,
        *,
        n: int = 8,
        stop_group: StopGroup | None = None,
        ahead: int | None = None,
    ) -> Rollout:
        """Sample groups that share their prompt, without end if the prompts have none; iterate over what is returned.

        Groups come in the order in which they end. While one is used, others run.

        Args:
            prompts: as for `generate`; an iterator is read as far as there is room, so it must not wait for a group.
            params: of all samples; their `n`, if they have one, must be that of the call.
            n: samples of a group.
            stop_group: called with those samples of a group that have ended, whenever one more has; True ends the
                others. Called by a thread of its own, which begins no group meanwhile.
            ahead: most samples that are in the engine, or ended and not taken; it bounds how old a group can be. None:
                four times max_rows.

        Raises:
            InvalidRequest: a parameter was refused. What concerns a prompt is raised by the iteration.
        """
        taken = prompts if isinstance(prompts, Iterator) else iter(as_prompts(prompts))
        ahead = 4 * self.config.max_rows if ahead is None else ahead
        return Rollout(self, taken, SamplingParams() if params is None else params, n, stop_group, ahead)

    def reset_prefix_cache(self) -> None:
        """Forget what the cache holds: requests that start later use nothing that was computed before this call.

        Requests that run keep their blocks, and go on undisturbed.

        Raises:
            EngineDead, EngineClosed: the engine has ended.
        """
        self._life.inbox.put(lambda scheduler: scheduler.reset_prefix_cache())

    @property
    def weight_version(self) -> int:
        """Of the weights with which the next step runs: 0, and one more with each `update_weights`."""
        return self._parts.scheduler.weights.current

    def pause(self, mode: str = "keep") -> None:
        """Stop, and return once the device rests; requests may still be submitted, and wait.

        Args:
            mode: `keep` stops at once: what runs keeps its place, its cache, and all its tokens. `drain` lets requests
                that have begun go on to their end first, and begins none.

        Raises:
            EngineAsleep: what should drain cannot go on, since the engine sleeps.
            EngineDead, EngineClosed: the engine has ended, or did so meanwhile.
        """
        self._maintenance.pause(mode)

    def resume(self) -> None:
        """Go on after `pause`; who still waits for one to come about waits no longer. Does nothing if there is none.

        Raises:
            EngineDead, EngineClosed: the engine has ended.
        """
        self._maintenance.resume()

    def sleep(self) -> None:
        """Stop, free the cache, and move the weights into host memory (on the CPU they are there); until `wake`.

        Requests that run are recomputed later; they lose no token, and their tokens do not change.

        Raises:
            NotEnoughMemory: the host has no room for the weights; the engine goes on.
            EngineDead, EngineClosed: the engine has ended.
        """
        self._maintenance.sleep()

    def wake(self) -> None:
        """Undo `sleep`; graphs are captured again. A pause is left as it is.

        Raises:
            NotEnoughMemory: somebody else has the memory now; the engine sleeps on, and can be woken later.
            EngineDead, EngineClosed: the engine has ended.
        """
        self._maintenance.wake()

    def update_weights(self, weights: Weights, *, recompute: bool = False, partial: bool = False) -> int:
        """Replace the weights between two steps, and return their version.

        All is checked before anything is written. Nothing that was computed before is found in the prefix cache any
        more. Which version gave which tokens is in the outputs' `weight_versions`.

        Args:
            weights: a state dict, a safetensors file, or a directory of them, with the names of the checkpoint. Tensors
                of any floating dtype, on the host or the device; they must stay as they are until the call returns.
            recompute: compute what running requests have in the cache anew with the new weights, rather than keep it.
            partial: tensors that are missing stay as they are, rather than being an error.

        Raises:
            InvalidWeights: a name, a shape or a dtype does not fit; nothing was written.
            EngineAsleep: the engine sleeps.
            EngineDead, EngineClosed: the engine has ended.
        """
        return self._maintenance.update_weights(weights, recompute=recompute, partial=partial)

    def close(self) -> None:
        """Cancel what is running, hand over every output, stop all threads, and free all memory, weights included.

        Safe to call twice.
        """
        self._life.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class InboxCommands:
    """Leaves commands in a loop's inbox."""

    def __init__(self, inbox: Inbox, scheduler: Scheduler) -> None:
        self._inbox = inbox
        self._scheduler = scheduler

    @property
    def begun(self) -> int:
        return self._scheduler.begun

    def submit(self, samples: Sequence[Sample]) -> None:
        self._inbox.put(partial(_submit, samples))
        for sample in samples:
            if (timeout := sample.request.params.queue_timeout) is not None:
                self._inbox.put_at(sample.timings.submitted + timeout, partial(_expire, weakref.ref(sample)))

    def cancel(self, sample: Sample) -> None:
        self._inbox.put(lambda scheduler: scheduler.cancel(sample))

    def stream(self, sample: Sample) -> None:
        self._inbox.put(lambda scheduler: scheduler.stream(sample))

    def finish(self, sample: Sample, count: int) -> None:
        self._inbox.put(lambda scheduler: scheduler.finish(sample, count))


def _submit(samples: Sequence[Sample], scheduler: Scheduler) -> None:
    for sample in samples:
        scheduler.submit(sample)
        if sample.request.terms.follows:
            scheduler.stream(sample)


def _expire(waiting: weakref.ref[Sample], scheduler: Scheduler) -> Committed | None:
    sample = waiting()
    return None if sample is None else scheduler.expire(sample)
