"""What counts as a sign of life: whole frames, and the bytes of one that has not come to its end."""

import socket
import sys
from collections.abc import Iterator

import pytest

from fleet.parameter_server.transport.arrivals import Arrivals
from fleet.parameter_server.transport.connection import Directions
from fleet.parameter_server.transport.stream import ResumableStream
from fleet.wire import Conversation, Header, Identity, Kind, Side, pack_header
from tests.support.processes import wait_for

IDENTITY = Identity(job=1, trainer=0, attempt=0)
BLOCK_BYTES = 1 << 20
VALUE = pack_header(Header(Kind.PARAM, 1, 0, 0, block=0, payload_bytes=BLOCK_BYTES)) + bytes(BLOCK_BYTES)
WORD = pack_header(Header(Kind.CONFIRM, 1, 0, 0))


def greeted(side: Side, *, remote: bool) -> Conversation:
    conversation = Conversation(side, IDENTITY, {0: BLOCK_BYTES}, remote=remote)
    conversation.advance(Header(Kind.HELLO, IDENTITY.job, IDENTITY.attempt, IDENTITY.trainer))
    return conversation


def attach(stream: ResumableStream, here: socket.socket) -> None:
    stream.attach(here, Directions(greeted(Side.TRAINER, remote=False), greeted(Side.SERVER, remote=True)), 0)


@pytest.fixture
def stream() -> Iterator[ResumableStream]:
    made = ResumableStream("parameter server 0", Side.TRAINER, IDENTITY, lambda _: None, lambda _: None)
    yield made
    made.close()


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells how many bytes have come")
def test_a_part_of_a_large_frame_is_a_sign_of_life(stream: ResumableStream):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    with there:
        attach(stream, here)
        stream.send(Kind.PULL)
        arrivals = Arrivals(stream)
        assert not arrivals.look()
        for part in (VALUE[:100_000], VALUE[100_000:200_000]):
            there.sendall(part)
            wait_for(arrivals.look, "the bytes to count")
            wait_for(lambda: not arrivals.look(), "nothing to come any more")
        assert stream.taken == 0


def test_where_no_system_tells_a_frame_is(stream: ResumableStream):
    here, there = socket.socketpair()
    with there:
        attach(stream, here)
        stream.send(Kind.CONFIRM)
        arrivals = Arrivals(stream)
        assert not arrivals.look()
        there.sendall(WORD)
        wait_for(arrivals.look, "the frame to count")
        assert not arrivals.look()


def test_the_end_of_a_connection_is_none(stream: ResumableStream):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    attach(stream, here)
    stream.send(Kind.CONFIRM)
    there.sendall(WORD)
    arrivals = Arrivals(stream)
    wait_for(lambda: stream.taken == 1, "the frame")
    arrivals.look()
    there.close()
    wait_for(lambda: stream.bytes_moved() is None or stream.bytes_moved().received == 0, "the end")  # type: ignore[union-attr]
    assert not arrivals.look()
