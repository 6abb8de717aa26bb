"""A stage of Ray Data that answers lines with a pool of engines: `answer`."""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
from ray.data import ActorPoolStrategy, Dataset

from ..config import EngineConfig
from ..engine import Engine
from ..errors import EngineClosed, EngineDead, InvalidConfig, shown
from ..model.load import DEFAULT_MODEL
from ..openai.errors import ApiError
from .answered import Answered, Answers
from .batch_input import Line, custom_id
from .batch_request import RequestReader
from .batch_run import BatchRun

_log = logging.getLogger(__name__)

RETRIES = 10
"""How often a batch is answered anew because its engine was lost: a line that kills them all must come to an end."""

SCHEMA = pa.schema(
    {
        "line": pa.int64(),
        "text": pa.large_string(),
        "failed": pa.bool_(),
        "prompt_tokens": pa.int64(),
        "completion_tokens": pa.int64(),
        "engine": pa.string(),
        "active": pa.float64(),
    }
)
"""Columns of the answers; see `Answered`, and `answer` on the last two."""


def answer(
    dataset: Dataset,
    *,
    engines: int | tuple[int, int] = 1,
    gpus: float = 1.0,
    cpus: float = 1.0,
    batch_size: int = 64,
    batches: int = 8,
    model_name: str | None = None,
    duplicates: Mapping[int, int] | None = None,
    **engine: Any,
) -> Dataset:
    """Answer the lines of a dataset, as `twostroke batch` does; return a dataset of answers, in any order.

    Lines stream through: a batch is fetched when an engine is about to have room for it. An engine has several batches
    at a time, since one alone would leave it ever emptier until its longest request has ended. The batches of an engine
    that is lost, with its process or its machine, are answered by the one that Ray starts in its place.

    Args:
        dataset: column `text` (string or bytes): a line, of OpenAI's batch form or plain. Column `line`, if there is
            one: its number. Without it each line needs a `custom_id`, and they must differ.
        engines: how many, or at least and at most.
        gpus, cpus: that an engine takes. Every node must have a CPU more for the stages around it.
        batch_size: lines of a batch. batches: how many an engine answers at once; as many more
            wait there. Together they should be some times its `max_rows`.
        model_name: what lines call the model; None: the name that the engine gets.
        duplicates: numbers of lines that are refused, as their `custom_id` is that of the line whose number is given.
        engine: arguments of `Engine`. With `seed`, the seeds of lines without one follow from it and from their number,
            or from their `custom_id`: the same tokens whichever engine answers.

    Returns:
        Rows of `line`, `text` (a line of a batch's output), `failed`, `prompt_tokens`, `completion_tokens`; and of the
        `engine` that answered, a name that no other one has, and its `EngineStats.active` when the batch had ended.

    Raises:
        InvalidConfig: an argument is out of its range, or the dataset has no column `text`.
    """
    _check_engine(engine)
    for name, value in (("batch_size", batch_size), ("batches", batches)):
        if not isinstance(value, int) or value < 1:
            raise InvalidConfig(f"{name}={shown(value)} must be an integer >= 1")
    least, most = (engines, engines) if isinstance(engines, int) else engines
    pool = ActorPoolStrategy(
        min_size=least,
        max_size=most,
        initial_size=most,
        max_concurrent_calls_per_actor=batches,
        max_tasks_in_flight_per_actor=2 * batches,  # Ray adds engines when others have 1.75 times what they can run
        enable_true_multi_threading=True,
    )
    return dataset.repartition(target_num_rows_per_block=batch_size).map_batches(
        LineAnswerer,
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=pool,
        num_cpus=cpus,
        num_gpus=gpus,
        fn_constructor_kwargs={"engine": engine, "model_name": model_name, "duplicates": dict(duplicates or {})},
        max_restarts=-1,
        max_task_retries=RETRIES,
    )


def _check_engine(arguments: Mapping[str, Any]) -> None:
    """Raise InvalidConfig for what no engine takes; else each actor would, and Ray would start it again."""
    try:
        bound = inspect.signature(Engine).bind(**arguments)
    except TypeError as error:
        raise InvalidConfig(str(error)) from error
    bound.apply_defaults()
    EngineConfig(**bound.arguments).validate()


class LineAnswerer:
    """An engine in an actor. Called with batches, several at a time, each by a thread of its own.

    Args:
        engine, model_name, duplicates: see `answer`.
    """

    def __init__(self, engine: Mapping[str, Any], model_name: str | None, duplicates: dict[int, int]) -> None:
        self._engine = Engine(**engine)
        self._name = uuid.uuid4().hex
        name = model_name or os.fspath(engine.get("model", DEFAULT_MODEL))
        limits = self._engine.max_model_len
        self._reader = RequestReader(self._engine.tokenizer, name, limits, engine.get("seed"), duplicates)

    def __call__(self, batch: pa.Table) -> pa.Table:
        answers = _Collected(numbered="line" in batch.column_names)
        run = BatchRun(
            self._engine,
            self._engine.config.max_rows,
            answers.take(batch),
            self._reader,
            answers,
            lambda: None,
            lambda line, error: None,
        )
        try:
            run.run()
        except (EngineDead, EngineClosed):
            _log.exception("the engine died; so does its actor, and Ray starts another")
            os._exit(1)
        return answers.table(self._name, self._engine.stats().active)


class _Collected(Answers):
    """The answers of a batch, in memory.

    Args:
        numbered: whether the batch has numbers of lines; else they are made of the lines' ids.
    """

    def __init__(self, *, numbered: bool) -> None:
        self._numbered = numbered
        self._answered: list[Answered] = []

    def take(self, batch: pa.Table) -> Iterator[Line]:
        """Yield the lines of a batch that can be told apart; add an error for each other."""
        texts = [text if isinstance(text, bytes) else (text or "").encode() for text in batch["text"].to_pylist()]
        if self._numbered:
            yield from map(Line, batch["line"].to_pylist(), texts)
            return
        for text in texts:
            if (name := custom_id(Line(0, text))) == _NAMELESS:
                message = "custom_id is missing, and the dataset has no column line"
                self.add_error(0, name, ApiError(400, message, param="custom_id", code="missing_required_parameter"))
            else:
                yield Line(_number(name), text)

    def add(self, answered: Answered) -> None:
        self._answered.append(answered)

    def due_in(self) -> None:
        return None

    def flush_if_due(self) -> None:
        """Nothing is due."""

    def flush(self) -> None:
        """All is where it belongs."""

    def table(self, engine: str, active: float) -> pa.Table:
        common = {"engine": engine, "active": active}
        rows = [one._asdict() | {"text": one.text.decode()} | common for one in self._answered]
        return pa.Table.from_pylist(rows, SCHEMA)


_NAMELESS = custom_id(Line(0, b"{}"))


def _number(name: str) -> int:
    """A number that follows from an id, as that of a line."""
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
