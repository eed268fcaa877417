"""How a pass over one job ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datetime import timedelta


class Result(StrEnum):
    """How a pass ended."""

    GONE = "gone"  # there is no such job any more
    WAITING = "waiting"  # an own write has not been seen yet
    DONE = "done"
    CONFLICT = "conflict"  # the snapshot was stale: nothing was done
    FAILED = "failed"  # an action was refused: the next pass tries again


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a pass ended, when to look again even if nothing happens, and how long news may wait until then.

    After a failure `after` is when to look again at the earliest.
    """

    result: Result
    after: timedelta | None = None
    rest: timedelta | None = None
