"""Maintenance: what is done to an engine between two steps, while its requests live on."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import torch

from .build import Parts
from .calls import Calls, answer
from .device.put_away import PutAway
from .device.streams import Event
from .errors import EngineAsleep, InvalidRequest, shown
from .model.weight_source import Weights, check_weights, read_weights
from .scheduler.scheduler import Scheduler


class Maintenance:
    """Pauses, sleep, and new weights. Every call is safe from any thread, and ends when the engine ends.

    What reads or writes weights and cache is done on the loop's thread or queued on the compute stream, so it lies
    between two steps. Sleeping, waking and new weights wait for one another.
    """

    def __init__(self, parts: Parts, calls: Calls) -> None:
        self._parts = parts
        self._calls = calls
        self._busy = threading.Lock()

    @property
    def paused(self) -> bool:
        return self._parts.scheduler.gate.holds("pause")

    @property
    def asleep(self) -> bool:
        return self._parts.away is not None

    def pause(self, mode: str) -> None:
        if mode not in ("keep", "drain"):
            raise InvalidRequest(f"mode={shown(mode)} must be 'keep' or 'drain'")
        self._hold("pause", drain=mode == "drain")

    def resume(self) -> None:
        self._release("pause")

    def sleep(self) -> None:
        with self._busy:
            if not self.asleep:
                self._hold("sleep", drain=False)
                self._calls.call(self._put_away)

    def wake(self) -> None:
        with self._busy:
            self._calls.call(self._bring_back)

    def update_weights(self, weights: Weights, *, recompute: bool, partial: bool) -> int:
        with self._busy:
            if self.asleep:
                raise EngineAsleep("the engine sleeps: its weights can be replaced once it is awake")
            model = self._parts.loaded.model
            tensors = read_weights(weights)
            check_weights(tensors, model.weight_shapes(), model.spare_names(tensors), partial=partial)
            staged = {name: self._stage(tensor) for name, tensor in tensors.items()}
            version, written = self._calls.call(lambda *call: self._write(staged, recompute, *call))
            written.synchronize()  # until then the tensors must stay as they are
            return int(version)

    def _hold(self, name: str, *, drain: bool) -> None:
        def hold(scheduler: Scheduler, future: Future[Any]) -> None:
            if drain and self.asleep and scheduler.has_begun_some:
                raise EngineAsleep("the engine sleeps: what has begun can be drained once it is awake")
            scheduler.hold(name, drain=drain, on_quiet=lambda: answer(future))

        self._calls.call(hold)

    def _release(self, name: str) -> None:
        def release(scheduler: Scheduler, future: Future[Any]) -> None:
            scheduler.release(name)
            answer(future)

        self._calls.call(release)

    def _put_away(self, scheduler: Scheduler, future: Future[Any]) -> None:
        parts = self._parts
        try:
            away = PutAway(parts.device, parts.loaded.model.tensors())
        except BaseException:
            scheduler.release("sleep")
            raise
        scheduler.empty_cache()
        parts.runner.forget_graphs()
        if parts.runner.transfers is not None:
            parts.runner.transfers.finish()
        parts.forward.attention.free()
        away.free()
        parts.away = away
        answer(future)

    def _bring_back(self, scheduler: Scheduler, future: Future[Any]) -> None:
        parts = self._parts
        if parts.away is not None:
            parts.away.bring_back(parts.forward.attention)
            parts.away = None
            parts.capture()
        scheduler.release("sleep")  # also of a call to sleep that was interrupted
        answer(future)

    def _stage(self, tensor: torch.Tensor) -> torch.Tensor:
        """Let `tensor` be what the compute stream can read at once."""
        if self._parts.device.torch_device.type != "cuda":
            return tensor
        if tensor.device.type == "cuda":
            torch.cuda.current_stream(tensor.device).synchronize()
            return tensor
        return tensor.pin_memory()

    def _write(
        self, tensors: dict[str, torch.Tensor], recompute: bool, scheduler: Scheduler, future: Future[Any]
    ) -> None:
        parts, written = self._parts, self._parts.device.event()
        parts.runner.write_weights(lambda: parts.loaded.model.write_weights(tensors))
        parts.device.compute.record(written)
        result: tuple[int, Event] = scheduler.change_weights(recompute=recompute), written
        answer(future, result)
