"""What arrives is a sign of life: its sender's heartbeat may be starved by the very work that it sends."""

from fleet.parameter_server.transport.stream import ResumableStream

__all__ = ["Arrivals"]


class Arrivals:
    """Finds out whether anything has come over a stream, by counters that are kept anyway.

    Inside of a large frame the system tells how many bytes have come, where it tells at all.

    Parameters
    ----------
    stream : ResumableStream
    """

    def __init__(self, stream: ResumableStream) -> None:
        self._stream = stream
        self._frames = self._bytes = 0

    def look(self) -> bool:
        """Return whether anything has come since the last look."""
        moved = self._stream.bytes_moved()
        frames, received = self._stream.taken, moved.received if moved is not None else 0
        came = frames > self._frames or received > self._bytes  # less: there is another connection, or none
        self._frames, self._bytes = frames, received
        return came
