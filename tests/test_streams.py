"""Streams and events on the CPU mean what they mean in CUDA."""

import threading
import time

import pytest

from twostroke import Engine, EngineDead
from twostroke.device.cpu import CpuDevice


@pytest.fixture
def device():
    device = CpuDevice(strict=True)
    yield device
    device.close()


def test_work_on_one_stream_runs_in_order(device):
    seen = []
    for i in range(100):
        device.compute.run(lambda i=i: seen.append(i))
    done = device.event()
    device.compute.record(done)
    done.synchronize()
    assert seen == list(range(100))


def test_run_returns_before_the_work_is_done(device):
    gate, done = threading.Event(), device.event()
    device.compute.run(gate.wait)
    device.compute.record(done)
    gate.set()  # would never be reached if run() waited
    done.synchronize()


def test_a_stream_that_waits_holds_back_its_later_work_only(device):
    gate, copied, other = threading.Event(), device.event(), device.event()
    seen = []
    device.h2d.run(gate.wait)
    device.h2d.run(lambda: seen.append("copy"))
    device.h2d.record(copied)
    device.compute.run(lambda: seen.append("before"))
    device.compute.record(other)
    device.compute.wait(copied)
    device.compute.run(lambda: seen.append("after"))
    other.synchronize()
    assert seen == ["before"]
    gate.set()
    end = device.event()
    device.compute.record(end)
    end.synchronize()
    assert seen == ["before", "copy", "after"]


def test_wait_binds_to_the_generation_recorded_when_it_was_called(device):
    event, passed = device.event(), device.event()
    gate = threading.Event()
    device.h2d.record(event)
    device.compute.wait(event)  # generation 1: done soon
    device.compute.record(passed)
    device.h2d.run(gate.wait)
    device.h2d.record(event)  # generation 2: held back by the gate
    passed.synchronize()
    late = device.event()
    device.d2h.wait(event)  # generation 2
    device.d2h.record(late)
    time.sleep(0.02)
    assert late._done == 0
    gate.set()
    late.synchronize()


def test_waiting_for_an_event_never_recorded_is_an_error_in_strict_mode(device):
    event = device.event()
    with pytest.raises(RuntimeError, match="never recorded"):
        device.compute.wait(event)
    with pytest.raises(RuntimeError, match="never recorded"):
        event.synchronize()


def test_waiting_for_an_event_never_recorded_returns_at_once_otherwise():
    device = CpuDevice()
    device.event().synchronize()
    device.close()


@pytest.mark.parametrize("error", [ValueError("boom"), SystemExit(1), KeyboardInterrupt()])
def test_a_failure_on_any_stream_reaches_every_waiter(device, error):
    """A dead worker, whatever killed it, must not leave anybody waiting (G10)."""

    def die():
        raise error

    copied, computed, ready = device.event(), device.event(), threading.Event()
    device.h2d.run(ready.wait)
    device.h2d.run(die)
    device.h2d.record(copied)
    device.compute.wait(copied)
    device.compute.record(computed)
    seen = []

    def wait():
        try:
            computed.synchronize()
        except BaseException as raised:
            seen.append(raised)

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    ready.set()
    for waiter in waiters:
        waiter.join(10)
    assert seen == [error] * 3
    with pytest.raises(type(error)):
        computed.synchronize()


def test_no_work_runs_after_a_failure(device):
    seen, done = [], device.event()
    device.compute.run(lambda: 1 / 0)
    device.compute.run(lambda: seen.append(1))
    device.compute.record(done)
    with pytest.raises(ZeroDivisionError):
        done.synchronize()
    device.close()
    assert seen == []


def test_meter_reports_when_each_step_began_and_ended(device):
    done, start = device.event(), time.perf_counter()
    for _ in range(2):
        device.compute.run(device.meter.begin)
        device.compute.run(lambda: time.sleep(0.02))
        device.compute.run(device.meter.end)
        device.compute.run(lambda: time.sleep(0.01))
    device.compute.record(done)
    done.synchronize()
    first, second = device.meter.read(), device.meter.read()
    assert first[0] >= start
    assert first[1] - first[0] >= 0.02
    assert second[0] - first[1] >= 0.01
    assert second[1] - second[0] >= 0.02
    assert second[1] <= time.perf_counter()


def test_work_for_a_closed_stream_is_an_error_and_no_wait_for_ever(device):
    event = device.event()
    device.close()
    for queue in (lambda: device.compute.run(print), lambda: device.compute.record(event)):
        with pytest.raises(RuntimeError, match="closed"):
            queue()
    with Engine("tiny", device=device) as engine, pytest.raises(EngineDead, match="closed"):
        engine.generate([[1, 2, 3]])
