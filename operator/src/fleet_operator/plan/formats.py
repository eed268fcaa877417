"""Formats and parses times, replica indexes and lists of pods in statuses and messages."""

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
    """Return whether `moment` lies in the future, but by no more than `at_most`.

    A later moment does not count, because it was set before the clock was set back.
    """
    return timedelta() < moment - now <= at_most


def stamp(moment: datetime) -> datetime:
    """Return a time truncated to whole seconds, the precision of statuses."""
    return moment.replace(microsecond=0)


def until(now: datetime, *moments: datetime | None) -> timedelta | None:
    """Return the time left until the earliest of the given times, at least zero; None if no time is given."""
    ahead = [moment - now for moment in moments if moment is not None]
    return max(timedelta(), min(ahead)) if ahead else None


def format_indexes(indexes: Collection[int]) -> str:
    """Format indexes as sorted ranges, such as ``0-2,4``."""
    ranges = []
    for _, group in groupby(enumerate(sorted(indexes)), key=lambda pair: pair[1] - pair[0]):
        members = [index for _, index in group]
        ranges.append(str(members[0]) if len(members) == 1 else f"{members[0]}-{members[-1]}")
    return ",".join(ranges)


def parse_any_indexes(text: object, *, below: int) -> frozenset[int]:
    """Parse the indexes below a limit in a pod's report; invalid text gives an empty set."""
    if not isinstance(text, str) or not _INDEXES.fullmatch(text):
        return frozenset()
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found.update(range(int(first), min(int(last or first), below - 1) + 1))
    return frozenset(found)


def parse_indexes(text: str) -> frozenset[int]:
    """Parse a valid list of indexes, as `format_indexes` writes it."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def some(names: Sequence[str]) -> str:
    """Return the name of the first pod, followed by the number of the others, if any."""
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
