"""A stream may last as long as pieces come, and an error of a server arrives as the error that it was."""

import queue
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from fleet.errors import (
    AlreadyJoinedError,
    ConfigurationError,
    DeadlineExceededError,
    DiskFullError,
    FleetError,
    PeerLostError,
)
from fleet.parameter_server.control.calls import Stream, answer, pieces_of
from fleet.parameter_server.control.client import ControlClient
from fleet.parameter_server.control.proto import control_pb2, control_pb2_grpc
from fleet.parameter_server.waits import WaitLog

STALLED_SECONDS = 60.0


class Call:
    """A call whose messages the test sends; None ends it well, an error badly."""

    def __init__(self, *messages: str | Exception | None) -> None:
        self._messages: queue.SimpleQueue[str | Exception | None] = queue.SimpleQueue()
        for message in messages:
            self.send(message)
        self.cancelled = False

    def send(self, message: str | Exception | None) -> None:
        self._messages.put(message)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        message = self._messages.get(timeout=20)
        if isinstance(message, str):
            return message
        raise message or StopIteration

    def cancel(self) -> None:
        self.cancelled = True
        self.send(grpc.RpcError("cancelled"))


class Clock:
    """Seconds that pass while somebody looks around."""

    def __init__(self, step: float) -> None:
        self._now = 0.0
        self._step = step

    def __call__(self) -> float:
        self._now += self._step
        return self._now


def stream_of(call: Call) -> Stream[str]:
    return Stream(call, "ps-0:7164", lambda error: PeerLostError(f"ps-0:7164 does not answer: {error}"))


def nothing_is_wrong() -> None:
    """Find nothing."""


def test_pieces_come_in_order_and_the_call_is_closed_after_the_last():
    call = Call("a", "b", None)
    assert list(pieces_of(stream_of(call), nothing_is_wrong, STALLED_SECONDS)) == ["a", "b"]
    assert call.cancelled


def test_a_stream_that_lasts_much_longer_than_any_piece_may_is_read_to_its_end():
    call = Call()
    stream, looks = stream_of(call), 0

    def look() -> None:
        """Let each piece come at the third look for it: 20 s after the first."""
        nonlocal looks
        if stream._next is None:
            return
        looks += 1
        if looks % 3 == 0:
            call.send(str(looks) if looks < 90 else None)
            stream._next.exception(timeout=20)

    log = WaitLog(Clock(20.0))
    found = list(pieces_of(stream, look, STALLED_SECONDS, log, look_seconds=0.01))
    assert found == [str(number) for number in range(3, 90, 3)]


def test_a_piece_that_does_not_come_ends_the_wait_and_the_call():
    call = Call("a")
    pieces = pieces_of(stream_of(call), nothing_is_wrong, STALLED_SECONDS, WaitLog(Clock(20.0)), 0.01)
    assert next(pieces) == "a"
    words = "waited 60 s for parameter server ps-0:7164 to send the next piece"
    with pytest.raises(DeadlineExceededError, match=words):
        next(pieces)
    assert call.cancelled


def test_what_is_found_while_a_piece_is_awaited_ends_the_call():
    call, looks = Call(), iter([None, None, FleetError("the server has vanished")])

    def look() -> None:
        if (found := next(looks)) is not None:
            raise found

    with pytest.raises(FleetError, match="has vanished"):
        next(pieces_of(stream_of(call), look, STALLED_SECONDS, look_seconds=0.01))
    assert call.cancelled


def test_a_call_that_fails_is_described():
    call = Call("a", grpc.RpcError("the connection broke"))
    pieces = pieces_of(stream_of(call), nothing_is_wrong, STALLED_SECONDS)
    assert next(pieces) == "a"
    with pytest.raises(PeerLostError, match="ps-0:7164 does not answer: the connection broke"):
        next(pieces)


def test_who_leaves_a_stream_ends_its_call():
    call = Call("a", "b")
    pieces = pieces_of(stream_of(call), nothing_is_wrong, STALLED_SECONDS)
    assert next(pieces) == "a"
    pieces.close()
    assert call.cancelled


def test_a_piece_that_nobody_has_waited_for_cannot_be_taken():
    with pytest.raises(ValueError, match=r"expected a call of arrives_within"):
        stream_of(Call()).take()


def test_a_call_that_fails_with_its_session_is_told_by_the_sessions_own_reason():
    call = Call("a", grpc.RpcError("the channel was closed"))
    looks = iter([None, None, FleetError("the session has ended")])

    def look() -> None:
        if (found := next(looks)) is not None:
            raise found

    pieces = pieces_of(stream_of(call), look, STALLED_SECONDS)
    assert next(pieces) == "a"
    with pytest.raises(FleetError, match="the session has ended"):
        next(pieces)
    assert call.cancelled


class Refusing(control_pb2_grpc.ParameterServerServicer):
    """Answers no barrier but with an error."""

    error: Exception

    def Barrier(  # noqa: N802 - the service's name
        self, request: control_pb2.BarrierRequest, context: grpc.ServicerContext
    ) -> control_pb2.BarrierReply:
        def refused() -> control_pb2.BarrierReply:
            raise self.error

        return answer(context, refused)


@pytest.fixture
def refusing() -> Iterator[tuple[Refusing, ControlClient]]:
    servicer = Refusing()  # type: ignore[abstract]
    server = grpc.server(futures.ThreadPoolExecutor(1))
    control_pb2_grpc.add_ParameterServerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = ControlClient(f"127.0.0.1:{port}", 0, 0)
    yield servicer, client
    client.close()
    server.stop(0).wait()


@pytest.mark.parametrize(
    ("error", "arrives", "words"),
    [
        (ConfigurationError("another model"), ConfigurationError, " refused: another model"),
        (AlreadyJoinedError("it lives"), ConfigurationError, " refused: it lives"),
        (PeerLostError("all have left"), PeerLostError, ": all have left"),
        (DiskFullError("no room"), DiskFullError, ": no room"),
        (FleetError("it failed"), FleetError, ": it failed"),
        (OSError("the disk is gone"), FleetError, ": the disk is gone"),
    ],
)
def test_an_error_arrives_as_what_it_was(refusing, error, arrives, words):
    servicer, client = refusing
    servicer.error = error
    with pytest.raises(FleetError) as raised:
        client.barrier(0, 10.0)
    assert type(raised.value) is arrives
    assert str(raised.value) == f"parameter server {client.endpoint}{words}"


def test_what_is_no_parameter_server_is_named():
    server = grpc.server(futures.ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    client = ControlClient(f"127.0.0.1:{port}", 0, 0)
    with pytest.raises(ConfigurationError, match="answers, but is not a fleet parameter server"):
        client.barrier(0, 10.0)
    client.close()
    server.stop(0).wait()
