"""Times what queueing a decode step costs the CPU, part by part, in microseconds: median over repetitions.

usage: python bench/queueing.py [model] [lanes]      (on a GPU; default: tiny 32)

Each part is called on an idle device, and the device has come to rest before the next call, so that no call waits for
room in a queue. "by context" does the same as the part above it with `torch.cuda.stream` and slices made anew. Prints
one JSON object.
"""

import json
import statistics
import sys
import time

import torch

from twostroke import Engine
from twostroke.device.dummies import dummy_plan
from twostroke.device.shapes import StepShape
from twostroke.plan import NO_FEATURES

REPETITIONS = 300


def microseconds(work):
    times = []
    for _ in range(REPETITIONS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        times.append(1e6 * (time.perf_counter() - began))
    return round(statistics.median(times), 2)


def by_context(stream, target, source, size):
    with torch.cuda.stream(stream.raw):
        target[:size].copy_(source[:size], non_blocking=True)


def parts_of(runner, slot, plan):
    device = runner.device
    runner.launch(plan, slot)
    runner.wait(plan, slot)
    shape = runner._shapes.fit(StepShape(plan.num_lanes, 0, plan.num_lanes, plan.num_lanes))

    def meter():
        device.meter.begin()
        device.meter.end()

    yield "h2d copy", lambda: device.h2d.run(slot.copy_in)
    yield "h2d copy by context", lambda: by_context(device.h2d, slot.device_input, slot.host_input, slot.words)
    yield "record h2d done", lambda: device.h2d.record(slot.h2d_done)
    yield "wait for h2d done", lambda: device.compute.wait(slot.h2d_done)
    yield "switch to the compute stream", lambda: device.compute.run(int)
    yield "meter: two events", meter
    yield "graph launch", lambda: runner._run(shape, slot)
    yield "record compute done", lambda: device.compute.record(slot.compute_done)
    yield "wait for compute done", lambda: device.d2h.wait(slot.compute_done)
    yield "d2h copy", lambda: device.d2h.run(slot.copy_out)
    yield "d2h copy by context", lambda: by_context(device.d2h, slot.host_output, slot.device_output, slot.outputs)
    yield "record d2h done", lambda: device.d2h.record(slot.d2h_done)


def whole_steps(runner, slot, plan):
    """Mean times by phase of steps launched and waited for, as the accounting has them."""
    runner.forget_activity()
    for _ in range(REPETITIONS):
        runner.launch(plan, slot)
        runner.wait(plan, slot)
    return {name: round(1e6 * seconds / REPETITIONS, 2) for name, seconds in runner.activity.cpu.items()}


def main(model="tiny", lanes="32"):
    lanes = int(lanes)
    with Engine(model, device="cuda", max_rows=lanes, num_blocks=64, max_model_len=256, seed=0) as engine:
        parts = engine._parts
        runner, slot = parts.runner, parts.slots[0]
        with torch.inference_mode(), runner.device.current():
            plan = dummy_plan(lanes, lanes, tokens=0, longest=1, features=NO_FEATURES)  # lanes that belong to nobody
            whole = whole_steps(runner, slot, plan)
            found = {name: microseconds(work) for name, work in parts_of(runner, slot, plan)}
        name = torch.cuda.get_device_name()
    found["sum"] = round(sum(value for key, value in found.items() if "context" not in key), 2)
    print(json.dumps({"gpu": name, "model": model, "lanes": lanes, "parts_us": found, "step_us": whole}, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
