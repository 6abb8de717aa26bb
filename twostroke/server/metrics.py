"""Metrics of requests, for Prometheus. The names are those that users know from vLLM, with `twostroke` in front."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ..request import FinishReason
from ..text.handle import Handle
from ..text.output import Delta
from .board import WAITING, Board
from .engine_metrics import SHARED_NUMBERS, EngineMetrics
from .tallies import CounterTally, HistogramTally

PREFIX = "twostroke:"

FIRST_TOKEN_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
REQUEST_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 480.0, 1920.0)
QUEUE_BUCKETS = (0.001, 0.01, 0.1, *REQUEST_BUCKETS[1:])
COUNT_BUCKETS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
"""Seconds, and numbers of tokens."""

HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token.", FIRST_TOKEN_BUCKETS),
    "inter_token_latency_seconds": ("Between the deltas of a stream, per token.", TOKEN_BUCKETS),
    "request_time_per_output_token_seconds": ("Mean time of a request's tokens after the first.", TOKEN_BUCKETS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", REQUEST_BUCKETS),
    "request_queue_time_seconds": ("From a request's arrival until it begins to run.", QUEUE_BUCKETS),
    "request_prefill_time_seconds": ("From there to its first token.", REQUEST_BUCKETS),
    "request_decode_time_seconds": ("From its first token to its end.", REQUEST_BUCKETS),
    "request_prompt_tokens": ("Tokens of a request's prompt.", COUNT_BUCKETS),
    "request_generation_tokens": ("Tokens of a sample's output.", COUNT_BUCKETS),
}


def _tallies() -> tuple[dict[str, HistogramTally], CounterTally]:
    """The histograms by name, and the counters, one behind the other on a board."""
    histograms, end = {}, WAITING + 1
    for name, (text, bounds) in HISTOGRAMS.items():
        histograms[name] = HistogramTally(PREFIX + name, text, bounds, end)
        end = histograms[name].end
    reasons = [reason.value for reason in FinishReason]
    return histograms, CounterTally(f"{PREFIX}request_success", "Samples that ended.", "finished_reason", reasons, end)


_HISTOGRAMS, _ENDED = _tallies()


def make_board(processes: int = 1) -> Board:
    """Return a board for the metrics of so many API processes."""
    return Board(SHARED_NUMBERS, _ENDED.end, processes)


class Metrics(Collector):
    """What the server counts, on a board, and what is known of its engine.

    Args:
        model_name: a label of all metrics.
        gpu_price: of an hour; None where it is not known.
        board: that of all API processes; None for one alone.
    """

    def __init__(self, model_name: str, gpu_price: float | None, board: Board | None = None) -> None:
        self._model_name = model_name
        self._board = make_board() if board is None else board
        self.engine = EngineMetrics(PREFIX, model_name, gpu_price, self._board)
        # NOTE: a registry of its own: several servers of one process do not get mixed up.
        self._registry = CollectorRegistry()
        self._registry.register(self.engine)
        self._registry.register(self)

    def collect(self) -> Iterator[Metric]:
        tallies: tuple[HistogramTally | CounterTally, ...] = (*_HISTOGRAMS.values(), _ENDED)
        for tally in tallies:
            yield tally.read(self._board, self._model_name)

    def begin(self, handles: Sequence[Handle]) -> Pace:
        """Return what takes note of the deltas of a call."""
        return Pace(handles, self._observe)

    def end(self, handles: Sequence[Handle], pace: Pace) -> None:
        """Count the requests of a call that is over."""
        for place, handle in enumerate(handles):
            self._observe("request_prompt_tokens", len(handle.sample.request.prompt))
            for sample in handle.samples:
                failed = FinishReason.ERROR if handle.done else FinishReason.CANCELLED
                _ENDED.count(self._board, (sample.finish_reason or failed).value)
                if sample.finish_reason is not None:
                    self._observe("request_generation_tokens", len(sample.output))
            self._observe_times(handle, first_seen=pace.has_begun(place))

    def expose(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type, in the format that an `Accept` header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def _observe_times(self, handle: Handle, *, first_seen: bool) -> None:
        times, tokens = handle.sample.timings, len(handle.sample.output)
        if times.admitted is None:
            return
        self._observe("request_queue_time_seconds", times.admitted - times.submitted)
        if times.first_token is None or times.finished is None:
            return
        if not first_seen:
            self._observe("time_to_first_token_seconds", times.first_token - times.submitted)
        self._observe("request_prefill_time_seconds", times.first_token - times.admitted)
        self._observe("request_decode_time_seconds", times.finished - times.first_token)
        if tokens > 1:
            self._observe("request_time_per_output_token_seconds", (times.finished - times.first_token) / (tokens - 1))
        last = max(sample.timings.finished or times.finished for sample in handle.samples)
        self._observe("e2e_request_latency_seconds", last - times.submitted)

    def _observe(self, name: str, value: float) -> None:
        _HISTOGRAMS[name].observe(self._board, value)


class Pace:
    """Observes when the deltas of a call come.

    A request that is not streamed has none; its first token is known of when it ends.

    Args:
        observe: adds a value to the histogram of a name.
    """

    def __init__(self, handles: Sequence[Handle], observe: Callable[[str, float], None]) -> None:
        self._handles = handles
        self._observe = observe
        self._seen: dict[tuple[int, int], float] = {}
        self._begun: set[int] = set()

    def has_begun(self, place: int) -> bool:
        """Whether a delta of the request at `place` has come."""
        return place in self._begun

    def came(self, place: int, delta: Delta) -> None:
        """Note a delta of the request at `place`."""
        if not delta.token_ids:
            return
        now, key = time.perf_counter(), (place, delta.index)
        before, self._seen[key] = self._seen.get(key), now
        if before is not None:
            self._observe("inter_token_latency_seconds", (now - before) / len(delta.token_ids))
        elif place not in self._begun:
            self._begun.add(place)
            submitted = self._handles[place].sample.timings.submitted
            self._observe("time_to_first_token_seconds", now - submitted)
