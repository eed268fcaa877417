"""The watchdog of a data connection that carries nothing any more, though nobody was told so."""

import logging
from typing import Final

from fleet.parameter_server.transport.sockets import BytesMoved
from fleet.parameter_server.transport.stream import Arrivals, ResumableStream
from fleet.parameter_server.transport.tls import RECORD_BYTES
from fleet.wire import HEADER_BYTES, Kind

__all__ = ["SilenceWatchdog"]

_PROBE_AFTER: Final = 2 / 5
"""After what part of the time in which nothing arrives the server is asked for a word."""
_PROBE_BYTES: Final = HEADER_BYTES + RECORD_BYTES
"""How long a probe may be, encrypted or not; no two frames are so short."""
_log = logging.getLogger(__name__)


class SilenceWatchdog:
    """Ends a connection over which nothing has arrived for too long, not even an answer to a probe.

    Only where the system tells how many bytes have moved: inside of a large frame nothing else does.

    Parameters
    ----------
    stream : ResumableStream
    endpoint : str
        The server's, for messages.
    limit_seconds : float
        How long nothing may arrive.
    """

    def __init__(self, stream: ResumableStream, endpoint: str, limit_seconds: float) -> None:
        self._stream = stream
        self._arrivals = Arrivals(stream)
        self._endpoint = endpoint
        self._limit_seconds = limit_seconds
        self._moved: BytesMoved | None = None
        self._moved_at = 0.0
        self._probed = False

    def look(self, now: float) -> bool:
        """Look whether bytes have moved; return whether any has come from the server since the last look.

        Parameters
        ----------
        now : float
            By the monotonic clock.
        """
        self._watch(now)
        return self._arrivals.look()

    def _watch(self, now: float) -> None:
        moved = self._stream.bytes_moved()
        if moved is None or self._moved is None or _is_alive(self._moved, moved):
            self._moved, self._moved_at, self._probed = moved, now, False
            return
        idle = now - self._moved_at
        if not self._probed and idle >= self._limit_seconds * _PROBE_AFTER:
            self._probed = True
            self._stream.send(Kind.CONFIRM)
        elif self._probed and idle >= self._limit_seconds:
            _log.warning(
                "the data connection with parameter server %s has carried nothing for %.0f s, not even an "
                "answer; giving it up",
                self._endpoint,
                idle,
            )
            self._moved = None
            self._stream.hang_up()


def _is_alive(before: BytesMoved, now: BytesMoved) -> bool:
    """Return whether the peer itself sent or took data; that its kernel took a probe does not count."""
    return now.received != before.received or now.acknowledged - before.acknowledged > _PROBE_BYTES
