"""Helpers for control calls: pending replies, reply streams, and conversion of errors to gRPC statuses.

The time limit of a streamed reply applies to each piece, not to the whole reply. gRPC only has a timeout for
the whole call, and blocks the caller until the next piece arrives. Each stream therefore has a thread that
waits for one piece at a time, while the caller checks for failures.
"""

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Generic, NoReturn, Protocol, TypeVar

import grpc

from fleet.errors import (
    AlreadyJoinedError,
    ConfigurationError,
    DeadlineExceededError,
    DiskFullError,
    FleetError,
    PeerLostError,
    RemoteProtocolError,
    disk_error,
)
from fleet.parameter_server.waits import WaitLog

__all__ = [
    "CHUNK_BYTES",
    "Pending",
    "Stream",
    "StreamCall",
    "answer",
    "cancel_if_unread",
    "error_of",
    "pieces_of",
    "refuse",
]

Reply = TypeVar("Reply")
Piece = TypeVar("Piece")
Arriving = TypeVar("Arriving", covariant=True)

CHUNK_BYTES: Final = 1 << 20
"""The maximum size in bytes of the part of a tensor or file that one message carries."""
_LOOK_SECONDS: Final = 1.0
_REFUSALS: Final = frozenset(
    {grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.ALREADY_EXISTS}
)


def answer(context: grpc.ServicerContext, call: Callable[[], Reply]) -> Reply:
    """Run a handler and return its reply; if it raises, end the gRPC call with a matching status."""
    try:
        return call()
    except FleetError as error:
        refuse(context, error)
    except OSError as error:
        refuse(context, disk_error(error, str(error)))


def refuse(context: grpc.ServicerContext, error: FleetError) -> NoReturn:
    """End a call with a gRPC status from which `error_of` restores the error."""
    code = grpc.StatusCode.ABORTED  # the server failed; the request was valid
    if isinstance(error, PeerLostError):
        code = grpc.StatusCode.OUT_OF_RANGE  # the client would retry UNAVAILABLE
    elif isinstance(error, DiskFullError):
        # gRPC itself uses RESOURCE_EXHAUSTED for messages that are too large.
        code = grpc.StatusCode.DATA_LOSS
    elif isinstance(error, ConfigurationError):
        taken = isinstance(error, AlreadyJoinedError)
        code = grpc.StatusCode.ALREADY_EXISTS if taken else grpc.StatusCode.FAILED_PRECONDITION
    context.abort(code, str(error))


def error_of(endpoint: str, error: grpc.RpcError) -> FleetError:
    """Convert a gRPC error from the server at an endpoint to a FleetError."""
    code, details = error.code(), error.details()
    if code in _REFUSALS:
        return ConfigurationError(f"parameter server {endpoint} refused: {details}")
    if code is grpc.StatusCode.OUT_OF_RANGE:
        return PeerLostError(f"parameter server {endpoint}: {details}")
    if code is grpc.StatusCode.DATA_LOSS:
        return DiskFullError(f"parameter server {endpoint}: {details}")
    if code is grpc.StatusCode.ABORTED:
        return FleetError(f"parameter server {endpoint}: {details}")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return ConfigurationError(
            f"parameter server {endpoint} does not recognise this process as part of its job: give all "
            "replicas the same FLEET_JOB_KEY, and check that the clocks of their hosts agree"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return ConfigurationError(
            f"{endpoint} answers, but is not a fleet parameter server ({details}); check the endpoints"
        )
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        return PeerLostError(f"parameter server {endpoint} does not answer: {details}")
    return RemoteProtocolError(f"parameter server {endpoint} failed a call with {code.name}: {details}")


class Pending(Generic[Reply]):
    """A future for the reply to a call, so that calls to many servers can run concurrently.

    Parameters
    ----------
    future : grpc.Future
    describe : callable
        Converts a gRPC error to a FleetError.
    """

    def __init__(self, future: "grpc.Future[Reply]", describe: Callable[[grpc.RpcError], FleetError]) -> None:
        self._future = future
        self._describe = describe

    def arrives_within(self, seconds: float) -> bool:
        """Wait for the reply up to a time limit; return True if the reply or an error has arrived."""
        try:
            self._future.exception(timeout=seconds)
        except grpc.FutureTimeoutError:
            return False
        return True

    def result(self) -> Reply:
        """Wait for the reply and return it.

        Raises
        ------
        ConfigurationError
            The server refused the call; the message gives the reason.
        FleetError
            The server failed; the message gives the reason.
        PeerLostError
            The server did not answer in time.
        """
        try:
            return self._future.result()
        except grpc.RpcError as error:
            raise self._describe(error) from error


class StreamCall(Protocol[Arriving]):
    """The interface of a gRPC call with a stream of replies; gRPC's own type is private."""

    def __next__(self) -> Arriving:
        """Wait for the next message and return it; raise grpc.RpcError if the call fails."""

    def __iter__(self) -> Iterator[Arriving]:
        """Return this iterator."""

    def cancel(self) -> object:
        """Cancel the call; this raises an error in any thread that waits for a message."""


class Stream(Generic[Piece]):
    """The messages of one streaming call; `close` ends the call early.

    Parameters
    ----------
    call : StreamCall
    endpoint : str
        The endpoint of the server, for messages.
    describe : callable
        Converts a gRPC error to a FleetError.
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
        """Wait up to a time limit; return True if a message, the end or an error has arrived."""
        if self._next is None:
            self._next = self._waiting.submit(next, self._call, None)
        try:
            self._next.exception(timeout=seconds)
        except TimeoutError:
            return False
        return True

    def take(self) -> Piece | None:
        """Return the message that has arrived, or None at the end of the stream.

        Raises
        ------
        ConfigurationError
            The server refused the call; the message gives the reason.
        PeerLostError
            The server is lost.
        """
        arrived, self._next = self._next, None
        if arrived is None:
            raise ValueError("no piece has arrived; expected a call of arrives_within() first")
        try:
            return arrived.result()
        except grpc.RpcError as error:
            raise self._describe(error) from error

    def close(self) -> None:
        """Cancel the call unless it has ended. May be called repeatedly."""
        self._call.cancel()
        self._waiting.shutdown()


def cancel_if_unread(
    pieces: Iterator[Piece], end: Callable[[], object], stalled_seconds: float
) -> Iterator[Piece]:
    """Yield the messages of a reply stream; cancel the call if the client stops reading.

    Otherwise a stalled receiver would block the server's thread in a send, where no exception reaches it.

    Parameters
    ----------
    pieces : iterator
    end : callable
        Ends the call, from another thread.
    stalled_seconds : float
        The longest time for which one piece may remain unread.
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
    """Yield the messages of a stream, and close it when iteration ends.

    Parameters
    ----------
    stream : Stream
    check : callable
        Called before each piece, and repeatedly while waiting for one; raises if no piece will arrive.
    stalled_seconds : float
        The time limit for each piece.
    log : WaitLog, optional
        Logs long waits.
    look_seconds : float
        The interval between calls of `check`.

    Raises
    ------
    DeadlineExceededError
        A piece did not arrive in time; the message names the server.
    FleetError
        The error of `check`, or of the call.
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
                check()  # an ended session has cancelled its calls, and this raises the reason for its end
                raise
            if piece is None:
                return
            yield piece
            number += 1
    finally:
        stream.close()
