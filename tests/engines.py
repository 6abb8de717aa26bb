"""Engines for tests: every behaviour is tested under the same modes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

from delays import DelayedDevice, PoisoningRunner

from twostroke import Engine
from twostroke.scheduler.scheduler import Scheduler

MODES = ["sync", "async", "async3", "delayed"]
"""The loops, three slots, and the asynchronous loop with random delays on all streams, poisoned buffers, and the
scheduler's invariants checked after every plan and commit."""


@contextmanager
def running(mode: str, model: Any = "tiny", *, seed: int = 0, **options: Any) -> Iterator[Engine]:
    """An engine under a mode; closed at the end."""
    loop = "sync" if mode == "sync" else "async"
    slots = 3 if mode == "async3" else 2
    options = {"device": "cpu", "seed": seed, "slots": slots, "max_rows": 8, **options}
    if mode != "delayed":
        with Engine(model, loop=loop, **options) as engine:
            yield engine
        return
    options["device"] = DelayedDevice(seed=seed)
    careful = partial(Scheduler, debug=True)
    with mock.patch("twostroke.build.Runner", PoisoningRunner), mock.patch("twostroke.build.Scheduler", careful):
        engine = Engine(model, loop=loop, **options)
    with engine:
        yield engine
