"""The input of a batch: numbered lines of a file, gzipped or not."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import msgspec
import numpy as np

from ..errors import InvalidRequest

MAX_LINE_BYTES = 64 << 20
"""A longer line is a bad one; it is not held in memory."""

_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"


class Line(NamedTuple):
    """A line that is not blank.

    Attributes:
        number: its place in the file, from 1; blank lines count.
        data: its bytes; if it is longer than `MAX_LINE_BYTES`, one byte more than these.
    """

    number: int
    data: bytes


@dataclass(frozen=True)
class Shard:
    """The part of the requests whose place in the input is `index`, modulo `count`; 1 <= index <= count."""

    index: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Return the shard that `text` names as I/N.

        Raises:
            InvalidRequest: it does not.
        """
        index, slash, count = text.partition("/")
        if slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count):
            return cls(int(index), int(count))
        raise InvalidRequest(f"shard={text!r} must be I/N with 1 <= I <= N")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    def has(self, place: int) -> bool:
        """Whether the request with so many before it is in this part."""
        return place % self.count == self.index - 1


@dataclass(frozen=True)
class Survey:
    """What one reading of the whole input says.

    Attributes:
        requests: those of the shard.
        last: the number of the last line that counts.
        digest: of all requests, those of other shards included.
        duplicates: line numbers whose `custom_id` an earlier line has, with the number of the first that has it.
    """

    requests: int
    last: int
    digest: str
    duplicates: dict[int, int]


@dataclass(frozen=True)
class BatchInput:
    """The requests of a file.

    Attributes:
        path: the file; gzip is known by its first bytes.
        limit: only so many requests, the first ones; None is all.
        shard: of these, the part to be answered.
    """

    path: Path
    limit: int | None = None
    shard: Shard = Shard()

    def lines(self, survey: Survey) -> Iterator[Line]:
        """Yield the shard's lines. What was added to the file since the survey is not read."""
        for place, line in enumerate(self._all()):
            if line.number > survey.last:
                return
            if self.shard.has(place):
                yield line

    def survey(self) -> Survey:
        """Read the whole input once. Memory: 16 bytes a line.

        Raises:
            InvalidRequest: the file cannot be read.
        """
        digest, numbers, hashes, requests = hashlib.blake2b(digest_size=16), array("q"), array("Q"), 0
        for place, line in enumerate(self._all()):
            digest.update(b"%d %d\n" % (line.number, len(line.data)))
            digest.update(line.data)
            numbers.append(line.number)
            hashes.append(_hash(custom_id(line)))
            requests += self.shard.has(place)
        last = numbers[-1] if numbers else 0
        duplicates = self._duplicates(np.array(numbers), np.array(hashes))
        return Survey(requests, last, digest.hexdigest(), duplicates)

    def _duplicates(self, numbers: np.ndarray, hashes: np.ndarray) -> dict[int, int]:
        """The lines whose id an earlier one has; ids are compared where their hashes are equal."""
        values, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        if len(values) == len(hashes):
            return {}
        suspects = set(numbers[counts[inverse] > 1].tolist())
        first: dict[str, int] = {}
        duplicates: dict[int, int] = {}
        for line in self._all():
            if line.number in suspects:
                owner = first.setdefault(custom_id(line), line.number)
                if owner != line.number:
                    duplicates[line.number] = owner
        return duplicates

    def _all(self) -> Iterator[Line]:
        """Yield the lines that are not blank, up to the limit."""
        count = 0
        with self._open() as file:
            number = 0
            while (self.limit is None or count < self.limit) and (data := _read_line(file)):
                number += 1
                data = data.removeprefix(_BOM) if number == 1 else data
                if data := data.strip():
                    count += 1
                    yield Line(number, data)

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        if self.path.exists() and not self.path.is_file():
            raise InvalidRequest(
                f"input={str(self.path)!r} is no regular file, and is read twice; of what comes in by - a copy is kept"
            )
        try:
            with self.path.open("rb") as file:
                magic = file.read(len(_GZIP_MAGIC))
                file.seek(0)
                if magic != _GZIP_MAGIC:
                    yield file
                    return
                with gzip.open(file) as unzipped:
                    yield cast(BinaryIO, unzipped)
        except (OSError, EOFError, zlib.error) as error:
            raise InvalidRequest(f"input={str(self.path)!r} cannot be read: {error}") from error


def _read_line(file: BinaryIO) -> bytes:
    """The next line; of one that is too long only the beginning."""
    data = file.readline(MAX_LINE_BYTES + 1)
    rest = data
    while len(rest) > MAX_LINE_BYTES and not rest.endswith(b"\n"):
        rest = file.readline(MAX_LINE_BYTES + 1)
    return data


class _Head(msgspec.Struct):
    custom_id: str = ""


def custom_id(line: Line) -> str:
    """The line's `custom_id`, or `line-N` if it has none that can be read."""
    try:
        given = msgspec.json.decode(line.data, type=_Head).custom_id
    except (msgspec.MsgspecError, ValueError, RecursionError):
        given = ""
    return given or f"line-{line.number}"


def _hash(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
