"""How plans write moments, sets of replica indexes and lists of pods."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["format_indexes", "is_ahead", "parse_any_indexes", "parse_indexes", "some", "stamp", "until"]

_INDEXES = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", re.ASCII)


def is_ahead(now: datetime, moment: datetime, *, at_most: timedelta) -> bool:
    """Whether a moment is still to come that was put off by no more than `at_most`.

    One that is further ahead was reckoned by a clock that has been set back since, and nobody waits for it.
    """
    return timedelta() < moment - now <= at_most


def stamp(moment: datetime) -> datetime:
    """Return a moment as a status holds it, in whole seconds."""
    return moment.replace(microsecond=0)


def until(now: datetime, *moments: datetime | None) -> timedelta | None:
    """Return how long it is to the first of some moments, at least zero; None if there is none."""
    ahead = [moment - now for moment in moments if moment is not None]
    return max(timedelta(), min(ahead)) if ahead else None


def format_indexes(indexes: Collection[int]) -> str:
    """Write indexes as ranges, in order."""
    ranges = []
    for _, group in groupby(enumerate(sorted(indexes)), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in group]
        ranges.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(ranges)


def parse_any_indexes(text: object, *, below: int) -> frozenset[int]:
    """Read what a pod says are indexes, as far as they are below a number; anything else says nothing."""
    if not isinstance(text, str) or not _INDEXES.fullmatch(text):
        return frozenset()
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), min(int(last or first), below - 1) + 1))
    return frozenset(found)


def parse_indexes(text: str) -> frozenset[int]:
    """Read what `format_indexes` wrote; the API server lets nobody else write it."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def some(names: Sequence[str]) -> str:
    """Name the first of some pods; the sentence stays short and still while the others come."""
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
