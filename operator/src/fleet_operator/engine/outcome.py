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
    """How a pass ended.

    Attributes
    ----------
    result : Result
        How it ended.
    after : timedelta, optional
        When to look again even if nothing happens. After a failure, too: what is due then does not wait for
        the next try.
    rest : timedelta, optional
        How long news may wait until then.
    at_least : timedelta, optional
        How long the cluster asks to be left alone after a failure. Nothing shortens that.
    """

    result: Result
    after: timedelta | None = None
    rest: timedelta | None = None
    at_least: timedelta | None = None
