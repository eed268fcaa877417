"""A session's end of a line, over a real socket: what its handler hears, and when."""

import socket
import threading
from collections.abc import Iterator

import pytest

from fleet.errors import FleetError, LocalProtocolError
from fleet.parameter_server.connection import BrokenConnectionError
from fleet.parameter_server.line import Line
from fleet.wire import Conversation, Header, Identity, Kind, Side, pack_header

IDENTITY = Identity(job=1, trainer=0, attempt=0)
SECONDS = 10.0


class Heard:
    """A handler that may take its time to hear of an end."""

    def __init__(self) -> None:
        self.errors: list[FleetError | None] = []
        self.told = threading.Event()
        self.may_return = threading.Event()
        self.may_return.set()
        self.stumbles: Exception | None = None

    def destination(self, header: Header) -> memoryview | None:
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
    line.attach(here, greeted(Side.TRAINER, remote=False), greeted(Side.SERVER, remote=True), 0)
    yield line, there
    heard.may_return.set()
    line.close()
    there.close()


def greeted(side: Side, *, remote: bool) -> Conversation:
    conversation = Conversation(side, IDENTITY, {}, remote=remote)
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
