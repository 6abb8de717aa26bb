"""Rollouts: groups of samples that share a prompt, for reinforcement learning."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import numpy as np

from .checks import require_int
from .errors import InvalidRequest, QueueFull, shown
from .prompts import Prompt
from .request import FinishReason
from .sampling_params import SamplingParams
from .text.handle import Handle
from .text.output import SampleOutput


@dataclass(frozen=True, slots=True)
class RolloutSample:
    """One sample of a group, of T tokens.

    Attributes:
        token_ids: int32 [T]; a stop token is the last of them.
        logprobs: of each token in the softmax of the model's logits, before temperature, filters, penalties and masks,
            float32 [T].
        sampling_logprobs: of each token in the distribution that it was drawn from, float32 [T].
        weight_versions: the version of the weights that gave each token, int32 [T].
        text: None without a tokenizer.
        finish_reason: `cancelled` if the group was stopped before its end. error: what went wrong, if `error`.
        seed: the key of its random numbers.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    sampling_logprobs: np.ndarray
    weight_versions: np.ndarray
    text: str | None
    finish_reason: FinishReason
    error: str | None
    seed: int

    @classmethod
    def of(cls, output: SampleOutput) -> RolloutSample:
        """The sample of an output that has log-probabilities."""
        entries = output.logprobs or []
        versions = [version for version, _ in output.weight_versions]
        return cls(
            token_ids=np.array(output.token_ids, np.int32),
            logprobs=np.array([entry.logprob for entry in entries], np.float32),
            sampling_logprobs=np.array([entry.sampling_logprob for entry in entries], np.float32),
            weight_versions=np.repeat(np.array(versions, np.int32), [count for _, count in output.weight_versions]),
            text=output.text,
            finish_reason=output.finish_reason,
            error=output.error,
            seed=output.seed,
        )


@dataclass(frozen=True, slots=True)
class RolloutGroup:
    """The samples of one prompt.

    Attributes:
        index: the place of the prompt among those given.
        prompt_token_ids: int32 [P].
        samples: all n, in the order of their indices.
        stopped: the callback ended it early.
    """

    index: int
    prompt_token_ids: np.ndarray
    samples: list[RolloutSample]
    stopped: bool


StopGroup = Callable[[Sequence[RolloutSample]], bool]
"""Called with the samples of a group that have ended, in that order, whenever one more has; True ends the others."""


class RolloutEngine(Protocol):
    """What a rollout asks of the engine."""

    def start(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Handle]: ...
    def update_weights(self, weights: Any, *, recompute: bool = ..., partial: bool = ...) -> int: ...


class Rollout:
    """Groups, in the order in which they end; iterate over it. A thread keeps the engine supplied meanwhile.

    A context manager: to leave it, or to let go of it, cancels what still runs.

    Args:
        prompts: taken one by one, by that thread.
        params: of all samples. n: the size of a group.
        ahead: most samples that are in the engine, or ended and not taken. A group begins if there is room for all of
            its samples, or nothing else is there.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        prompts: Iterator[Prompt],
        params: SamplingParams,
        n: int,
        stop_group: StopGroup | None,
        ahead: int,
    ) -> None:
        if params.best_of is not None:
            raise InvalidRequest(f"best_of={shown(params.best_of)} makes no group: all samples are returned")
        if params.n not in (SamplingParams.n, n):
            raise InvalidRequest(f"n={shown(params.n)} of the parameters is not n={shown(n)} of the rollout")
        params = replace(params, n=n, logprobs=params.logprobs or 0)
        params.validate()
        self._engine = engine
        self._supply = _Supply(engine, prompts, params, stop_group, require_int("ahead", ahead, low=1))

    def __iter__(self) -> Rollout:
        return self

    def __next__(self) -> RolloutGroup:
        """Wait for a group.

        Raises:
            InvalidRequest: a prompt or a parameter was refused. QueueFull: a group had no room, though no other of the
                rollout ran. EngineDead, EngineClosed: the engine ended. Whatever the prompts' iterator or the callback
                raises. All that still ran was cancelled.
        """
        return self._supply.take()

    def update_weights(
        self, weights: Any, *, during: bool = False, recompute: bool = False, partial: bool = False
    ) -> int:
        """Replace the engine's weights, and return their version; see `Engine.update_weights`.

        Args:
            during: at once, amid groups that run. Otherwise groups that have begun go on to their end first, and
                meanwhile none begins, so no group has tokens of two versions.

        Raises:
            InvalidRequest: the weights were refused, or it is not `during` and comes from the prompts' iterator or the
                callback, whose return the groups wait for.
        """
        if during:
            return self._engine.update_weights(weights, recompute=recompute, partial=partial)
        self._supply.hold()
        try:
            return self._engine.update_weights(weights, recompute=recompute, partial=partial)
        finally:
            self._supply.release()

    def close(self) -> None:
        """Cancel what runs, and wait for that; not in the prompts' iterator or the callback, which it waits for."""
        self._supply.close()

    def __enter__(self) -> Rollout:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        if supply := getattr(self, "_supply", None):
            supply.let_go()


@dataclass(eq=False)
class _Group:
    """A group that runs.

    Attributes:
        ended: its samples that have ended, by their indices, in that order.
    """

    index: int
    handle: Handle
    ended: dict[int, RolloutSample] = field(default_factory=dict)
    stopped: bool = False


class _Supply:
    """The thread of a rollout. All but the lock's fields is its own; others leave it events."""

    def __init__(
        self,
        engine: RolloutEngine,
        prompts: Iterator[Prompt],
        params: SamplingParams,
        stop_group: StopGroup | None,
        ahead: int,
    ) -> None:
        self._engine = engine
        self._prompts = enumerate(prompts)
        self._following: tuple[int, Prompt] | None = None
        self._params = params
        self._stop_group = stop_group
        self._room = ahead
        self._ahead = ahead
        self._exhausted = False
        self._groups: set[_Group] = set()
        self._events: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[RolloutGroup | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._lock = threading.RLock()  # entered itself: see `Handle`
        self._changed = threading.Condition(self._lock)
        self._held = self._leaving = self._ended = False
        self._quiet = True
        self._thread = threading.Thread(target=self._serve, name="twostroke-rollout", daemon=True)
        self._thread.start()

    def take(self) -> RolloutGroup:
        group = self._ready.get()
        if group is None:
            self._ready.put(None)  # for the next call
            error, self._error = self._error, None
            raise error or StopIteration
        self._events.put(partial(self._free, len(group.samples)))
        return group

    def hold(self) -> None:
        """Begin no group; return once none runs.

        Raises:
            InvalidRequest: it is called by what the thread calls, so no group could end.
        """
        if self._is_caller:
            raise InvalidRequest(
                "during=False waits for groups that run, and these for the callback or iterator that asks for it: "
                "give during=True there"
            )
        with self._lock:
            self._held = True
            self._changed.wait_for(lambda: self._quiet or self._ended)

    def release(self) -> None:
        with self._lock:
            self._held = False
        self._events.put(_nothing)

    def let_go(self) -> None:
        """Have the thread cancel what runs, and end."""
        with self._lock:
            self._leaving = True
        self._events.put(_nothing)

    def close(self) -> None:
        self.let_go()
        if not self._is_caller:
            self._thread.join()

    @property
    def _is_caller(self) -> bool:
        """Whether the thread itself runs this: the callback, or the prompts' iterator."""
        return threading.current_thread() is self._thread

    def _serve(self) -> None:
        try:
            while self._refill():
                self._events.get()()
                self._note_quiet()
        except BaseException as error:
            self._error = error
        finally:
            for group in self._groups:
                group.handle.cancel()
            for group in self._groups:
                group.handle.wait()
            with self._lock:
                self._ended = True
                self._changed.notify_all()
            self._ready.put(None)

    def _refill(self) -> bool:
        """Begin groups while there is room; False if there is nothing left to do."""
        while not self._exhausted and (self._room >= self._params.n or self._room == self._ahead):
            with self._lock:
                if self._held or self._leaving:
                    break
                self._quiet = False
            begun = self._begin()
            self._note_quiet()
            if not begun:
                break
        return not self._leaving and bool(self._groups or not self._exhausted)

    def _begin(self) -> bool:
        """Begin the next group, if there is one; False if the engine has no room for it before one of these ends."""
        self._following = self._following or next(self._prompts, None)
        if self._following is None:
            self._exhausted = True
            return True
        index, prompt = self._following
        try:
            (handle,) = self._engine.start([prompt], [self._params])
        except QueueFull:
            if not self._groups:
                raise
            return False
        self._following = None
        group = _Group(index, handle)
        self._groups.add(group)
        self._room -= self._params.n
        handle.on_sample(lambda output: self._events.put(partial(self._end_sample, group, output)))
        # NOTE: samples that ended have said so themselves; this is for groups that fail with the engine.
        handle.on_end(lambda _: self._events.put(handle.result))
        return True

    def _end_sample(self, group: _Group, output: SampleOutput) -> None:
        group.ended[output.index] = RolloutSample.of(output)
        if len(group.ended) == self._params.n:
            self._end_group(group)
        elif self._stop_group and not group.stopped and self._stop_group(tuple(group.ended.values())):
            group.stopped = True
            group.handle.cancel()

    def _end_group(self, group: _Group) -> None:
        self._groups.remove(group)
        prompt = group.handle.sample.request.prompt.copy()
        samples = [group.ended[index] for index in range(self._params.n)]
        self._ready.put(RolloutGroup(group.index, prompt, samples, group.stopped))

    def _free(self, samples: int) -> None:
        self._room += samples

    def _note_quiet(self) -> None:
        with self._lock:
            self._quiet = not self._groups
            if self._quiet:
                self._changed.notify_all()


def _nothing() -> None:
    """An event that only wakes the thread."""
