"""How long a restart waits: a second after a disruption or a first failure, a minute after many failures.

The pause grows with failures in a row, of one replica or of the whole job, and not with what others have done
to it. Failures before a healthy time are forgotten, as the kubelet's CrashLoopBackOff forgets them.
"""

from __future__ import annotations

from datetime import timedelta

__all__ = ["HEALTHY", "LONGEST", "backoff", "next_pause"]

LONGEST = timedelta(seconds=60)
HEALTHY = timedelta(minutes=10)
"""After a run of this length, failures before it no longer prolong the pause; the kubelet takes as long."""


def backoff(failures: int) -> timedelta:
    """Return the pause after so many failures in a row: 1 s, 2 s, 4 s, … and at most a minute.

    Training is expensive to hold up and its failures are mostly not those of a service that needs rest, so
    this begins lower than a kubelet's 10 s; the default backoffLimit of 6 still takes a minute.
    """
    return min(LONGEST, timedelta(seconds=2 ** min(failures - 1, 16)))


def next_pause(failures: int, *, fails: bool, ran: timedelta | None) -> tuple[int, timedelta]:
    """Return how many failures in a row there are after an end, and the pause before the next start.

    Parameters
    ----------
    failures : int
        Failures in a row before.
    fails : bool
        Whether this end is one of them; else it is a disruption, or follows from another's end.
    ran : timedelta, optional
        How long what has ended ran, if it did.
    """
    before = 0 if ran is not None and ran >= HEALTHY else failures
    return (before + 1, backoff(before + 1)) if fails else (before, backoff(1))
