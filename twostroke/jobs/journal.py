"""The journal of a batch: which lines are in the output, and how long the output is.

The output grows by groups of lines:

    output    write the group's lines ........ fsync |
    journal                                          | write a record: the lines, the output's new length; fsync |

A group counts from the moment its record is whole on the disk. Whoever opens a journal again cuts the output to the
length of the last whole record; what was behind it belongs to no record, so its lines are answered anew. So at every
moment each line whose number is in a record has exactly one place in the output, and no other has one.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InvalidRequest
from .identity import difference

VERSION = 1


@dataclass(frozen=True)
class Totals:
    """What a batch has done, all its runs together.

    Attributes:
        requests: lines that are in the output. failed: those of them with an error.
        prompt_tokens, completion_tokens: of those that did not fail.
        seconds: time of the runs, from the first request on.
    """

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    def plus(self, **changes: float) -> Totals:
        """The totals with something added."""
        return replace(self, **{name: getattr(self, name) + value for name, value in changes.items()})


@dataclass
class State:
    """What a journal says.

    Attributes:
        done: a byte for each line number, 1 where the line is in the output.
        lengths: of the files of the output, in bytes, by their part (`output`, `errors`).
        totals: see `Totals`.
    """

    done: bytearray = field(default_factory=bytearray)
    lengths: dict[str, int] = field(default_factory=dict)
    totals: Totals = Totals()

    def has(self, line: int) -> bool:
        return line < len(self.done) and bool(self.done[line])

    def apply(self, record: Mapping[str, Any]) -> None:
        """Add what a record says."""
        for first, last in record["lines"]:
            self.done.extend(bytes(max(0, last + 1 - len(self.done))))
            self.done[first : last + 1] = b"\1" * (last + 1 - first)
        self.lengths = dict(record["lengths"])
        self.totals = Totals(**record["totals"])


class DurableFile:
    """A file that grows at its end. What `append` returned from is written; what `sync` returned from stays.

    No other process has it open so, until this one ends, in whatever way.

    Args:
        path: made if it is not there; a link is followed.
        called: the file, in messages.

    Attributes:
        length: in bytes.

    Raises:
        InvalidRequest: it cannot be opened, is no regular file, or is in use.
    """

    def __init__(self, path: Path, called: str) -> None:
        self._path = os.path.realpath(path)
        if os.path.exists(self._path) and not os.path.isfile(self._path):
            raise InvalidRequest(f"{called} is no regular file")
        try:
            self._file, self._made = _opened(self._path)
            self._lock()
        except BlockingIOError as error:
            raise InvalidRequest(f"{called} is in use by another process") from error
        except OSError as error:
            raise InvalidRequest(f"{called} cannot be opened: {error.strerror}") from error
        self.length = os.fstat(self._file).st_size

    def _lock(self) -> None:
        """Raises BlockingIOError: another process has it, or has just removed it."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._in_place():
                raise BlockingIOError
        except BaseException:
            self.close()
            raise

    def _in_place(self) -> bool:
        """Whether the path still leads to this file."""
        return os.path.exists(self._path) and os.path.samestat(os.stat(self._path), os.fstat(self._file))

    def cut(self, length: int) -> None:
        """Drop what is behind the first `length` bytes."""
        with _named(self._path):
            os.ftruncate(self._file, length)
        self.length = length

    def append(self, data: bytes) -> None:
        rest = memoryview(data)
        with _named(self._path):
            while rest:
                rest = rest[os.write(self._file, rest) :]
        self.length += len(data)

    def sync(self) -> None:
        with _named(self._path):
            os.fsync(self._file)

    def read(self) -> BinaryIO:
        """The file from its beginning on, to be closed."""
        file = os.fdopen(os.dup(self._file), "rb")
        file.seek(0)
        return file

    def discard(self) -> None:
        """Leave nothing: no file if this made it, else an empty one."""
        if not self._made:
            self.cut(0)
        elif self._in_place():
            os.unlink(self._path)

    def close(self) -> None:
        os.close(self._file)


def _opened(path: str) -> tuple[int, bool]:
    """The descriptor of a file, and whether it was made."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    try:
        return os.open(path, flags | os.O_EXCL, 0o666), True
    except FileExistsError:
        return os.open(path, flags, 0o666), False


class Journal:
    """The journal of one output, open.

    Args:
        path: the file; made if it is not there.
        identity: by name, what decides what the output will be. A journal of another one is refused.

    Attributes:
        state: what is done.
        begun: whether it has its first record, the identity.

    Raises:
        InvalidRequest: the journal is another batch's, is damaged, or is in use, or the file cannot be opened.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self.path = path
        self.state = State()
        self._identity: dict[str, Any] = json.loads(json.dumps({"version": VERSION, **identity}))
        self._file = DurableFile(path, f"journal={str(path)!r}")
        try:
            self.begun = self._resume()
        except BaseException:
            self._file.close()
            raise

    def begin(self) -> None:
        """Write the first record, unless it is there."""
        if not self.begun:
            self._file.append(_encode(self._identity))
            self._file.sync()
            sync_folder(self.path)
            self.begun = True

    def append(self, lines: Sequence[int], lengths: Mapping[str, int], totals: Totals) -> None:
        """Note lines that are in the output; they are safe once this returns.

        Args:
            lengths: those of the output's files with these lines, which must be synced.
        """
        record = {"lines": ranges(lines), "lengths": dict(lengths), "totals": asdict(totals)}
        self._file.append(_encode(record))
        self._file.sync()
        self.state.apply(record)

    @property
    def has_groups(self) -> bool:
        """Whether any group counts. The file says so, since an exception amid `append` leaves `state` behind it."""
        return bool(self.state.totals.requests) or len(self._records()[0]) > 1

    def discard(self) -> None:
        """Leave nothing that another batch would be refused for."""
        self._file.discard()

    def close(self) -> None:
        self._file.close()

    def _resume(self) -> bool:
        """Read what is there and cut what is half written; return whether anything is left."""
        records, end = self._records()
        self._file.cut(end)
        if records:
            self._compare(records[0], self._identity)
        for record in records[1:]:
            self.state.apply(record)
        return bool(records)

    def _records(self) -> tuple[list[dict[str, Any]], int]:
        """The whole records, and where the last of them ends.

        Raises:
            InvalidRequest: one that is not the last is not whole: this is not what a process leaves that was killed.
        """
        records: list[dict[str, Any]] = []
        end = 0
        with self._file.read() as file:
            for data in file:
                record = _decode(data)
                if record is None:
                    if file.read(1):
                        raise InvalidRequest(f"journal={str(self.path)!r} is damaged at byte {end}")
                    break
                records.append(record)
                end += len(data)
        return records, end

    def _compare(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        if differs := difference(ours, theirs):
            raise InvalidRequest(
                f"{differs} when {str(self.path)!r} was begun: give the same input and arguments, or another output"
            )


def _encode(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _decode(data: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(data) if data.endswith(b"\n") else None
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Numbers as [first, last] of each run of them."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return found


def sync_folder(path: Path) -> None:
    """Have the name of a new file stay."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with _named(path.parent):
            os.fsync(folder)
    finally:
        os.close(folder)


@contextmanager
def _named(path: str | Path) -> Iterator[None]:
    """Have an error say what it is of: another disk may be full than the one thought of."""
    try:
        yield
    except OSError as error:
        error.filename = os.fspath(path)
        raise
