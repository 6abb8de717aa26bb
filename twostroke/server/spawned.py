"""Processes of a server that end only when the process that started them wants it, or is gone."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def spawn(target: Callable[..., None], *arguments: Any, name: str) -> BaseProcess:
    """Start a process in which the signals of a terminal or a service do nothing: this one acts on them.

    They are sent to all processes of a group at once. Those that come meanwhile reach this process a little later.

    Args:
        target: what the process runs, with `arguments`.
    """
    # NOTE: spawn, since neither threads nor CUDA survive a fork.
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_run, args=(target, arguments), name=name)
    resource_tracker.ensure_running()  # by the first spawn otherwise, which then would unblock these signals again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # inherited, and so until `_run` ignores them
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _run(target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    for name in _SIGNALS:
        signal.signal(name, signal.SIG_IGN)
    target(*arguments)
