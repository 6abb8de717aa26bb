"""Delivery: the worker that turns tokens into text and hands both over, beside the loop."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from ..errors import InvalidRequest, shown
from ..request import FinishReason, Request, Sample
from .detokenizer import Detokenizer
from .ending import Ending
from .handle import Handle
from .logprobs import LogprobLog
from .stop_strings import StopStream
from .tokenizer import Tokenizer

_STOP = None

_SWEEP_STEPS = 64
"""Steps between two looks for consumers whose asyncio loop was closed."""

_SETTLE_SECONDS = 1.0
"""Time between two looks whether the worker that is waited for is alive."""


class Committed(Protocol):
    """What a commit has to hand over, see `scheduler.Committed`."""

    @property
    def finished(self) -> list[Sample]: ...
    @property
    def streamed(self) -> list[Sample]: ...
    @property
    def tokens(self) -> np.ndarray: ...
    @property
    def records(self) -> np.ndarray: ...
    @property
    def scored(self) -> Sequence[Sample]: ...
    @property
    def scores(self) -> np.ndarray: ...


class _Stream:
    """What was handed over of a sample without stop strings: tokens at once, text as soon as it is final.

    Attributes:
        kept: tokens that the output keeps of those that came; None is all.
        text: the whole text, once finished; None without a tokenizer.
    """

    kept: int | None = None
    text: str | None = None

    def __init__(self, tokenizer: Tokenizer | None, request: Request) -> None:
        skip = request.params.skip_special_tokens
        self._pushed = 0
        self._decode = partial(tokenizer.decode, skip_special_tokens=skip) if tokenizer else None
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip) if tokenizer else None

    def push(self, ids: list[int]) -> tuple[list[int], str]:
        """Add tokens; return the ids and the text that are to be handed over."""
        self._pushed += len(ids)
        return ids, self._detokenizer.push(ids) if self._detokenizer else ""

    def finish(self, ids: list[int]) -> tuple[list[int], str]:
        """Add what `ids`, all that have a text, has beyond the tokens pushed before; return all that is left."""
        if not self._decode or not self._detokenizer:
            return self.push(ids[self._pushed :])
        self.text = self._decode(ids)
        rest, text = self.push(ids[self._pushed :])
        return rest, text + self._detokenizer.finish()


class Delivery:
    """Hands over what the loop committed; the only place that makes text, and that searches it for stop strings.

    At a stop string it asks the loop to end the sample. Until that has come about the sample may get more tokens, or
    end in another way; the output is the same, since it was decided by the tokens up to the stop string.

    The loop's thread only queues; all work on text, and every wake-up of a consumer, is done by this worker. Consumers
    that do not read cost one merged delta each, never more than the output itself.

    Args:
        tokenizer: None for a model without one.
        on_error: called with the exception that ended the worker.
    """

    def __init__(self, tokenizer: Tokenizer | None, on_error: Callable[[BaseException], None]) -> None:
        self._tokenizer = tokenizer
        self._on_error = on_error
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._puts = 0
        self._lock = threading.Lock()
        self._handles: dict[Sample, Handle] = {}
        self._ids: set[str] = set()
        self._streams: dict[Sample, _Stream | StopStream] = {}
        self._logs: dict[Sample, LogprobLog] = {}
        self._thread = threading.Thread(target=self._serve, name="twostroke-delivery", daemon=True)
        self._thread.start()

    def register(self, handles: Sequence[Handle]) -> None:
        """Expect the outputs of `handles`, whose ids differ.

        Raises:
            InvalidRequest: one of their ids is in use; none of them is expected.
        """
        with self._lock:
            ids = [handle.request_id for handle in handles]
            if taken := self._ids.intersection(ids):
                raise InvalidRequest(f"request_id={shown(taken.pop())} is in use by a request that has not ended")
            self._ids.update(ids)
            self._handles.update((sample, handle) for handle in handles for sample in handle.samples)

    def forget(self, handle: Handle) -> None:
        """Undo `register`: the request did not reach the loop."""
        for sample in handle.samples:
            self._pop(sample)

    def put(self, committed: Committed | None) -> None:
        """Hand over a commit's result; called by the loop."""
        if committed is not None and (committed.finished or committed.streamed or committed.scored):
            self._queue.put(partial(self._deliver, committed))
        self._puts += 1
        if self._puts % _SWEEP_STEPS == 0:
            self._queue.put(self._sweep)

    def settle(self) -> None:
        """Wait until all that was put is handed over, or the worker has ended."""
        done = threading.Event()
        self._queue.put(done.set)
        while self._thread.is_alive() and not done.wait(_SETTLE_SECONDS):
            pass

    def fail(self, error: Exception) -> None:
        """Make every request that has not ended fail with `error`."""
        with self._lock:
            handles = set(self._handles.values())
            self._handles.clear()
            self._ids.clear()
        for handle in handles:
            handle.fail(error)

    def end_in_child(self, error: Exception) -> None:
        """Make every request fail in a forked child: the worker, which may hold the locks, is not there."""
        self._lock = threading.Lock()
        for handle in set(self._handles.values()):
            handle.end_in_child(error)
        self._handles.clear()
        self._ids.clear()

    def close(self) -> None:
        """Hand over what is queued, then end the worker and wait for that."""
        self._queue.put(_STOP)
        self._thread.join()

    def _pop(self, sample: Sample) -> None:
        """Expect no more of `sample`; the request's id is free once that is so for all of its samples."""
        with self._lock:
            handle = self._handles.pop(sample, None)
            if handle is not None and self._handles.keys().isdisjoint(handle.samples):
                self._ids.discard(sample.request.id)

    def _serve(self) -> None:
        try:
            while (work := self._queue.get()) is not _STOP:
                work()
        except BaseException as error:
            self._on_error(error)

    def _deliver(self, committed: Committed) -> None:
        self._collect(committed)
        ended = set(committed.finished)
        new: dict[Sample, list[int]] = {}
        for sample, token in zip(committed.streamed, committed.tokens.tolist(), strict=True):
            if sample not in ended:
                new.setdefault(sample, []).append(token)
        for sample, ids in new.items():
            self._push(sample, ids)
        for sample in committed.finished:
            self._finish(sample)

    def _collect(self, committed: Committed) -> None:
        """Keep the log-probabilities that came."""
        if len(committed.records):
            for sample, token, record in zip(
                committed.streamed, committed.tokens.tolist(), committed.records, strict=True
            ):
                if sample.request.terms.wanted_logprobs:
                    self._log(sample).add(token, record)
        for sample, record in zip(committed.scored, committed.scores, strict=True):
            self._log(sample).add_prompt(record)

    def _log(self, sample: Sample) -> LogprobLog:
        if sample not in self._logs:
            self._logs[sample] = LogprobLog(sample)
        return self._logs[sample]

    def _sweep(self) -> None:
        """Find requests that nobody can wait for any more before they end by themselves."""
        with self._lock:
            handles = set(self._handles.values())
        for handle in handles:
            handle.cancel_if_deserted()

    def _push(self, sample: Sample, ids: list[int]) -> None:
        handle = self._handles.get(sample)
        if handle is None:  # it failed with the engine
            return
        stream = self._streams.get(sample)
        if stream is None:
            stream = self._streams[sample] = self._make_stream(sample)
        if stream.kept is not None:  # what comes until the loop has ended it
            return
        shown, text = stream.push(ids)
        log = self._logs.get(sample)
        handle.push(sample.index, shown, text, log.hand_over(len(shown)) if log else ())
        if stream.kept is not None:
            handle.stop(sample, stream.kept)

    def _make_stream(self, sample: Sample) -> _Stream | StopStream:
        if self._tokenizer and sample.request.terms.stops:
            return StopStream(self._tokenizer, sample.request)
        return _Stream(self._tokenizer, sample.request)

    def _finish(self, sample: Sample) -> None:
        stream, log = self._streams.pop(sample, None), self._logs.pop(sample, None)
        handle, terms = self._handles.get(sample), sample.request.terms
        if handle is None:
            return
        if log is None and (terms.wanted_logprobs or terms.wanted_prompt_logprobs):
            log = LogprobLog(sample)
        rest: list[int] = []
        text = ""
        if stream is None and not terms.stops:
            ending = Ending(sample, self._whole_text(sample), log, untaken=True)
        else:
            stream = stream or self._make_stream(sample)
            rest, text = self._rest(sample, stream)
            ending = Ending(sample, stream.text, log, kept=stream.kept)
        # NOTE: not before the text is made, so that a failure there reaches this request too; but before anybody can
        # know of its end, since then its id must be free.
        self._pop(sample)
        handle.finish(ending, rest, text)

    def _rest(self, sample: Sample, stream: _Stream | StopStream) -> tuple[list[int], str]:
        """What is left to hand over of a sample that has ended."""
        ids = sample.output.tolist()
        spoken = ids[: _spoken(sample, len(ids))]
        rest, text = stream.finish(spoken)
        return (rest + ids[len(spoken) :] if stream.kept is None else rest), text

    def _whole_text(self, sample: Sample) -> str | None:
        """The text of a sample that nobody followed."""
        if self._tokenizer is None:
            return None
        ids = sample.output.tolist()
        skip = sample.request.params.skip_special_tokens
        return self._tokenizer.decode(ids[: _spoken(sample, len(ids))], skip_special_tokens=skip)


def _spoken(sample: Sample, count: int) -> int:
    """How many of the `count` tokens of a sample that has ended have a text."""
    # NOTE: at a stop string the stream drops what follows, so here a stop is always that of a stop token.
    return count - 1 if sample.finish_reason == FinishReason.STOP else count
