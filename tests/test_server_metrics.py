"""/metrics: what is counted, that it is right, and that it stays so when an engine dies; the dashboard's queries."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from serving import hosted, read_events
from watching import wait_until

from twostroke.device.step_times import CAUSES, PHASES
from twostroke.server.metrics import Metrics

PATH = "/v1/completions"
TINY = {"model": "tiny", "device": "cpu", "num_blocks": 60, "max_rows": 4, "seed": 0}
DASHBOARD = Path(__file__).parent.parent / "dashboards" / "twostroke.json"


@pytest.fixture(scope="module")
def server():
    with hosted(TINY, {"gpu_price": 2.5, "restart": True}) as server:
        yield server


def values(server: Any) -> dict[str, float]:
    """All samples by name, those with labels beyond the model's as name{label}."""
    got = server.get("/metrics")
    assert got.status == 200
    assert got.headers["Content-Type"].startswith("text/plain")
    found = {}
    for family in text_string_to_metric_families(got.data.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "small"
            found[sample.name.removeprefix("twostroke:") + "".join(f"{{{value}}}" for value in labels.values())] = (
                sample.value
            )
    return found


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": list(range(3, 40)), "max_tokens": 6, "ignore_eos": True, "temperature": 0} | fields


def test_what_requests_add(server):
    before = values(server)
    assert server.post(PATH, body(n=2)).status == 200
    with server.open(PATH, body(stream=True)) as connection:
        assert read_events(connection)[-1] == "[DONE]"
    wait_until(lambda: values(server)["num_requests_running"] == 0)
    after = values(server)

    def added(name: str) -> float:
        return after[name] - before[name]

    # All samples of a request count once each, its prompt once, whether it was streamed or not.
    assert added("generation_tokens_total") == 3 * 6
    assert added("request_success_total{length}") == 3
    assert added("request_generation_tokens_sum") == 3 * 6
    assert added("request_prompt_tokens_sum") == 2 * 37
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_decode_time"):
        assert added(f"{name}_seconds_count") == 2, name
    assert added("request_time_per_output_token_seconds_count") == 2
    # Of a stream, deltas that waited for the client were merged into one.
    assert 1 <= added("inter_token_latency_seconds_count") <= 5
    # The second request found the full blocks of the first one's prompt, and so did its second sample.
    assert added("prefix_cache_hits_total") >= 32
    assert added("prefix_cache_queries_total") - added("prefix_cache_hits_total") == added("prompt_tokens_total") > 0
    assert added("gpu_busy_seconds_total") > 0
    assert added("engine_steps_total") >= 12


def test_where_the_time_went(server):
    """While nothing is asked for, time goes on: the seconds of rest count before the rest is over."""
    first = values(server)
    assert {f"gpu_idle_seconds_total{{{cause}}}" for cause in CAUSES} <= set(first)
    assert {f"cpu_seconds_total{{{phase}}}" for phase in PHASES} <= set(first)
    wait_until(
        lambda: values(server)["gpu_idle_seconds_total{nothing}"] > first["gpu_idle_seconds_total{nothing}"] + 0.2
    )
    assert values(server)["gpu_busy_seconds_total"] == first["gpu_busy_seconds_total"]
    last = values(server)
    assert last["gpu_price_per_hour"] == 2.5
    idle = {cause: last[f"gpu_idle_seconds_total{{{cause}}}"] for cause in CAUSES}
    whole = sum(idle.values()) + last["gpu_busy_seconds_total"]
    costs = sum(last[f"idle_cost_per_day{{{cause}}}"] for cause in CAUSES)
    assert costs == pytest.approx(2.5 * 24 * sum(idle.values()) / whole)


def test_a_client_that_hangs_up_is_counted(server):
    before = values(server)
    connection = server.open(PATH, body(stream=True, max_tokens=400))
    wait_until(lambda: values(server)["num_requests_running"] == 1)
    assert values(server)["kv_cache_usage_perc"] > 0
    connection.close()
    wait_until(
        lambda: values(server)["request_success_total{cancelled}"] == before["request_success_total{cancelled}"] + 1
    )
    wait_until(lambda: values(server)["num_requests_running"] == 0)
    assert values(server)["kv_cache_usage_perc"] == 0


def test_counters_outlive_an_engine(server):
    """A counter that begins again from 0, or goes back, is a rate of nonsense."""
    assert server.post(PATH, body()).status == 200
    before = values(server)
    os.kill(server.supervisor.engine.pid, signal.SIGKILL)
    wait_until(lambda: values(server)["engine_up"] == 0)
    assert values(server)["generation_tokens_total"] == before["generation_tokens_total"]
    wait_until(lambda: server.get("/health").status == 200, 90.0)
    assert server.post(PATH, body()).status == 200
    wait_until(lambda: values(server)["num_requests_running"] == 0)
    after = values(server)
    assert after["engine_up"] == 1
    assert after["generation_tokens_total"] == before["generation_tokens_total"] + 6
    assert all(after[name] >= before[name] for name in before if name.endswith("_total"))


def test_metrics_need_the_key_and_have_no_price_of_their_own(tiny_engine):
    with hosted(tiny_engine, {"api_keys": ("secret",)}) as server:
        assert server.get("/metrics").status == 401
        got = server.get(
            "/metrics", Authorization="Bearer secret", Accept="application/openmetrics-text; version=1.0.0"
        )
        assert got.headers["Content-Type"].startswith("application/openmetrics-text")
        assert b"price" not in got.data
        assert b"idle_cost" not in got.data


def stats(**own: Any) -> dict[str, Any]:
    names = ("running", "waiting", "generated_tokens", "prompt_tokens", "prefix_hit_tokens", "preemptions", "steps")
    times = {"busy_seconds": 1.0, "resting_seconds": 0.0, "active": 1.0, "free_blocks": 9}
    idle = {"idle_by_cause": dict.fromkeys(CAUSES, 0.0), "cpu_seconds": dict.fromkeys(PHASES, 0.0)}
    return dict.fromkeys(names, 0) | times | idle | own


def test_rest_that_was_counted_is_not_counted_back():
    """Between the end of a rest and that of the step after it, the engine's own sums do not have it."""
    metrics = Metrics("small", None)
    metrics.engine.update(1.0, 10, stats(resting_seconds=5.0))
    metrics.engine.update(1.0, 10, stats())
    text = metrics.expose("")[0].decode()
    assert re.search(r'gpu_idle_seconds_total{cause="nothing",model_name="small"} 5.0', text)


def test_the_dashboard_asks_for_what_there_is():
    """Each query names metrics that exist, with labels that they have."""
    metrics = Metrics("small", 1.0)
    metrics.engine.update(1.0, 10, stats())
    families = list(text_string_to_metric_families(metrics.expose("")[0].decode()))
    labels = {sample.name: set(sample.labels) for family in families for sample in family.samples}
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    variables = [variable["query"] for variable in dashboard["templating"]["list"] if variable["type"] == "query"]
    asked = {name for query in queries + variables for name in re.findall(r"twostroke:\w+", query)}
    assert len(queries) > 12
    assert asked <= set(labels)
    assert {
        "twostroke:num_requests_running",
        "twostroke:gpu_idle_seconds_total",
        "twostroke:gpu_price_per_hour",
    } <= asked
    for query in queries:
        grouped = {name.strip() for names in re.findall(r"by \(([^)]*)\)", query) for name in names.split(",")}
        matched = set(re.findall(r"[{,]\s*(\w+)\s*=~?", query))
        known = set.union(*(labels[name] for name in re.findall(r"twostroke:\w+", query)))
        assert grouped | matched <= known | {"le"}, query
