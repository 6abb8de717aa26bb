"""The output of a batch: answers and errors as lines, in groups that count as a whole."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest, counted
from .answered import Answered, Answers
from .journal import DurableFile, Journal, State, sync_folder

GROUP_LINES = 256
GROUP_BYTES = 4 << 20
GROUP_SECONDS = 1.0
"""A group is written once it has so many lines or bytes, or its first line has waited so long."""


class BatchOutput(Answers):
    """Files that get every request once; see `journal` for what that rests on.

    A context manager: left by an exception before anything is safe, it removes the files that it made, and empties
    others. Else an engine that was refused would leave a journal, which names its arguments, and refuses others.

    Args:
        path: where answers go. errors: where errors go; None: there too.
        identity: see `Journal`.

    Raises:
        InvalidRequest: a file is not as the journal says, or there is one, but no journal; or it cannot be opened, is
            no regular file, or is in use.
        OSError: the disk is full, for example.
    """

    def __init__(self, path: Path, errors: Path | None, identity: Mapping[str, Any]) -> None:
        paths = {"output": path} | ({} if errors is None else {"errors": errors})
        self._files: dict[str, DurableFile] = {}
        self._journal = Journal(journal_of(path), identity)
        try:
            for part, own in paths.items():
                self._open(part, own)
            self._journal.begin()
        except BaseException:
            if self._journal.begun:  # by an earlier run, whose lines may be in a file that could not be opened
                self.close()
            else:
                self._give_up()
            raise
        self._pending: list[int] = []
        self._texts: dict[str, list[bytes]] = {part: [] for part in paths}
        self._bytes = 0
        self._since = 0.0
        self._started = time.perf_counter()
        self._before = self.state.totals.seconds
        self.totals = self.state.totals

    @property
    def state(self) -> State:
        """What is safe."""
        return self._journal.state

    def start_clock(self) -> None:
        """Count the time from now on."""
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Time of all runs."""
        return self._before + time.perf_counter() - self._started

    def add(self, answered: Answered) -> None:
        self.totals = self.totals.plus(
            requests=1,
            failed=answered.failed,
            prompt_tokens=answered.prompt_tokens,
            completion_tokens=answered.completion_tokens,
        )
        if not self._pending:
            self._since = time.perf_counter()
        self._pending.append(answered.line)
        part = "errors" if answered.failed and "errors" in self._files else "output"
        self._texts[part].append(answered.text + b"\n")
        self._bytes += len(answered.text) + 1

    def flush_if_due(self) -> None:
        """Write the group if it is large or old enough."""
        if self.due_in() == 0 or len(self._pending) >= GROUP_LINES or self._bytes >= GROUP_BYTES:
            self.flush()

    def due_in(self) -> float | None:
        """Seconds until the group is old enough; None if it is empty."""
        return max(0.0, self._since + GROUP_SECONDS - time.perf_counter()) if self._pending else None

    def flush(self) -> None:
        """Write the group; all that was added is safe once this returns.

        Raises:
            OSError: the disk is full, for example. The files can be used no more; opened again, they are as they
                were before this group.
        """
        if not self._pending:
            return
        lines, self._pending = self._pending, []
        for part, texts in self._texts.items():
            if texts:
                self._files[part].append(b"".join(texts))
                self._files[part].sync()
                texts.clear()
        self._bytes = 0
        self.totals = self.totals.plus(seconds=self.seconds - self.totals.seconds)
        self._journal.append(lines, {part: file.length for part, file in self._files.items()}, self.totals)

    def close(self) -> None:
        """Close the files; what was not written is forgotten."""
        for file in self._files.values():
            file.close()
        self._journal.close()

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if kind is None:
            self.close()
        else:
            self._give_up()

    def _give_up(self) -> None:
        """Close the files; leave nothing in them if no group counts."""
        try:
            if not self._journal.has_groups:
                for file in self._files.values():
                    file.discard()
                self._journal.discard()  # the last: without it, lines in an output would bar another batch
        finally:
            self.close()

    def _open(self, part: str, path: Path) -> None:
        called, length = f"{part}={str(path)!r}", self.state.lengths.get(part, 0)
        file = DurableFile(path, called)
        try:
            self._check(called, file.length, length)
        except InvalidRequest:
            file.close()
            raise
        self._files[part] = file
        file.cut(length)
        sync_folder(path)

    def _check(self, called: str, found: int, known: int) -> None:
        journal = str(self._journal.path)
        if found and not self._journal.begun:
            raise InvalidRequest(f"{called} is there already, without a journal {journal!r} to go on from")
        if found < known:
            raise InvalidRequest(
                f"{called} has {counted(found, 'byte')}, but {journal!r} knows of {known}: it was changed"
            )


def journal_of(output: Path) -> Path:
    """The file beside an output that says what is in it."""
    return output.with_name(output.name + ".journal")


def is_stream(path: Path) -> bool:
    """Whether a path is none of a file that can be cut and read again: a pipe, a device, a folder, or `-`.

    `/dev/stdout` is one even where a shell lets it be a regular file: there is no place beside it.
    """
    folder = os.path.realpath(path.parent)
    shared = folder == "/dev" or folder.startswith("/proc/")
    return path == Path("-") or shared or (path.exists() and not path.is_file())
