"""What a launcher does next: a pure function of what its processes have done so far.

The rules, in order:

1. Whoever ends with a status other than 0 first is the failure: everything else is stopped, and its status
   becomes the launcher's.
2. Stopping is SIGTERM to each process, and SIGKILL for all that still lives, children too, when they have
   ended, or STOP_SECONDS later; where the launcher itself was told to stop, after as long as it was given
   for that.
3. When every worker has ended well, the servers get SERVER_SECONDS to end by themselves. One that has to be
   stopped then has not failed: the training is done.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from signal import NSIG

__all__ = [
    "SERVER_SECONDS",
    "STOP_SECONDS",
    "Action",
    "Decision",
    "Observed",
    "Stop",
    "decide",
    "is_of_signal",
]

STOP_SECONDS = 3.0
SERVER_SECONDS = 30.0


@dataclass(frozen=True)
class Observed:
    """One process: `status` is its exit status, 128 + n after signal n, and None while it runs."""

    name: str
    is_server: bool
    status: int | None
    ended_at: float | None = None


@dataclass(frozen=True)
class Stop:
    """The launcher has begun to stop everything at the time `since`, for `reason`, within so many seconds."""

    reason: str
    status: int
    since: float
    seconds: float = STOP_SECONDS


class Action(Enum):
    """What to do with the processes that still run."""

    WAIT = auto()
    STOP = auto()
    END = auto()
    """Kill what still runs, and end."""


@dataclass(frozen=True)
class Decision:
    """An action and why.

    `failed` is the process to blame, if one is; `until` is when the next decision is due even without news.
    """

    action: Action
    reason: str = ""
    status: int = 0
    failed: str | None = None
    until: float | None = None


def decide(observed: Sequence[Observed], stop: Stop | None, now: float) -> Decision:
    """Decide the next step of a launcher.

    Parameters
    ----------
    observed
        Every process that was started.
    stop
        How and when stopping began, or None.
    now
        Seconds of the clock that `ended_at` and `since` were read from.
    """
    running = [process for process in observed if process.status is None]
    if stop is not None:
        deadline = stop.since + stop.seconds
        if not running or now >= deadline:
            return Decision(Action.END, stop.reason, stop.status)
        return Decision(Action.WAIT, stop.reason, stop.status, until=deadline)
    if (failed := _first_failure(observed)) is not None:
        reason = f"{failed.name} {_how(failed.status or 0)}"
        return Decision(Action.STOP, reason, failed.status or 0, failed.name)
    if not running:
        return Decision(Action.END)
    if any(not process.is_server for process in running):
        return Decision(Action.WAIT)
    done = max((process.ended_at or 0.0 for process in observed if not process.is_server), default=now)
    if now < done + SERVER_SECONDS:
        return Decision(Action.WAIT, until=done + SERVER_SECONDS)
    names = ", ".join(process.name for process in running)
    return Decision(Action.STOP, f"every worker ended well; {names} still ran {SERVER_SECONDS:g} s later")


def is_of_signal(status: int) -> bool:
    """Whether an exit status is 128 + n for a signal n; ``sys.exit(-1)`` gives 255, and no signal does."""
    return 128 < status < 128 + NSIG


def _first_failure(observed: Sequence[Observed]) -> Observed | None:
    failed = [process for process in observed if process.status not in (None, 0)]
    return min(failed, key=lambda process: process.ended_at or 0.0, default=None)


def _how(status: int) -> str:
    if is_of_signal(status):
        return f"was ended by signal {status - 128}"
    return f"failed with exit status {status}"
