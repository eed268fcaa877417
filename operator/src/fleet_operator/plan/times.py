"""Moments, as plans reckon with them."""

from __future__ import annotations

from datetime import datetime, timedelta

__all__ = ["stamp", "until"]


def stamp(moment: datetime) -> datetime:
    """Return a moment as a status holds it, in whole seconds."""
    return moment.replace(microsecond=0)


def until(now: datetime, *moments: datetime | None) -> timedelta | None:
    """Return how long it is to the first of some moments, at least zero; None if there is none."""
    ahead = [moment - now for moment in moments if moment is not None]
    return max(timedelta(), min(ahead)) if ahead else None
