"""`serving` on the CPU with a tiny model, and its client, which must not take a broken stream for an answer."""

from __future__ import annotations

import socket
import threading
from contextlib import contextmanager

import pytest

from twostroke import TwostrokeError
from twostroke.bench import serving
from twostroke.bench.http_streams import Streamed, stream_all
from twostroke.bench.made_up_checkpoint import save_made_up_checkpoint
from twostroke.bench.offline_workloads import Workload
from twostroke.bench.options import BenchOptions


def test_what_is_served_is_what_is_made_offline(tmp_path):
    """Token for token; and the figures are those of the served load."""
    import torch

    prompts = [[3 + place, 5, 9] for place in range(24)]
    workload = Workload("tiny", prompts, [20 + place for place in range(24)], 0.6, max_rows=8, max_model_len=64)
    save_made_up_checkpoint("tiny", tmp_path, "cpu", torch.float32)
    options = BenchOptions(repetitions=1, max_step_tokens=64, api_processes=2)
    offline, served, by_two = serving.run_load(workload, tmp_path, "cpu", "async", options, lambda line: None)
    assert [offline.case, served.case, by_two.case] == ["offline", "served", "served by 2 processes"]
    assert offline.tokens == served.tokens == by_two.tokens == sum(workload.outputs)
    assert served.extra["differing_tokens"] == by_two.extra["differing_tokens"] == 0
    assert served.extra["requests_per_s"] == pytest.approx(24 / served.seconds)
    assert served.extra["percent_of_offline"] == pytest.approx(100 * offline.seconds / served.seconds)
    assert 0 < served.extra["first_token_p50_ms"] <= served.extra["first_token_p99_ms"] < 1e3 * served.seconds
    assert 0 <= served.extra["inter_token_p50_ms"] <= served.extra["inter_token_p99_ms"]
    assert served.gpu_active is None
    assert served.ms_per_step is not None
    assert offline.ms_per_step is not None


def test_waits_are_those_of_the_clients():
    streams = [Streamed(1.0, [5, 6, 7], [1.5, 1.5, 2.5]), Streamed(2.0, [8], [4.0])]
    found = serving.waits(streams)
    assert found["first_token_p50_ms"] == pytest.approx(1250)
    assert found["inter_token_p50_ms"] == pytest.approx(500)


def test_tokens_that_differ_are_counted_lost_and_doubled_ones_too():
    assert serving.differing([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]]) == 0
    assert serving.differing([[1, 2, 3], [4, 5]], [[1, 9, 3], [4]]) == 2
    assert serving.differing([[1, 2]], [[1, 1, 2]]) == 2


@contextmanager
def answering(*pieces: bytes):
    """A server that says this to its one client, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve():
            connection, _ = listener.accept()
            with connection:
                connection.recv(1 << 16)
                for piece in pieces:
                    connection.sendall(piece)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
TOKEN = b'data: {"choices":[{"token_ids":[5]}]}\n\n'
ERROR = b'data: {"error":{"message":"the engine stopped"}}\n\n'
DONE = b"data: [DONE]\n\n"


def test_a_stream_is_read_however_it_is_cut():
    """With or without chunks of HTTP."""
    data = HEAD + TOKEN * 2 + b"26\r\n" + TOKEN + b"\r\ne\r\n" + DONE + b"\r\n0\r\n\r\n"
    for size in (1, 7, len(data)):
        with answering(*(data[start : start + size] for start in range(0, len(data), size))) as url:
            (stream,) = stream_all(url, "/", [{}])
        assert stream.tokens == [5, 5, 5]
        assert stream.sent <= stream.times[0] <= stream.times[-1]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (HEAD + TOKEN, "broke off after 1 token$"),
        (HEAD + TOKEN + ERROR, "the engine stopped"),
        (b"HTTP/1.1 429 Too Many\r\n\r\n{full}", "429: {full}"),
        (b"", "broke off after 0"),
    ],
)
def test_a_stream_that_is_no_answer_is_an_error(data, message):
    with answering(data) as url, pytest.raises(TwostrokeError, match=message):
        stream_all(url, "/", [{}])
