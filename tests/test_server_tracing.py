"""Traces: a span for each request, with what it did inside, under the client's own span."""

from __future__ import annotations

from typing import Any

import pytest
from serving import hosted

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from twostroke.server import tracing

TRACE, SPAN = 0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331


def test_spans(tiny_engine, monkeypatch):
    exporter, asked = InMemorySpanExporter(), []
    monkeypatch.setattr(tracing, "OTLPSpanExporter", lambda **own: asked.append(own["endpoint"]) or exporter)
    body: dict[str, Any] = {"prompt": [3, 4, 5], "max_tokens": 6, "ignore_eos": True, "n": 2}
    with hosted(tiny_engine, {"otlp_traces_endpoint": "http://127.0.0.1:9/v1/traces"}) as server:
        header = {"traceparent": f"00-{TRACE:032x}-{SPAN:016x}-01"}
        assert server.post("/v1/completions", body, **header).status == 200
        assert server.post("/v1/completions", body | {"n": 1, "stream": True}).status == 200
        assert server.post("/v1/completions", body | {"max_tokens": 0}).status == 400  # it never began
    # All were sent when the server ended.
    assert asked == ["http://127.0.0.1:9/v1/traces"]
    spans = exporter.get_finished_spans()
    first, second = (span for span in spans if span.name == "llm_request")
    assert (first.context.trace_id, first.parent.span_id) == (TRACE, SPAN)
    assert second.parent is None
    assert first.attributes["gen_ai.usage.input_tokens"] == 3
    assert first.attributes["gen_ai.usage.output_tokens"] == 12
    assert first.attributes["gen_ai.response.finish_reasons"] == ("length", "length")
    for request in (first, second):
        parts = [span for span in spans if span.parent and span.parent.span_id == request.context.span_id]
        assert [part.name for part in parts] == ["queue", "prefill", "decode"]
        moments = [moment for part in parts for moment in (part.start_time, part.end_time)]
        assert [request.start_time, *moments, request.end_time] == sorted(
            [request.start_time, *moments, request.end_time]
        )
    assert all("prompt" not in name for span in spans for name in span.attributes)
