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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

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

    Args:
        path: made if it is not there.

    Raises:
        OSError: as the system says.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self.length = os.fstat(self._file).st_size

    def lock(self) -> None:
        """Keep other processes from opening it so, until this one ends, in whatever way.

        Raises:
            BlockingIOError: another one does, or has just removed the file.
        """
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not self._path.exists() or not os.path.samestat(self._path.stat(), os.fstat(self._file)):
            raise BlockingIOError

    def cut(self, length: int) -> None:
        """Drop what is behind the first `length` bytes."""
        os.ftruncate(self._file, length)
        self.length = length

    def append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self.length += len(data)

    def sync(self) -> None:
        os.fsync(self._file)

    def close(self) -> None:
        os.close(self._file)


class Journal:
    """The journal of one output, open.

    Args:
        path: the file; made if it is not there.
        identity: by name, what decides what the output will be. A journal of another one is refused.
        outputs: the files that it is about. When it begins, there must be nothing in them.

    Attributes:
        state: what is done.

    Raises:
        InvalidRequest: the journal is another batch's, is damaged, or is in use; or it would begin, but an output is
            there.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], outputs: Iterable[Path]) -> None:
        self.path = path
        self.state = State()
        self._file = DurableFile(path)
        try:
            self._lock()
            self._open(json.loads(json.dumps({"version": VERSION, **identity})), outputs)
        except BaseException:
            if not self._file.length:
                path.unlink()
            self._file.close()
            raise

    def append(self, lines: Sequence[int], lengths: Mapping[str, int], totals: Totals) -> None:
        """Note lines that are in the output; they are safe once this returns.

        Args:
            lengths: those of the output's files with these lines, which must be synced.
        """
        record = {"lines": ranges(lines), "lengths": dict(lengths), "totals": asdict(totals)}
        self._file.append(_encode(record))
        self._file.sync()
        self.state.apply(record)

    def close(self) -> None:
        self._file.close()

    def _lock(self) -> None:
        try:
            self._file.lock()
        except BlockingIOError as error:
            raise InvalidRequest(f"journal={str(self.path)!r} is in use by another process") from error

    def _open(self, identity: dict[str, Any], outputs: Iterable[Path]) -> None:
        """Read what is there and cut what is half written; begin with a first record if there is none."""
        records, end = _read(self.path)
        self._file.cut(end)
        if not records:
            for output in outputs:
                self._require_none(output)
            self._file.append(_encode(identity))
            self._file.sync()
            sync_folder(self.path)
            return
        self._compare(records[0], identity)
        for record in records[1:]:
            self.state.apply(record)

    def _require_none(self, output: Path) -> None:
        if output.exists() and output.stat().st_size:
            raise InvalidRequest(
                f"output={str(output)!r} is there already, without a journal {str(self.path)!r} to go on from"
            )

    def _compare(self, theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
        if differs := difference(ours, theirs):
            raise InvalidRequest(
                f"{differs} when {str(self.path)!r} was begun: give the same input and arguments, or another output"
            )


def _encode(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _read(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The whole records of a journal, and where the last of them ends.

    Raises:
        InvalidRequest: one that is not the last is not whole: this is not what a process leaves that was killed.
    """
    records: list[dict[str, Any]] = []
    end = 0
    with path.open("rb") as file:
        for data in file:
            record = _decode(data)
            if record is None:
                if file.read(1):
                    raise InvalidRequest(f"journal={str(path)!r} is damaged at byte {end}")
                break
            records.append(record)
            end += len(data)
    return records, end


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
        os.fsync(folder)
    finally:
        os.close(folder)
