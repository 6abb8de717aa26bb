"""The outbox: what an API process is sent, and what waits for it."""

import multiprocessing

import numpy as np

from twostroke import SamplingParams
from twostroke.limits import Limits
from twostroke.request import Request
from twostroke.scheduler.committed import Committed
from twostroke.server.outbox import HostedSample, Outbox
from twostroke.server.wire import Begun, Outputs, decode_from_engine


def test_that_a_sample_has_begun_is_said_before_its_tokens():
    """Else who has a token of it is refused the place in the queue that it left."""
    here, there = multiprocessing.Pipe()
    with here, there:
        box = Outbox(there, lambda error: None)
        request = Request.create("a", [5, 6], SamplingParams(), 0, Limits(97, 64, 4, 99))
        sample = HostedSample(request, 0, outbox=box, number=0)
        begun = 0
        for count in range(1, 201):
            box.begun = count
            box.put(Committed([], [sample], np.array([count], np.int32)))
        box.close()
        tokens: list[int] = []
        while len(tokens) < 200:
            message = decode_from_engine(here.recv_bytes())
            if isinstance(message, Begun):
                begun = message.count
            else:
                assert isinstance(message, Outputs)
                tokens += np.frombuffer(message.tokens, np.int32).tolist()
                assert begun >= tokens[-1]
        assert tokens == list(range(1, 201))


def test_what_waits_for_a_process_that_stands_still_is_only_its_own():
    """A stopped process held all that the others got, for as long as it stood."""
    here, there = multiprocessing.Pipe()
    with here, there:
        stuck, other = (Outbox(there, lambda error: None) for _ in range(2))
        limits = Limits(vocab_size=97, max_model_len=64, block_size=4, usable_blocks=99)
        request = Request.create("a", [5, 6], SamplingParams(), 0, limits)
        own, others = (HostedSample(request, 0, outbox=box, number=0) for box in (stuck, other))
        sent, streamed = 0, [own] * 500
        while stuck._queue.qsize() < 900:  # nobody reads: the connection is full, and the thread waits
            stuck.put(Committed([], streamed, np.full(500, sent, np.int32)))
            sent += 1
        for _ in range(5000):
            stuck.put(Committed([], [others], np.zeros(1, np.int32)))
        assert stuck._queue.qsize() <= 1000
        stuck.put(Committed([], [own], np.array([96], np.int32)))
        got: list[int] = []
        while not got or got[-1] != 96:
            message = decode_from_engine(here.recv_bytes())
            assert set(np.frombuffer(message.streamed, np.int64).tolist()) == {0}
            got += np.frombuffer(message.tokens, np.int32).tolist()
        assert got == [token for token in range(sent) for _ in range(500)] + [96]
        other.close()
        stuck.close()
