"""Counting the calls that Python makes."""

import gc
import sys
from collections.abc import Callable


def count_calls(work: Callable[[], object]) -> int:
    """Run `work`, and return how many functions were called in it, builtins among them.

    The garbage collector rests meanwhile, as callbacks that others gave it would be counted whenever it runs.
    """
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls
