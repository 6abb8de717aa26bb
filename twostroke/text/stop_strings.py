"""Stop strings: the search for them in growing text, and the stream of a sample that may end at one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial

from ..request import Request
from .detokenizer import Detokenizer
from .tokenizer import Tokenizer


class StopSearch:
    """Finds the first of some strings in text that comes in pieces.

    First is the one that ends first, since what a longer one needs may never come; of several that end at the same
    character, the longest. The answer depends on the text alone, not on how it was cut.

    All it remembers of the text is its longest end with which a stop string begins. Each character is added to that
    once and dropped from it once, so the cost does not grow with the text.

    Args:
        stops: strings that are not empty.

    Attributes:
        held: the text's end that may turn out to be part of a stop string.
        read: characters looked at; once a stop string was found, up to its end.
        found: that stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(sorted(stops, key=len, reverse=True))
        self._beginnings = {stop[:size] for stop in stops for size in range(1, len(stop) + 1)}
        self.held = ""
        self.read = 0
        self.found: str | None = None

    def push(self, text: str) -> None:
        """Look at further text, unless a stop string was found."""
        held = self.held
        for char in text:
            if self.found is not None:
                return
            self.read += 1
            held += char
            while held and held not in self._beginnings:
                held = held[1:]
            if held.endswith(self._stops):
                self.found = next(stop for stop in self._stops if held.endswith(stop))
        self.held = held


class StopStream:
    """What was handed over of a sample that has stop strings.

    Text is searched when the detokenizer gives it; text is handed over as soon as it can't be part of a stop string, a
    token once all of its text was.

    Where tokens and text meet is decided by T(k), the decode of the first k tokens. It is a beginning of the whole text
    unless it ends within a character.

    * The search begins at the end of the shortest T(k) with k >= `min_tokens` that is a beginning of the whole text.
    * A trimmed output has the most tokens whose T(k) is a beginning of the text before the stop string.
    * With `include_stop` it has the fewest tokens whose T(k) begins with the text up to the stop string's end.

    Attributes:
        kept: number of tokens that the output keeps, once a stop string was found.
    """

    def __init__(self, tokenizer: Tokenizer, request: Request) -> None:
        params = request.params
        self._decode = partial(tokenizer.decode, skip_special_tokens=params.skip_special_tokens)
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._search = StopSearch(request.terms.stops)
        self._include = params.include_stop
        self._min_tokens = params.min_tokens
        self._start: int | None = None if params.min_tokens else 0
        """The character at which the search begins."""
        self._ids: list[int] = []
        self._texts: list[str] = []
        self._size = 0
        """Characters of `_texts`."""
        self._hidden = ""
        """The end of `_texts` that was not handed over."""
        self._ends: deque[tuple[int, int]] = deque()
        """(k, characters of T(k)) where T(k) is known to be final; those not handed over."""
        self._handed = 0
        """Tokens handed over."""
        self.kept: int | None = None

    def push(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Add tokens; return the ids and the text that are to be handed over. What follows a stop string is dropped."""
        shown = []
        for id_ in ids:
            if self.kept is not None:
                break
            self._ids.append(id_)
            text = self._detokenizer.push((id_,))
            shown.append(self._add(text, final=not self._detokenizer.holds))
        return self._hand_over(), "".join(shown)

    def finish(self, ids: Sequence[int]) -> tuple[list[int], str]:
        """Add what `ids`, all that have a text, has beyond the tokens pushed before; return all that is left."""
        handed, shown = self.push(ids[len(self._ids) :])
        if self.kept is None:
            shown += self._add(self._detokenizer.finish(), final=True)
        if self.kept is None:
            shown += self._show(self._size)
        return handed + self._hand_over(), shown

    @property
    def text(self) -> str:
        """All text handed over so far."""
        return "".join(self._texts)[: self._size - len(self._hidden)]

    def _add(self, text: str, *, final: bool) -> str:
        """Add text that the detokenizer gave, and search it; return what can be shown.

        `final`: it holds nothing back.
        """
        self._texts.append(text)
        self._hidden += text
        self._size += len(text)
        if final:
            self._ends.append((len(self._ids), self._size))
        if self._start is None and len(self._ids) >= self._min_tokens and (text or final):
            self._start = self._find_start()
            text = "" if self._start is None else text[len(text) - (self._size - self._start) :]
        if self._start is not None:
            self._search.push(text)
            if self._search.found is not None:
                return self._stop(self._start + self._search.read, self._search.found)
        return self._show(self._size - (0 if self._include else len(self._search.held)))

    def _find_start(self) -> int | None:
        """Return where the search begins, None if that is not known yet."""
        whole = "".join(self._texts)
        sizes = [len(text) for _, text in self._decodes(self._min_tokens) if whole.startswith(text)]
        return min(sizes, default=None)

    def _stop(self, end: int, stop: str) -> str:
        """End at `stop`, which ends before character `end`."""
        before, whole = end - len(stop), "".join(self._texts)
        if self._include:
            self.kept = next(count for count, text in self._decodes(self._handed) if text.startswith(whole[:end]))
            return self._show(end)
        self.kept = max(count for count, text in self._decodes(self._handed) if whole[:before].startswith(text))
        return self._show(before)

    def _decodes(self, low: int) -> Iterator[tuple[int, str]]:
        """All k from `low` on, each with T(k)."""
        return ((count, self._decode(self._ids[:count])) for count in range(low, len(self._ids) + 1))

    def _show(self, end: int) -> str:
        """Take the text up to character `end` out of what is hidden."""
        count = len(self._hidden) - (self._size - end)
        shown, self._hidden = self._hidden[:count], self._hidden[count:]
        return shown

    def _hand_over(self) -> list[int]:
        """Return the ids, not handed over yet, of which all text was."""
        end = self._handed
        while self._ends and self._ends[0][1] <= self._size - len(self._hidden):
            end = self._ends.popleft()[0]
        end = end if self.kept is None else self.kept
        handed, self._handed = self._ids[self._handed : end], end
        return handed
