"""The service: what the endpoints share. It admits calls, counts them, and ends them at shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..errors import EngineClosed, EngineDead, InvalidConfig, QueueFull
from ..openai.call import Call
from ..openai.errors import ApiError
from ..openai.fields import check_model
from ..prompts import Prompt
from ..sampling_params import SamplingParams
from ..text.handle import Handle
from ..text.tokenizer import Tokenizer
from .attached_engine import AttachedEngine
from .board import Board
from .metrics import Metrics
from .settings import ServerSettings
from .wire import Resume

if TYPE_CHECKING:
    from .tracing import Tracing

T = TypeVar("T")

_LONG_TEXT = 1 << 14
"""Characters from which on a text is encoded in a thread, so that other clients do not wait for it."""

_MESSAGE_COST = 100
"""A message takes a chat template about as long as so many characters take the tokenizer."""


class Seat(Protocol):
    """Where the engine is that is in use: that of a supervisor, or what an API process was given."""

    @property
    def engine(self) -> AttachedEngine | None: ...


class Service:
    """Admission and the life of calls. Used in one asyncio loop.

    Args:
        seat: has the engine.
        board: that of all API processes of the server; None if this is the only one.
    """

    def __init__(self, seat: Seat, settings: ServerSettings, board: Board | None = None) -> None:
        self.settings = settings
        self.metrics = Metrics(settings.model_name, settings.gpu_price, board)
        self._tracing = _start_tracing(settings)
        self._seat = seat
        self._calls: dict[Call, list[Callable[[Sequence[Handle]], None]]] = {}
        self._draining = False
        self._over = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def alive(self) -> bool:
        """Whether there is an engine."""
        return self.running_engine is not None

    @property
    def running_engine(self) -> AttachedEngine | None:
        """The engine, if there is one, for whoever looks and asks for no work."""
        return self._seat.engine

    @property
    def ready(self) -> bool:
        """Whether requests are admitted."""
        return self.alive and not self._draining

    @property
    def draining(self) -> bool:
        """Whether the server is shutting down."""
        return self._draining

    @property
    def engine(self) -> AttachedEngine:
        """The engine.

        Raises:
            ApiError: there is none, or no more work is taken.
        """
        engine = self._seat.engine
        if self._draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")
        if engine is None:
            raise ApiError(503, "the engine is not running", code="engine_stopped", headers={"Retry-After": "5"})
        return engine

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
            ApiError: it has none.
        """
        if (tokenizer := self.engine.tokenizer) is None:
            raise ApiError(400, "this model has no tokenizer: only token ids can be given", code="no_tokenizer")
        return tokenizer

    def check_model(self, name: str | None) -> None:
        """Raise ApiError unless `name` is that of the model; None is."""
        check_model(name, self.settings.model_name)

    async def encode(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        encode = self.tokenizer.encode
        if len(text) < _LONG_TEXT:
            return encode(text, special_tokens=special_tokens)
        return await asyncio.to_thread(encode, text, special_tokens=special_tokens)

    async def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the token ids of a chat, ready for the assistant's answer."""
        encode = self.tokenizer.apply_chat_template
        if sum(_MESSAGE_COST + len(message["content"]) for message in messages) < _LONG_TEXT:
            return encode(messages)
        return await asyncio.to_thread(encode, messages)

    def check_samples(self, prompts: int, n: int) -> None:
        """Raise ApiError if a request asks for more samples than one may."""
        count, most = prompts * n, self.settings.max_samples
        if count > most:
            param = "n" if prompts == 1 else "prompt"
            message = f"{param}: {count} samples are asked for, the most allowed is {most}"
            raise ApiError(400, message, param=param, code="too_many_samples")

    async def start(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Call:
        """Start a call; whoever gets it must `end` it.

        Args:
            prompts: one or more. params: as many, all with the same number of samples.

        Raises:
            ApiError: the queue is full, or the server is shutting down.
            InvalidRequest: a prompt or a parameter was refused; nothing was started.
        """
        engine = self.engine
        self.check_samples(len(prompts), params[0].best_of or params[0].n)
        try:
            if any(own.structured is not None for own in params):  # compiling a grammar may take a while
                handles = await asyncio.to_thread(engine.start, prompts, params)
            else:
                handles = engine.start(prompts, params)
        except QueueFull as error:
            raise ApiError(429, "the queue is full", code="queue_full", headers={"Retry-After": "1"}) from error
        except (EngineDead, EngineClosed) as error:
            raise ApiError(503, "the engine is not running", code="engine_stopped") from error
        pace = self.metrics.begin(handles)
        call = Call(handles, self.settings.request_timeout, self._on_end, pace.came)
        self._calls[call] = [partial(self.metrics.end, pace=pace)]
        if self._tracing is not None:
            self._calls[call].append(self._tracing.begin())
        self._idle.clear()
        if self._draining:
            self._cut_short(call)
        return call

    async def outcome(self, future: Future[T]) -> T:
        """Wait for what the engine says.

        Raises:
            ApiError: the server has shut down before that.
        """
        said, over = asyncio.wrap_future(future), asyncio.ensure_future(self._over.wait())
        try:
            await asyncio.wait((said, over), return_when=asyncio.FIRST_COMPLETED)
            if said.done():
                return said.result()
            raise _shut_down()
        finally:
            said.cancel()
            over.cancel()

    async def drain(self) -> None:
        """Admit nothing more; return when all calls are over, those that take too long by being cancelled.

        A pause of the engine ends, so that they can end. One that sleeps is not woken: nothing waits for it.
        """
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self.settings.shutdown_timeout):
                if await self._resumed():
                    await self._idle.wait()
        for call in tuple(self._calls):
            self._cut_short(call)
        self._over.set()

    async def close(self) -> None:
        """Send what is left of the traces; all calls are over."""
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _resumed(self) -> bool:
        """End a pause of the engine; return whether it goes on, which it does not in its sleep."""
        engine = self._seat.engine
        if engine is None:
            return True  # what its end leaves of the calls is not much
        try:
            await asyncio.wrap_future(engine.tasks.begin(Resume()))
            return not (await asyncio.wrap_future(engine.ask_stats()))["asleep"]
        except (EngineDead, EngineClosed):
            return True

    def _cut_short(self, call: Call) -> None:
        call.cancel(_shut_down())

    def _on_end(self, call: Call) -> None:
        for take_note in self._calls.pop(call):
            take_note(call.handles)
        if not self._calls:
            self._idle.set()


def _shut_down() -> ApiError:
    return ApiError(503, "the server shut down before the request had ended", code="shutting_down")


def _start_tracing(settings: ServerSettings) -> Tracing | None:
    if settings.otlp_traces_endpoint is None:
        return None
    try:
        from .tracing import start_tracing
    except ModuleNotFoundError as error:
        raise InvalidConfig(
            f"otlp_traces_endpoint needs the package {error.name}: pip install 'twostroke[tracing]'"
        ) from error
    return start_tracing(settings.otlp_traces_endpoint, settings.model_name)
