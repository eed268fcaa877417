"""runPolicy.ttlSecondsAfterFinished: how long a finished job is kept."""

from __future__ import annotations

from datetime import datetime, timedelta

__all__ = ["expiry"]


def expiry(completion: datetime | None, seconds: int | None) -> datetime | None:
    """Return when a finished job is deleted, or None if it is kept."""
    return None if completion is None or seconds is None else completion + timedelta(seconds=seconds)
