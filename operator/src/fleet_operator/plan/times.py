"""Moments, as plans reckon with them."""

from __future__ import annotations

from datetime import datetime, timedelta

__all__ = ["is_ahead", "stamp", "until"]


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
