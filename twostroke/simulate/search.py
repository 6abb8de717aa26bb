"""The search: how many replicas, with which settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product

from ..errors import InvalidConfig, shown
from .report import Report
from .settings import Settings


@dataclass(frozen=True)
class Targets:
    """The longest that 99 of 100 may wait for a first token, and from one token to the next; seconds, None is any."""

    first_token: float | None = None
    inter_token: float | None = None

    @property
    def given(self) -> bool:
        return self.first_token is not None or self.inter_token is not None

    def met(self, report: Report) -> bool:
        return report.meets(self.first_token, self.inter_token)


@dataclass(frozen=True)
class Candidate:
    """Settings, what they gave, whether that meets the targets, and what time it took to find out."""

    settings: Settings
    changed: dict[str, object]
    report: Report
    meets: bool
    wall_seconds: float
    cpu_seconds: float


def search(
    variants: Sequence[dict[str, object]],
    settings: Settings,
    counts: Sequence[int],
    targets: Targets,
    run: Callable[[Settings, int], Report],
) -> Iterator[Candidate]:
    """Try every variant of the settings with ever more replicas; with targets, until they are met.

    Args:
        variants: changes of `settings`. counts: numbers of replicas, ascending.
        run: simulates settings and a number of replicas.
    """
    for changed in variants:
        varied = replace(settings, **changed)  # type: ignore[arg-type]
        for count in counts:
            wall, cpu = time.perf_counter(), time.process_time()
            report = run(varied, count)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            candidate = Candidate(varied, changed, report, targets.met(report), wall, cpu)
            yield candidate
            if targets.given and candidate.meets:
                break


def best(candidates: Sequence[Candidate]) -> Candidate | None:
    """Of those that meet the targets the one of fewest replicas, of these the one whose first tokens come earliest."""
    meeting = [candidate for candidate in candidates if candidate.meets]
    return min(meeting, key=lambda one: (one.report.replicas, one.report.first_token_p99), default=None)


def parse_variants(texts: Sequence[str]) -> list[dict[str, object]]:
    """All combinations of what texts of the form NAME=VALUE,VALUE,... list.

    Raises:
        InvalidConfig: one of them is malformed, or names no setting.
    """
    names, choices = [], []
    for text in texts:
        name, _, values = text.partition("=")
        name = name.strip().replace("-", "_")
        if name not in _KINDS:
            raise InvalidConfig(f"sweep={shown(text)}: {name!r} is none of {', '.join(_KINDS)}")
        names.append(name)
        choices.append([_value(text, name, value.strip()) for value in values.split(",")])
    return [dict(zip(names, values, strict=True)) for values in product(*choices)]


_KINDS = {f.name: str(f.type) for f in fields(Settings)}


def _value(text: str, name: str, value: str) -> object:
    """`value` as the setting has it."""
    kind = _KINDS[name]
    try:
        if kind == "str":
            return value
        if kind == "bool":
            return {"true": True, "false": False}[value.lower()]
        if value.lower() == "none" and "None" in kind:
            return None
        return float(value) if "float" in kind else int(value)
    except (ValueError, KeyError):
        raise InvalidConfig(f"sweep={shown(text)}: {value!r} is no value of {name} ({kind})") from None
