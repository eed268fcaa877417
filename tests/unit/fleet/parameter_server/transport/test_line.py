"""A session's end of a line, over a real socket: what its handler hears, and when."""

import socket
import threading
from collections.abc import Iterator

import pytest

from fleet.errors import FleetError, LocalProtocolError
from fleet.parameter_server.transport import connection
from fleet.parameter_server.transport.connection import BrokenConnectionError
from fleet.parameter_server.transport.handshake import Directions
from fleet.parameter_server.transport.line import Line
from fleet.parameter_server.transport.sockets import drain
from fleet.wire import Conversation, Header, Identity, Kind, Side, pack_header
from fleet.wire.messages import pack_error, pack_hyper
from tests.support.processes import wait_for

IDENTITY = Identity(job=1, trainer=0, attempt=0)
SECONDS = 10.0
BLOCK_BYTES = 1 << 23
"""More than the buffers of a connection take."""


class Heard:
    """A handler that may take its time to hear of an end."""

    def __init__(self) -> None:
        self.errors: list[FleetError | None] = []
        self.asked = threading.Event()
        self.told = threading.Event()
        self.may_return = threading.Event()
        self.may_return.set()
        self.stumbles: Exception | None = None

    def destination(self, header: Header) -> memoryview | None:
        self.asked.set()
        return None

    def received(self, header: Header, payload: memoryview) -> None:
        if self.stumbles is not None:
            raise self.stumbles

    def ended(self, error: FleetError | None) -> None:
        self.errors.append(error)
        self.told.set()
        assert self.may_return.wait(SECONDS)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def pair(heard: Heard) -> Iterator[tuple[Line, socket.socket]]:
    """A trainer's line, greeted, and the other end of its connection."""
    line = Line("parameter server 0", Side.TRAINER, IDENTITY, heard)
    here, there = socket.socketpair()
    line.attach(here, Directions(greeted(Side.TRAINER, remote=False), greeted(Side.SERVER, remote=True)), 0)
    yield line, there
    heard.may_return.set()
    line.close()
    there.close()


def greeted(side: Side, *, remote: bool) -> Conversation:
    conversation = Conversation(side, IDENTITY, {0: BLOCK_BYTES}, remote=remote)
    conversation.advance(Header(Kind.HELLO, IDENTITY.job, IDENTITY.attempt, IDENTITY.trainer))
    return conversation


@pytest.mark.parametrize(
    ("stumbles", "told"),
    [
        (ZeroDivisionError("by nought"), "ZeroDivisionError: by nought"),
        (FileNotFoundError("of a user's optimizer"), "FileNotFoundError: of a user's optimizer"),
    ],
)
def test_a_frame_that_a_handler_stumbles_over_ends_the_session_with_a_sentence(pair, heard, stumbles, told):
    _, there = pair
    heard.stumbles = stumbles
    there.sendall(pack_header(Header(Kind.CONFIRM, IDENTITY.job, IDENTITY.attempt, IDENTITY.trainer)))
    assert heard.told.wait(SECONDS)
    assert f"could not be taken ({told})" in str(heard.errors[0])
    assert not isinstance(heard.errors[0], BrokenConnectionError)


def test_the_next_connection_waits_until_the_end_of_the_one_before_is_told(pair, heard):
    line, there = pair
    heard.may_return.clear()
    there.close()
    assert heard.told.wait(SECONDS)
    fenced = threading.Event()

    def fence() -> None:
        line.fence()
        fenced.set()

    thread = threading.Thread(target=fence)
    thread.start()
    assert not fenced.wait(0.2)
    heard.may_return.set()
    assert fenced.wait(SECONDS)
    thread.join()
    assert [type(error) for error in heard.errors] == [BrokenConnectionError]


def test_a_frame_of_ours_that_may_not_leave_is_told_at_once(pair, heard):
    line, _ = pair
    line.send(Kind.GRAD, b"", block=0)  # no step has begun
    assert heard.told.wait(SECONDS)
    (error,) = heard.errors
    assert isinstance(error, LocalProtocolError)
    assert "GRAD" in str(error)


def test_a_frame_that_comes_at_the_end_does_not_cut_the_last_words_off(pair, heard, monkeypatch):
    line, there = pair
    draining = threading.Event()

    def drain_openly(connected: socket.socket, timeout_seconds: float) -> None:
        draining.set()
        drain(connected, timeout_seconds)

    monkeypatch.setattr(connection, "drain", drain_openly)
    words = pack_error(FleetError("the disk is full"))
    line.send(Kind.HYPER, pack_hyper([{"lr": 0.1}]), step=0)
    line.send(Kind.GRAD, bytes(BLOCK_BYTES), step=0, block=0)
    line.send(Kind.ERROR, words)
    finishing = threading.Thread(target=line.finish, args=(SECONDS,))
    finishing.start()
    wait_for(lambda: line._connection is not None and line._connection._finishing, "the end to begin")
    there.sendall(pack_header(Header(Kind.CONFIRM, IDENTITY.job, IDENTITY.attempt, IDENTITY.trainer)))
    assert heard.asked.wait(SECONDS)
    assert not draining.wait(0.2)
    there.settimeout(SECONDS)
    with there.makefile("rb") as stream:
        said = stream.read()
    assert said.endswith(words)
    there.close()
    finishing.join(SECONDS)
    assert not finishing.is_alive()
