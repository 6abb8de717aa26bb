"""A batch as a whole: from its arguments to a complete output."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from ..engine import Engine
from ..errors import BatchStopped, EngineDead, InvalidConfig, InvalidRequest
from ..model.load import DEFAULT_MODEL, max_positions, model_files
from ..openai.errors import ApiError
from ..text.tokenizer import find_tokenizer
from .apart import require_apart
from .batch_input import BatchInput, Shard, Survey
from .batch_output import BatchOutput, is_stream, journal_of
from .batch_progress import BatchProgress
from .batch_request import RequestReader
from .batch_run import BatchRun
from .estimate import Estimate, estimate
from .identity import identity
from .journal import Totals
from .stdin_copy import stdin_copied

if TYPE_CHECKING:
    from .ray_run import RayRun

OnError = Callable[[int, ApiError], None]
"""Called with the number of a line that failed, and why."""


@dataclass(frozen=True)
class Outcome:
    """A batch that is complete.

    Attributes:
        totals: of all runs.
        answered: requests that this run answered, or gave an error; 0: it was complete already.
    """

    totals: Totals
    answered: int


@dataclass(frozen=True, kw_only=True)
class BatchJob:
    """A file of requests to be answered into another one.

    Attributes:
        source: the input; `-` is stdin, a copy of which is kept beside the output meanwhile.
        output: the file where answers go; `estimate` does without. errors: where errors go; None: there too.
        engine: arguments of `Engine`.
        model_name: what lines call the model; None: the name that the engine gets.
        limit, shard: see `BatchInput`.
        price: of an hour of the machine, or of all machines on Ray, in dollars.
        ray: address of a Ray cluster whose machines answer; None: this one does. engines: see `RayRun`.
    """

    source: Path
    output: Path | None = None
    errors: Path | None = None
    engine: Mapping[str, Any] = field(default_factory=dict)
    model_name: str | None = None
    limit: int | None = None
    shard: Shard = field(default_factory=Shard)
    price: float = 0.0
    ray: str | None = None
    engines: int | None = None

    @property
    def name(self) -> str:
        """What lines call the model."""
        return self.model_name or os.fspath(self.engine.get("model", DEFAULT_MODEL))

    @property
    def begun(self) -> bool:
        """Whether there is something written to go on from."""
        if self.output is None:
            return False
        journal = journal_of(self.output)
        return journal.exists() and journal.stat().st_size > 0

    def run(self, on_error: OnError, *, progress: bool | None = None) -> Outcome:
        """Answer what the output does not have yet.

        Args:
            progress: show a progress bar on stderr; None: if it is a terminal.

        Raises:
            InvalidRequest: the input cannot be read; or a file that is written has no folder, cannot be opened, is no
                regular file, in use, another batch's, or another file of this one.
            InvalidConfig, UnsupportedModel: the engine cannot run so.
            BatchStopped: it ended before its last request.
        """
        if self.output is None:
            raise InvalidRequest("output=None: answers need a file; only a dry run does without")
        self._check_files()
        answer = self._answer if self.ray is None else partial(self._answer_on_ray, self._ray_run())
        with self._explained(), self._open_input() as source:
            survey = source.survey()
            with BatchOutput(self.output, self.errors, self._identity(survey.digest)) as output:
                there = output.totals.requests
                if there < survey.requests:
                    answer(source, survey, output, on_error, progress)
                return Outcome(output.totals, output.totals.requests - there)

    def estimate(self, on_error: OnError) -> Estimate:
        """Count what there is to do, without an engine.

        Raises:
            InvalidRequest: the input cannot be read, or an output that is given is refused.
            InvalidConfig, UnsupportedModel: the model is not found, or cannot run.
        """
        self._check_files()
        directory, config = model_files(self.engine.get("model", DEFAULT_MODEL))
        longest = self.engine.get("max_model_len") or max_positions(config, self.engine.get("impl", "auto"))
        with self._open_input() as source:
            survey = source.survey()
            reader = RequestReader(find_tokenizer(directory), self.name, longest, None, survey.duplicates)
            return estimate(source.lines(survey), reader, on_error)

    @contextmanager
    def _open_input(self) -> Iterator[BatchInput]:
        if self.source != Path("-"):
            yield BatchInput(self.source, self.limit, self.shard)
            return
        with self._place_of_copy() as copy, stdin_copied(copy):
            yield BatchInput(copy, self.limit, self.shard)

    @contextmanager
    def _place_of_copy(self) -> Iterator[Path]:
        if self.output is not None:
            yield _copy_of_stdin(self.output)
            return
        with TemporaryDirectory() as folder:
            yield Path(folder) / "stdin"

    def _check_files(self) -> None:
        for name, path in (("output", self.output), ("errors", self.errors)):
            if path is None:
                continue
            if is_stream(path):
                raise InvalidRequest(
                    f"{name}={str(path)!r} is no regular file: a batch that goes on must find there what it has written"
                )
            if not path.parent.is_dir():
                raise InvalidRequest(f"{name}={str(path)!r}: there is no folder {str(path.parent)!r}")
        require_apart(self._files())

    def _files(self) -> dict[str, Path]:
        """All files of the batch, by name."""
        stdin = self.source == Path("-")
        files = {} if stdin else {"input": self.source}
        if self.output is not None:
            files |= {"copy of stdin": _copy_of_stdin(self.output)} if stdin else {}
            files |= {"journal": journal_of(self.output), "output": self.output}
        return files if self.errors is None else files | {"errors": self.errors}

    def _identity(self, digest: str) -> dict[str, Any]:
        return identity(self.engine, self.errors, self.name, self.limit, str(self.shard), digest)

    def _answer(
        self, source: BatchInput, survey: Survey, output: BatchOutput, on_error: OnError, progress: bool | None
    ) -> None:
        lines = (line for line in source.lines(survey) if not output.state.has(line.number))
        with Engine(**self.engine) as engine:
            output.start_clock()
            reader = RequestReader(
                engine.tokenizer, self.name, engine.max_model_len, self.engine.get("seed"), survey.duplicates
            )
            active = partial(_active, engine)
            with BatchProgress(active, output, survey.requests, self.price, progress) as bar:
                BatchRun(engine, engine.config.max_rows, lines, reader, output, bar.show, on_error).run()

    def _ray_run(self) -> type[RayRun]:
        """What runs on Ray, which is an extra."""
        try:
            from .ray_run import RayRun
        except ModuleNotFoundError as error:
            raise InvalidConfig(
                f"ray={self.ray!r} needs the package {error.name}: pip install 'twostroke[ray]'"
            ) from error
        return RayRun

    def _answer_on_ray(
        self,
        kind: type[RayRun],
        source: BatchInput,
        survey: Survey,
        output: BatchOutput,
        on_error: OnError,
        progress: bool | None,
    ) -> None:
        assert self.ray is not None
        output.start_clock()
        run = kind(self.ray, self.engines, self.engine, self.name, on_error)
        with BatchProgress(run.active, output, survey.requests, self.price, progress) as bar:
            run.run(source, survey, output, bar.show)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Say of what ends a run that nothing is lost by it."""
        try:
            yield
        except (OSError, EngineDead) as error:
            assert self.output is not None
            written = f"What {journal_of(self.output)} knows of is done: the same command goes on from there"
            kept = written if self.begun else "Nothing was written yet"
            raise BatchStopped(f"{str(error).rstrip().rstrip('.')}. {kept}") from error


def _active(engine: Engine) -> float:
    return engine.stats().active


def _copy_of_stdin(output: Path) -> Path:
    return output.with_name(output.name + ".stdin")
