"""How long a restart waits: a first one hardly at all, one after many failures a minute."""

from __future__ import annotations

from datetime import timedelta

__all__ = ["LONGEST", "backoff"]

LONGEST = timedelta(seconds=60)


def backoff(restarts: int) -> timedelta:
    """Return the pause before the restart with this number: 1 s, 2 s, 4 s, … and at most a minute.

    Training is expensive to hold up and its failures are mostly not those of a service that needs rest, so
    this begins lower than a kubelet's 10 s; the default backoffLimit of 6 still takes a minute.
    """
    return min(LONGEST, timedelta(seconds=2 ** min(restarts - 1, 16)))
