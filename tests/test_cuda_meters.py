"""CUDA's meters, over events that are told their times."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from twostroke.device.cuda import CudaCopyMeter, CudaMeter


class FakeEvent:
    """A timing event of a device whose clock, in seconds, is `now`."""

    now = 0.0
    made = 0

    def __init__(self, **options):
        assert options["enable_timing"]
        FakeEvent.made += 1

    def record(self, stream=None):
        self.at = FakeEvent.now

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return float(np.float32(1e3 * (end.at - self.at)))


@pytest.fixture
def fake_events(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    FakeEvent.made = 0
    return FakeEvent


def measure(meter, begin, end):
    FakeEvent.now = begin
    meter.begin()
    FakeEvent.now = end
    meter.end()


def test_cuda_steps_are_chained_to_the_clock_that_the_host_set(fake_events):
    fake_events.now = 100.0
    before = time.perf_counter()
    meter = CudaMeter(None)
    zero = meter.known[1]
    assert before <= zero <= time.perf_counter()
    measure(meter, 101.0, 102.0)
    measure(meter, 102.5, 104.0)  # both in flight before the first is read
    assert meter.read() == pytest.approx((zero + 1, zero + 2))
    assert meter.read() == pytest.approx((zero + 2.5, zero + 4))


def test_a_long_run_keeps_microseconds_and_its_events(fake_events):
    """CUDA's float32 milliseconds are 8 us apart after 70 s, and a meter that made new events would fill the memory."""
    fake_events.now = 0.0
    meter = CudaMeter(None)
    zero = meter.known[1]
    for step in range(70_000):
        measure(meter, step * 1e-3 + 1e-6, (step + 1) * 1e-3)
        began, ended = meter.read()
    assert ended - zero == pytest.approx(70.0, abs=2e-6)
    assert ended - began == pytest.approx(999e-6, abs=1e-9)
    assert fake_events.made <= 4


def test_cuda_copies_and_events_lie_on_the_clock_of_the_step_read_last(fake_events):
    fake_events.now = 50.0
    meter = CudaMeter(None)
    zero = meter.known[1]
    h2d, d2h = CudaCopyMeter(None, meter), CudaCopyMeter(None, meter)
    measure(h2d, 51.0, 51.25)
    arrived = SimpleNamespace(raw=FakeEvent(enable_timing=True))
    arrived.raw.record()
    measure(meter, 51.5, 52.0)
    measure(d2h, 52.5, 53.0)
    meter.read()
    assert meter.time_of(arrived) == pytest.approx(zero + 1.25)
    assert h2d.read() == pytest.approx((zero + 1, zero + 1.25))
    assert d2h.read() == pytest.approx((zero + 2.5, zero + 3))


def test_setting_the_clock_again_forgets_the_drift(fake_events):
    fake_events.now = 0.0
    meter = CudaMeter(None)
    fake_events.now = 500.0
    meter.set_clock()
    zero = meter.known[1]
    measure(meter, 501.0, 502.0)
    assert meter.read() == pytest.approx((zero + 1, zero + 2))
