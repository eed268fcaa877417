"""Logging of long waits at growing intervals, and phrases that name peers in messages."""

import ipaddress
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from fleet.errors import DeadlineExceededError
from fleet.plan.blocks import PlannedBlock
from fleet.process import progress

__all__ = [
    "FIRST_WORD_SECONDS",
    "WaitLog",
    "describe_blocks",
    "name_servers",
    "name_trainers",
    "split_endpoint",
    "wait_for_all",
    "wait_for_ports",
]

FIRST_WORD_SECONDS: Final = 5.0
"""The time after which a wait is first logged."""
_POLL_SECONDS: Final = 0.2
# About five seconds, if connections are refused at once.
_ATTEMPTS_BEFORE_A_LOOK: Final = 25
_MOST_NAMES: Final = 6
"""The maximum number of names in a message; the last entry gives the number of the others, if any."""
_log = logging.getLogger(__name__)


class WaitLog:
    """Logs what a process waits for, at growing intervals.

    Parameters
    ----------
    clock : callable
        Returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._subject: object = None
        self._since = 0.0
        self._next = FIRST_WORD_SECONDS

    def note(self, subject: object, describe: Callable[[], str]) -> float:
        """Log what the process waits for, if a message is due; return the seconds waited so far.

        Parameters
        ----------
        subject
            The subject of the wait. A different subject begins a new wait; None ends the wait.
        describe : callable
            Returns the message; called only when the message is logged.

        Returns
        -------
        float
            The duration of this wait in seconds.
        """
        now = self._clock()
        if subject is None or subject != self._subject:
            self._subject, self._since, self._next = subject, now, FIRST_WORD_SECONDS
            return 0.0
        waited = now - self._since
        if waited >= self._next:
            self._next = 2 * waited
            _log.warning("%s, for %.0f s", describe(), waited)
        return waited


def wait_for_all(events: Iterable[threading.Event], timeout_seconds: float) -> None:
    """Wait until all events are set, or until a timeout expires."""
    deadline = time.monotonic() + timeout_seconds
    for event in events:
        event.wait(max(0.0, deadline - time.monotonic()))


def wait_for_ports(
    endpoints: Sequence[str], deadline_seconds: float, look: Callable[[], None] = lambda: None
) -> None:
    """Wait until every endpoint accepts TCP connections.

    Parameters
    ----------
    endpoints : sequence of str
        Endpoints as ``host:port``.
    deadline_seconds : float
    look : callable
        Called immediately, and every few seconds while endpoints are unreachable; an exception ends the wait.

    Raises
    ------
    DeadlineExceededError
        Endpoints are unreachable at the deadline; the message names them.
    """
    deadline = time.monotonic() + deadline_seconds
    log = WaitLog()
    missing = list(endpoints)
    reason = ""
    for attempt in itertools.count():
        if attempt % _ATTEMPTS_BEFORE_A_LOOK == 0:
            look()
        for endpoint in list(missing):
            try:
                socket.create_connection(split_endpoint(endpoint), timeout=1.0).close()
            except OSError as error:
                reason = _reason(endpoint, error)
            else:
                missing.remove(endpoint)
        if not missing:
            return
        named = name_servers(missing)
        progress.waits_for(f"{named} to listen")
        log.note("ports", lambda: f"waiting for {named} to listen ({reason})")  # noqa: B023
        if time.monotonic() >= deadline:
            raise DeadlineExceededError(
                f"no connection to {named} after {deadline_seconds:g} s ({reason}); expected a server at "
                "each endpoint: check that they are running, and that the addresses are right"
            )
        time.sleep(_POLL_SECONDS)


def _reason(endpoint: str, error: OSError) -> str:
    """Explain why an endpoint is unreachable, with advice if another host refuses the connection."""
    host, _ = split_endpoint(endpoint)
    if not isinstance(error, ConnectionRefusedError) or _is_loopback(host):
        return str(error)
    return (
        f"{error}; a server without the job's key listens only on its loopback address: give all processes "
        "the same FLEET_JOB_KEY"
    )


def _is_loopback(host: str) -> bool:
    try:
        found = {str(each[4][0]).partition("%")[0] for each in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(each).is_loopback for each in found)


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Split ``host:port`` into host and port; an IPv6 address must be in brackets."""
    host, _, port = endpoint.rpartition(":")
    return host.strip("[]"), int(port)


def name_trainers(trainers: Iterable[int]) -> str:
    """Return a phrase such as ``trainer 1`` or ``trainers 0 and 1``."""
    return _named("trainer", [str(trainer) for trainer in trainers])


def name_servers(endpoints: Iterable[str]) -> str:
    """Return a phrase such as ``parameter server A`` or ``parameter servers A and B``."""
    return _named("parameter server", list(endpoints))


def describe_blocks(blocks: Sequence[PlannedBlock]) -> str:
    """Return a phrase such as ``3 blocks of 2 parameters (5000 values)``."""
    names, parameters = {block.name for block in blocks}, {block.param for block in blocks}
    return (
        f"{len(names)} blocks of {len(parameters)} parameters ({sum(block.numel for block in blocks)} values)"
    )


def _named(kind: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{kind} {names[0]}"
    shown = list(names)
    if len(shown) > _MOST_NAMES:
        shown[_MOST_NAMES - 1 :] = [f"{len(shown) - _MOST_NAMES + 1} more"]
    return f"{kind}s {', '.join(shown[:-1])} and {shown[-1]}"
