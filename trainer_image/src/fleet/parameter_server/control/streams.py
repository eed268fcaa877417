"""What a server sends in pieces: all of it may take long, as long as one piece follows another.

gRPC bounds a stream as a whole only, and lets whoever asks for the next piece wait for it. So a thread of the
stream's own waits, for one piece at a time, and whoever has asked looks around meanwhile.
"""

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, Protocol, TypeVar

import grpc

from fleet.errors import DeadlineExceededError, FleetError
from fleet.parameter_server.waiting import WaitLog

__all__ = ["Stream", "StreamCall", "pieces_of", "taken_in_time"]

Piece = TypeVar("Piece")
Arriving = TypeVar("Arriving", covariant=True)

_LOOK_SECONDS: Final = 1.0


class StreamCall(Protocol[Arriving]):
    """A call that is answered by many messages, as gRPC gives it."""

    def __next__(self) -> Arriving:
        """Wait for the next message; grpc.RpcError where it fails."""

    def __iter__(self) -> Iterator[Arriving]:
        """Return itself."""

    def cancel(self) -> object:
        """End it; who waits gets an error."""


class Stream(Generic[Piece]):
    """The pieces of one call; nothing but `close` ends it early.

    Parameters
    ----------
    call : StreamCall
    endpoint : str
        The server's, for messages.
    describe : callable
        Makes our error of gRPC's.
    """

    def __init__(
        self, call: StreamCall[Piece], endpoint: str, describe: Callable[[grpc.RpcError], FleetError]
    ) -> None:
        self.endpoint = endpoint
        self._call = call
        self._describe = describe
        self._waiting = ThreadPoolExecutor(1, thread_name_prefix="fleet-stream")
        self._next: Future[Piece | None] | None = None

    def arrives_within(self, seconds: float) -> bool:
        """Wait a while for the next piece; return whether it is there, be it the end or an error."""
        if self._next is None:
            self._next = self._waiting.submit(next, self._call, None)
        try:
            self._next.exception(timeout=seconds)
        except TimeoutError:
            return False
        return True

    def take(self) -> Piece | None:
        """Take the piece that `arrives_within` has found; None after the last one.

        Raises
        ------
        ConfigurationError
            The server refuses, with its reason.
        PeerLostError
            The server is not there any more.
        """
        arrived, self._next = self._next, None
        if arrived is None:
            raise ValueError("there is no piece to take; expected a call of arrives_within() before")
        try:
            return arrived.result()
        except grpc.RpcError as error:
            raise self._describe(error) from error

    def close(self) -> None:
        """End the call, if it has not come to its end; safe to repeat."""
        self._call.cancel()
        self._waiting.shutdown()


def taken_in_time(
    pieces: Iterator[Piece], end: Callable[[], object], stalled_seconds: float
) -> Iterator[Piece]:
    """Iterate over what a server sends, and end the call where its receiver leaves a piece untaken.

    A receiver that takes nothing keeps the server's thread in the middle of sending: no exception reaches it.

    Parameters
    ----------
    pieces : iterator
    end : callable
        Ends the call, from another thread.
    stalled_seconds : float
        How long any one piece may remain untaken.
    """
    for piece in pieces:
        watch = threading.Timer(stalled_seconds, end)
        watch.daemon = True
        watch.start()
        try:
            yield piece
        finally:
            watch.cancel()


def pieces_of(
    stream: Stream[Piece],
    check: Callable[[], None],
    stalled_seconds: float,
    log: WaitLog | None = None,
    look_seconds: float = _LOOK_SECONDS,
) -> Generator[Piece, None, None]:
    """Iterate over the pieces of a stream, and close it at the end.

    Parameters
    ----------
    stream : Stream
    check : callable
        Asked before each piece, and now and then while one is awaited; raises where none will come.
    stalled_seconds : float
        How long any one piece may keep its receiver waiting.
    log : WaitLog, optional
        Says whom a long wait is for.
    look_seconds : float
        How long to wait before looking around.

    Raises
    ------
    DeadlineExceededError
        A piece did not come; the message names the server.
    FleetError
        What `check` has found, or what the call failed of.
    """
    log = log if log is not None else WaitLog()
    what = f"parameter server {stream.endpoint} to send the next piece of its shard"
    number = 0
    try:
        while True:
            check()
            while not stream.arrives_within(look_seconds):
                check()
                waited = log.note(number, lambda: f"waiting for {what}")
                if waited >= stalled_seconds:
                    raise DeadlineExceededError(f"waited {waited:.0f} s for {what}")
            try:
                piece = stream.take()
            except FleetError:
                check()  # who ends a session ends its calls, and knows why
                raise
            if piece is None:
                return
            yield piece
            number += 1
    finally:
        stream.close()
