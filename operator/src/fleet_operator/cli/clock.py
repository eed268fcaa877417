"""The time of day, for whoever shows how long ago something was."""

from __future__ import annotations

from datetime import UTC, datetime


def now() -> datetime:
    """Return the time of day in UTC."""
    return datetime.now(UTC)
