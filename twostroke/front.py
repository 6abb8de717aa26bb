"""What callers hold of an engine, wherever its loop runs: it makes requests, starts them, and waits for them."""

from __future__ import annotations

import contextlib
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from .constraints.constraints import Constraints
from .errors import InvalidRequest, QueueFull, TwostrokeError, counted, each_of, shown
from .limits import Limits
from .progress import Progress
from .prompts import Prompt, as_prompts, check_prompts, encode_prompts
from .request import Request, Sample
from .sampling_params import SEED_BITS, SamplingParams
from .terms import KnownTerms, Terms
from .text.delivery import Delivery
from .text.handle import Handle
from .text.output import RequestOutput
from .text.tokenizer import Tokenizer

DEFAULT_PARAMS = SamplingParams()
"""Those of requests for which none are given."""


class Commands(Protocol):
    """How a front reaches its loop. Every call returns at once, and raises EngineDead or EngineClosed after its end."""

    @property
    def begun(self) -> int:
        """Of all samples that were submitted, how many wait no longer to begin; may lag behind."""

    def submit(self, samples: Sequence[Sample]) -> None:
        """Queue samples, all between the same two steps. Those that delivery follows are streamed from the start.

        All samples of a request are among them, one after the other.
        """

    def cancel(self, sample: Sample) -> None: ...
    def stream(self, sample: Sample) -> None: ...
    def finish(self, sample: Sample, count: int) -> None: ...


class Front:
    """Requests from prompts, and their outputs back. Safe to use from any thread of the process that made it.

    Args:
        tokenizer: None for a model without one.
        limits: what requests are checked against.
        seed: of the generator that gives seeds to unseeded requests; None: they are unpredictable.
        delivery: where outputs arrive.
        commands: where requests go.
        constraints: what grammars and thinking budgets are checked with.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: Limits,
        seed: int | None,
        delivery: Delivery,
        commands: Commands,
        constraints: Constraints,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self._seeds = random.Random(seed)
        self._names = random.Random()
        self._known_terms = KnownTerms(partial(_make_terms, tokenizer, limits, constraints))
        self._delivery = delivery
        self._commands = commands
        # NOTE: the handles' alone, or the front would not be gone, with all its memory, when its last user is.
        self._owner: Callable[[], _Owner | None] = lambda: None
        self._submitted = 0
        self._counting = threading.Lock()

    @property
    def max_model_len(self) -> int:
        """Most tokens of a sample, prompt and output."""
        return self.limits.max_model_len

    def generate(
        self,
        prompts: Prompt | Iterable[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts together; return their outputs in the order of the prompts.

        Args:
            prompts: strings, lists of token ids, or lists of chat messages ({"role": ..., "content": ...}); or one.
            params: for all prompts, or one for each.
            progress: show one progress bar on stderr; None: if stderr is a terminal.

        Raises:
            InvalidRequest: a prompt or a parameter was refused; nothing was started.
            QueueFull: they would not all find room in the queue; nothing was started.
            EngineDead, EngineClosed: the engine ended before the requests.
        """
        listed = as_prompts(prompts)
        handles = self._make_handles(listed, _params_for(params, len(listed)))
        # NOTE: before the start: while this thread listens to all of them, the loop's would wait for the interpreter.
        listener = Progress(handles, progress)
        outputs: dict[int, RequestOutput] = {}
        running = dict(enumerate(handles))
        try:
            self._start(handles)
            del handles
            with listener as bar:
                for ended in bar.wait():
                    # NOTE: an output is made, and all else of the request let go of, while others run. What it raises
                    # is raised below.
                    with contextlib.suppress(TwostrokeError):
                        outputs[ended.place] = ended.result()
                        del running[ended.place]
                    time.sleep(0)  # lets the loop's thread have the interpreter, if it waits for that
            for failed in running.values():
                failed.result()
            return [outputs[place] for place in range(len(listed))]
        finally:
            for handle in running.values():
                handle.cancel()

    def submit(self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None) -> Handle:
        """Start a request and return its handle at once.

        Args:
            prompt: a string, a list of token ids, or a list of chat messages.
            request_id: must differ from those of all live requests; None: the engine makes one.

        Raises:
            InvalidRequest: the prompt, a parameter or the id was refused.
            QueueFull: `max_waiting` requests wait already.
            EngineDead, EngineClosed: the engine has ended.
        """
        handle = self._make_handle(prompt, params, request_id)
        self._start([handle])
        return handle

    def start(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Handle]:
        """Start requests, all between the same two steps; return their handles at once.

        Raises:
            InvalidRequest: a prompt or a parameter was refused; nothing was started.
            EngineDead, EngineClosed: the engine has ended.
        """
        handles = self._make_handles(prompts, _params_for(params, len(prompts)))
        self._start(handles)
        return handles

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, request_id: str | None = None) -> Handle:
        """Start a request to iterate over, with `for` or `async for`; see `submit` for arguments and errors."""
        handle = self._make_handle(prompt, params, request_id)
        handle.require_streamable()
        self._start([handle])
        handle.begin_stream()
        return handle

    def _make_handle(self, prompt: Prompt, params: SamplingParams | None, request_id: str | None) -> Handle:
        if request_id is not None and (not isinstance(request_id, str) or not request_id):
            raise InvalidRequest(f"request_id={shown(request_id)} must be a string that is not empty")
        (handle,) = self._make_handles([prompt], [DEFAULT_PARAMS if params is None else params], request_id)
        return handle

    def _make_handles(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], request_id: str | None = None
    ) -> list[Handle]:
        """Check requests, and what they have in common only once; `request_id` is for a single one."""
        each = self._terms_of(params)
        ids = check_prompts(encode_prompts(prompts, self.tokenizer), self.limits.vocab_size)
        if (owner := self._owner()) is None:
            owner = _Owner(self)
            self._owner = weakref.ref(owner)

        def assemble(place: int) -> Handle:
            return self._assemble(request_id, ids[place], each[id(params[place])], owner, place)

        return each_of("prompts", range(len(ids)), assemble)

    def _terms_of(self, params: Sequence[SamplingParams]) -> dict[int, Terms]:
        """The terms of each object among `params`, by its id."""
        found: dict[int, Terms] = {}
        for place, own in enumerate(params):
            if id(own) in found:
                continue
            try:
                found[id(own)] = self._known_terms.of(own)
            except InvalidRequest as error:
                if all(other is own for other in params):
                    raise
                raise InvalidRequest(f"{error}, in params[{place}]") from error
        return found

    def _assemble(self, request_id: str | None, ids: np.ndarray, terms: Terms, owner: _Owner, place: int) -> Handle:
        """The handle of a request whose parts are checked."""
        name = f"request-{self._names.getrandbits(128):032x}" if request_id is None else request_id
        request = Request.of(name, ids, terms, self._seeds.getrandbits(SEED_BITS), self.limits)
        return Handle([Sample(request, index) for index in range(terms.samples)], owner, place)

    def _start(self, handles: Sequence[Handle]) -> None:
        """Hand requests to the loop, all between the same two steps."""
        samples = [sample for handle in handles for sample in handle.samples]
        self._count_in(len(samples))
        try:
            self._delivery.register(handles)
            self._commands.submit(samples)
        except BaseException:
            self._count_in(-len(samples))
            for handle in handles:
                self._delivery.forget(handle)
            raise

    def _count_in(self, samples: int, elsewhere: int = 0) -> None:
        """Count samples that are about to be submitted; a negative number of them, that were not after all.

        `elsewhere`: how many wait that were submitted by others.

        Raises:
            QueueFull: more would wait than may.
        """
        with self._counting:
            waiting, limit = elsewhere + self._submitted - self._commands.begun, self.limits.max_waiting
            if limit is not None and samples > 0 and waiting + samples > limit:
                raise QueueFull(f"max_waiting={limit}: {waiting} wait to begin, there is no room for {samples} more")
            self._submitted += samples


class _Owner:
    """What handles ask of the engine, which they keep alive until they have their outcome."""

    def __init__(self, front: Front) -> None:
        self._front = front

    def cancel(self, sample: Sample) -> None:
        self._leave(self._front._commands.cancel, sample)

    def stream(self, sample: Sample) -> None:
        self._leave(self._front._commands.stream, sample)

    def finish(self, sample: Sample, count: int) -> None:
        self._leave(self._front._commands.finish, sample, count)

    def _leave(self, command: Callable[..., None], *arguments: object) -> None:
        """Leave a command. After the loop's end every request has its outcome, so nothing is left to do."""
        with contextlib.suppress(TwostrokeError):
            command(*arguments)


def _make_terms(tokenizer: Tokenizer | None, limits: Limits, constraints: Constraints, params: SamplingParams) -> Terms:
    encode = partial(tokenizer.encode, special_tokens=False) if tokenizer is not None else None
    terms = Terms.create(params, limits, encode)
    if terms.stops and tokenizer is None:
        raise InvalidRequest(f"stop={shown(params.stop)}: this model has no tokenizer, use stop_token_ids")
    constraints.check(terms)
    return terms


def _params_for(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [DEFAULT_PARAMS if params is None else params] * count
    if not isinstance(params, Sequence) or isinstance(params, str | bytes):
        raise InvalidRequest(f"params={shown(params)} must be a SamplingParams or a list of them")
    if len(params) != count:
        raise InvalidRequest(f"params has {counted(len(params), 'entry', 'entries')} for {counted(count, 'prompt')}")
    return [DEFAULT_PARAMS if own is None else own for own in params]
