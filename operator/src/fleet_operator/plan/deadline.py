"""runPolicy.activeDeadlineSeconds: how long a job may take from its start, restarts and waiting included."""

from __future__ import annotations

from datetime import datetime, timedelta

__all__ = ["deadline"]


def deadline(start: datetime | None, seconds: int | None) -> datetime | None:
    """Return when the job must have finished, or None if it has all the time there is.

    Time in suspension does not count: a job that is resumed starts anew.
    """
    return None if start is None or seconds is None else start + timedelta(seconds=seconds)
