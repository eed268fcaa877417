"""Sets of replica indexes as text, the way an Indexed Job writes them: ``0-2,4``."""

from __future__ import annotations

import re
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["format_indexes", "parse_any_indexes", "parse_indexes"]

_INDEXES = re.compile(r"\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*", re.ASCII)


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
