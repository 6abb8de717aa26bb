"""What API processes and the engine process say to each other: token ids, never text.

An engine process has a connection to the process that started it, and one to each API process. Messages are MessagePack
arrays. Each process encodes and decodes with the types below, so a field that the other does not know, or a value of a
wrong type, is an error at once.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..device.step_times import StepTimes
from ..limits import Limits
from ..request import FinishReason
from ..sampling_params import SamplingParams


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of all messages."""


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One request to run.

    Attributes:
        number: what both ends of the connection call its first sample; the others have the numbers after that. No user
            ever sees or chooses them, and those of another connection are no concern of theirs.
        prompt: int32 token ids.
        params: as the user gave them, with the seed, max_tokens and min_tokens that hold, and bad words as token ids.
    """

    number: int
    prompt: bytes
    params: SamplingParams


class Submit(Message, frozen=True):
    """Run these, all from the same step on."""

    entries: list[Entry]


class Cancel(Message, frozen=True):
    number: int


class Stream(Message, frozen=True):
    """Send the tokens of a sample as they come, those that have come first."""

    number: int


class Finish(Message, frozen=True):
    """A stop string was found: end the sample with its first `count` output tokens."""

    number: int
    count: int


class AskStats(Message, frozen=True):
    """Send one `Stats`. Questions, of whatever kind, are answered in their order."""


class AskLook(Message, frozen=True):
    """Send one `Look`, and keep the times of some steps for the next."""


class Close(Message, frozen=True):
    """End every sample, send what is left, and end the connection; from its parent, also the process."""


class Attach(Message, frozen=True):
    """Here comes, behind this message, the other end of an API process's connection."""


class Ready(Message, frozen=True):
    """The engine has started.

    Attributes:
        directory: the model's files; None for a preset.
        max_rows: samples that can run at once.
        pid: of the engine process.
        born: when it had started, in seconds of `time.perf_counter`; no other engine of the machine has the same.
    """

    limits: Limits
    directory: str | None
    max_rows: int
    pid: int
    born: float


class Refused(Message, frozen=True):
    """The process could not start. `kind` is the name of the error's class."""

    kind: str
    text: str


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """How a sample ended.

    Attributes:
        tokens: all its output token ids, int32.
        admitted, first_token, finished: see `Timings`; the processes of one machine share the clock.
    """

    number: int
    tokens: bytes
    reason: FinishReason
    error: str | None
    cached_tokens: int
    preemptions: int
    versions: list[tuple[int, int]]
    admitted: float | None
    first_token: float | None
    finished: float | None


class Outputs(Message, frozen=True):
    """What one or more steps gave.

    Attributes:
        streamed: for each new token of a sample that is streamed, the sample's number, int64.
        tokens: the token ids, int32, as many.
        records: `LOGPROB_RECORD`, as many, or none.
        scored, scores: for each scored prompt position the sample's number, int64, and its `LOGPROB_RECORD`.
    """

    streamed: bytes
    tokens: bytes
    records: bytes
    scored: bytes
    scores: bytes
    ended: list[Ended]


class Begun(Message, frozen=True):
    """So many samples of this connection wait no longer to begin, in all."""

    count: int


class Unfit(Message, frozen=True):
    """The engine does not take a request that the API process admitted; its first sample is `number`."""

    number: int
    text: str


class Stats(Message, frozen=True):
    """`EngineStats` as a dict: its class comes with the engine, which the API process does not import."""

    values: dict[str, Any]


class Look(Message, frozen=True):
    """What an engine does now: `EngineStats` as a dict, and the times of the steps since the last look, or some."""

    values: dict[str, Any]
    steps: list[StepTimes]


class Died(Message, frozen=True):
    """The engine failed; nothing more will come."""

    text: str


class Pause(Message, frozen=True):
    """See `Engine.pause`; so for the other tasks."""

    mode: str


class Resume(Message, frozen=True):
    pass


class Sleep(Message, frozen=True):
    pass


class Wake(Message, frozen=True):
    pass


class ResetPrefixCache(Message, frozen=True):
    pass


class UpdateWeights(Message, frozen=True):
    """`weights`: a path as the engine process knows it."""

    weights: str
    recompute: bool
    partial: bool


Task = Pause | Resume | Sleep | Wake | ResetPrefixCache | UpdateWeights


class Maintain(Message, frozen=True):
    """Do this to the engine, and say when it is done. `number`: what both ends of the connection call it."""

    number: int
    task: Task


class Done(Message, frozen=True):
    """A task is done; with it, or now, the weights have this version."""

    number: int
    weight_version: int


class Failed(Message, frozen=True):
    """A task was not done; the engine is as it was. `kind` is the name of the error's class."""

    number: int
    kind: str
    text: str


ToEngine = Submit | Cancel | Stream | Finish | AskStats | AskLook | Maintain | Close
FromEngine = Outputs | Begun | Unfit | Stats | Look | Done | Failed | Died
"""Between an API process and the engine."""

ToChild = Attach | Close
FromChild = Ready | Refused | Died
"""Between an engine process and the one that started it."""


class NewEngine(Message, frozen=True):
    """There is another engine; behind this message comes the end of a connection to it."""

    ready: Ready


class Drain(Message, frozen=True):
    """Admit nothing more; when all requests have ended, exit."""


class Listening(Message, frozen=True):
    """The API process answers."""


ToApi = NewEngine | Drain
FromApi = Listening | Refused
"""Between an API process and the one that started it."""

encode = msgspec.msgpack.Encoder().encode
decode_for_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_for_child = msgspec.msgpack.Decoder(ToChild).decode
decode_from_child = msgspec.msgpack.Decoder(FromChild).decode
decode_for_api = msgspec.msgpack.Decoder(ToApi).decode
decode_from_api = msgspec.msgpack.Decoder(FromApi).decode
