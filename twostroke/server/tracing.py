"""Traces of requests, for OpenTelemetry. A span is made when its request is over, so nothing of this is in its way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from .. import __version__
from ..request import FinishReason, Timings
from ..text.handle import Handle

_NANO = 1_000_000_000

SECONDS = 5.0
"""In which spans are sent, or given up."""


class Tracing:
    """Makes a span of each request, with one inside it for each stretch of its life: queue, prefill, decode.

    They are children of the span that the request's `traceparent` header names. They hold numbers, and no text.

    Args:
        exporter: where spans go, in batches, by a thread of its own.
        model_name: an attribute of all spans.
    """

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        self._provider = TracerProvider(resource=Resource.create({"service.name": "twostroke"}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("twostroke", __version__)
        self._model_name = model_name

    def begin(self) -> Callable[[Sequence[Handle]], None]:
        """Return what makes the spans of a call that begins now; to be called when it is over."""
        return partial(self._end, get_current())

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()

    def _end(self, parent: Context, handles: Sequence[Handle]) -> None:
        now = time.perf_counter()
        to_epoch = time.time() - now

        def at(moment: float) -> int:
            return int((moment + to_epoch) * _NANO)

        for handle in handles:
            times, attributes = handle.sample.timings, self._attributes(handle)
            span = self._tracer.start_span(
                "llm_request", parent, SpanKind.SERVER, attributes, start_time=at(times.submitted)
            )
            if FinishReason.ERROR.value in attributes["gen_ai.response.finish_reasons"]:
                span.set_status(Status(StatusCode.ERROR))
            for name, begin, end in _stretches(times):
                part = self._tracer.start_span(name, set_span_in_context(span, parent), start_time=at(begin))
                part.end(at(end))
            ends = (one.timings.finished for one in handle.samples)
            span.end(at(max((end for end in ends if end is not None), default=now)))

    def _attributes(self, handle: Handle) -> dict[str, Any]:
        """In the words of OpenTelemetry's conventions for generative models."""
        sample = handle.sample
        return {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._model_name,
            "gen_ai.request.temperature": float(sample.request.params.temperature),
            "gen_ai.usage.input_tokens": len(sample.request.prompt),
            "gen_ai.usage.output_tokens": sum(len(one.output) for one in handle.samples),
            "gen_ai.response.finish_reasons": [
                (one.finish_reason or FinishReason.CANCELLED).value for one in handle.samples
            ],
        }


class TraceParent:
    """Lets what a request starts know the span that its headers name."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        token = attach(extract(Headers(scope=scope)))
        try:
            await self._app(scope, receive, send)
        finally:
            detach(token)


def start_tracing(endpoint: str, model_name: str) -> Tracing:
    """Return a tracing whose spans are sent to an endpoint by OTLP over HTTP."""
    return Tracing(OTLPSpanExporter(endpoint=endpoint, timeout=SECONDS), model_name)


def _stretches(times: Timings) -> Iterator[tuple[str, float, float]]:
    """(name, begin, end) of the parts of a request's life that it has behind it."""
    moments = (times.submitted, times.admitted, times.first_token, times.finished)
    for name, begin, end in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
        if begin is None or end is None:
            return
        yield name, begin, end
