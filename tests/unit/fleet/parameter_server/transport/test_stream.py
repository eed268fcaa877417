"""One end of a resumable stream, over a real socket: what it delivers, and when."""

import socket
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping

import numpy as np
import pytest

from fleet.errors import FleetError, LocalProtocolError
from fleet.parameter_server.transport import connection
from fleet.parameter_server.transport.arena import LazyBytes
from fleet.parameter_server.transport.connection import (
    BrokenConnectionError,
    Directions,
    End,
    Frame,
)
from fleet.parameter_server.transport.event_loop import EventLoop
from fleet.parameter_server.transport.sockets import receive_exactly
from fleet.parameter_server.transport.stream import Arrivals, ResumableStream
from fleet.wire import HEADER_BYTES, Conversation, Header, Identity, Kind, Side, pack_header
from fleet.wire.messages import pack_error, pack_hyper
from tests.support.processes import wait_for

IDENTITY = Identity(job=1, trainer=0, attempt=0)
CONFIRM = pack_header(Header(Kind.CONFIRM, IDENTITY.job, IDENTITY.attempt, IDENTITY.trainer))
SECONDS = 10.0
BLOCK_BYTES = 1 << 23
"""More than the buffers of a connection take."""
BLOCKS = {0: BLOCK_BYTES, 1: connection.RUN_BYTES - 64, 2: connection.RUN_BYTES, 3: 64}


class Heard:
    """Takes what a stream delivers; may take its time to hear of an end."""

    def __init__(self) -> None:
        self.errors: list[FleetError | None] = []
        self.asked = threading.Event()
        self.told = threading.Event()
        self.may_return = threading.Event()
        self.may_return.set()
        self.stumbles: Exception | None = None

    def buffer_of(self, header: Header) -> memoryview | None:
        self.asked.set()
        return None

    def deliver(self, event: Frame | End) -> None:
        if isinstance(event, Frame):
            if self.stumbles is not None:
                raise self.stumbles
            return
        self.errors.append(event.error)
        self.told.set()
        assert self.may_return.wait(SECONDS)


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
def pair(heard: Heard, loop: EventLoop) -> Iterator[tuple[ResumableStream, socket.socket]]:
    """A trainer's stream, greeted, and the other end of its connection."""
    stream = ResumableStream(
        "parameter server 0", Side.TRAINER, IDENTITY, heard.buffer_of, heard.deliver, loop
    )
    here, there = socket.socketpair()
    stream.attach(here, Directions(greeted(Side.TRAINER, remote=False), greeted(Side.SERVER, remote=True)), 0)
    yield stream, there
    heard.may_return.set()
    stream.close()
    there.close()


def greeted(side: Side, *, remote: bool, blocks: Mapping[int, int] = BLOCKS) -> Conversation:
    conversation = Conversation(side, IDENTITY, blocks, remote=remote)
    conversation.advance(Header(Kind.HELLO, IDENTITY.job, IDENTITY.attempt, IDENTITY.trainer))
    return conversation


@pytest.mark.parametrize(
    ("stumbles", "told"),
    [
        (ZeroDivisionError("by nought"), "ZeroDivisionError: by nought"),
        (FileNotFoundError("of a user's optimizer"), "FileNotFoundError: of a user's optimizer"),
    ],
)
def test_a_frame_that_cannot_be_taken_ends_the_session_with_a_sentence(pair, heard, stumbles, told):
    _, there = pair
    heard.stumbles = stumbles
    there.sendall(CONFIRM)
    assert heard.told.wait(SECONDS)
    assert f"could not be taken ({told})" in str(heard.errors[0])
    assert not isinstance(heard.errors[0], BrokenConnectionError)


def test_the_next_connection_waits_until_the_end_of_the_one_before_is_told(pair, heard):
    stream, there = pair
    heard.may_return.clear()
    there.close()
    assert heard.told.wait(SECONDS)
    fenced = threading.Event()

    def fence() -> None:
        stream.fence()
        fenced.set()

    thread = threading.Thread(target=fence)
    thread.start()
    assert not fenced.wait(0.2)
    heard.may_return.set()
    assert fenced.wait(SECONDS)
    thread.join()
    assert [type(error) for error in heard.errors] == [BrokenConnectionError]


def test_a_frame_of_ours_that_may_not_leave_is_told_at_once(pair, heard):
    stream, _ = pair
    stream.send(Kind.GRAD, b"", block=0)  # no step has begun
    stream.send(Kind.STEP_END, b"")
    assert heard.told.wait(SECONDS)
    (error,) = heard.errors
    assert isinstance(error, LocalProtocolError)
    assert "GRAD" in str(error)


def test_a_small_frame_waits_for_no_thread_and_overtakes_no_other_frame(pair, loop):
    stream, there = pair
    busy, may_go_on = threading.Event(), threading.Event()

    def occupy() -> None:
        busy.set()
        assert may_go_on.wait(SECONDS)

    loop.call(occupy)
    assert busy.wait(SECONDS)
    there.settimeout(SECONDS)
    hyper = pack_hyper([{"lr": 0.1}])
    stream.send(Kind.HYPER, hyper, step=0)
    receive(there, HEADER_BYTES + len(hyper))
    large, small = bytes([1]) * BLOCKS[1], bytes([3]) * BLOCKS[3]
    stream.send(Kind.GRAD, large, step=0, block=1)
    stream.send(Kind.GRAD, small, step=0, block=3)
    there.setblocking(False)
    with pytest.raises(BlockingIOError):
        there.recv(1)
    there.settimeout(SECONDS)
    may_go_on.set()
    assert receive(there, HEADER_BYTES + len(large)).endswith(large)
    assert receive(there, HEADER_BYTES + len(small)).endswith(small)


def test_small_frames_that_the_other_end_does_not_read_yet_arrive_whole_and_in_order(heard, loop):
    number, size = 64, 1 << 14
    here, there = socket.socketpair()
    here.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 5 * size // 2)  # within a frame
    blocks = dict.fromkeys(range(number), size)
    stream = ResumableStream(
        "parameter server 0", Side.TRAINER, IDENTITY, heard.buffer_of, heard.deliver, loop
    )
    sending, receiving = (greeted(side, remote=side is Side.SERVER, blocks=blocks) for side in Side)
    stream.attach(here, Directions(sending, receiving), 0)
    hyper = pack_hyper([{"lr": 0.1}])
    stream.send(Kind.HYPER, hyper, step=0)
    for block in blocks:
        stream.send(Kind.GRAD, bytes([block]) * size, step=0, block=block)
    receive(there, HEADER_BYTES + len(hyper))
    frames = [receive(there, HEADER_BYTES + size) for _ in blocks]
    assert [set(frame[HEADER_BYTES:]) for frame in frames] == [{block} for block in blocks]
    stream.close()
    there.close()


def test_a_frame_whose_sending_a_signal_interrupts_leaves_over_the_next_connection(pair, heard, monkeypatch):
    stream, there = pair

    def interrupted(header: Header) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(connection, "pack_header", interrupted)
        with pytest.raises(KeyboardInterrupt):
            stream.send(Kind.HYPER, pack_hyper([{"lr": 0.1}]), step=0)
    stream.send(Kind.GRAD, bytes(BLOCKS[3]), step=0, block=3)
    assert heard.told.wait(SECONDS)
    assert isinstance(heard.errors[0], BrokenConnectionError)
    assert not there.recv(1), "nothing follows a frame of which a part may be missing"
    here, again = socket.socketpair()
    stream.fence()
    stream.attach(here, Directions(greeted(Side.TRAINER, remote=False), greeted(Side.SERVER, remote=True)), 0)
    num_bytes = 2 * HEADER_BYTES + len(pack_hyper([{"lr": 0.1}])) + BLOCKS[3]
    assert receive(again, num_bytes).endswith(bytes(BLOCKS[3]))
    again.close()


class Changing:
    """A value that changes while it leaves: each byte of a run says when the run was read."""

    def __init__(self) -> None:
        self.now = 0
        self.runs: list[tuple[int, int]] = []

    def read(self, begin: int, into: memoryview) -> None:
        self.runs.append((begin, len(into)))
        into[:] = bytes([self.now]) * len(into)


def receive(there: socket.socket, num_bytes: int) -> bytes:
    received = bytearray(num_bytes)
    receive_exactly(there, memoryview(received))
    return bytes(received)


def test_lazy_bytes_are_read_run_by_run_as_they_leave_and_again_if_they_leave_again(pair):
    stream, there = pair
    changing = Changing()
    stream.send(Kind.HYPER, pack_hyper([{"lr": 0.1}]), step=0)
    stream.send(Kind.GRAD, LazyBytes(BLOCK_BYTES, changing.read), step=0, block=0)
    receive(there, 2 * HEADER_BYTES + len(pack_hyper([{"lr": 0.1}])) + BLOCK_BYTES // 2)
    changing.now = 1
    rest = receive(there, BLOCK_BYTES // 2)
    assert rest[-1] == 1  # where it turns is the threads' matter
    assert rest == bytes(sorted(rest)), "a run that was read before came after one that was read later"
    run = connection.RUN_BYTES
    assert changing.runs == [(begin, run) for begin in range(0, BLOCK_BYTES, run)]
    there.close()
    here, again = socket.socketpair()
    conversations = greeted(Side.TRAINER, remote=False), greeted(Side.SERVER, remote=True)
    stream.fence()
    stream.attach(here, Directions(*conversations), 1)
    assert set(receive(again, HEADER_BYTES + BLOCK_BYTES)[HEADER_BYTES:]) == {1}
    again.close()


def test_a_gradient_that_the_other_end_has_is_let_go_of(pair):
    stream, there = pair
    freed = threading.Event()
    gradient = np.zeros(BLOCK_BYTES, np.uint8)
    weakref.finalize(gradient, freed.set)
    hyper = pack_hyper([{"lr": 0.1}])
    stream.send(Kind.HYPER, hyper, step=0)
    stream.send(Kind.GRAD, gradient.data, step=0, block=0)
    del gradient
    receive(there, 2 * HEADER_BYTES + len(hyper) + BLOCK_BYTES)
    assert not freed.is_set()
    there.sendall(
        pack_header(Header(Kind.CONFIRM, IDENTITY.job, IDENTITY.attempt, IDENTITY.trainer, taken=2))
    )
    assert freed.wait(SECONDS), "the memory of a gradient outlives the step, so the next one's is allocated"


def test_lazy_bytes_that_fit_into_a_run_are_read_at_once(pair):
    stream, there = pair
    pieces = {block: Changing() for block in (1, 2)}
    hyper = pack_hyper([{"lr": 0.1}])
    stream.send(Kind.HYPER, hyper, step=0)
    for block in (1, 2):
        stream.send(Kind.GRAD, LazyBytes(BLOCKS[block], pieces[block].read), step=0, block=block)
    receive(there, 3 * HEADER_BYTES + len(hyper) + BLOCKS[1] + BLOCKS[2])
    assert pieces[1].runs == [(0, BLOCKS[1])]
    assert pieces[2].runs == [(0, BLOCKS[2])]


def test_lazy_bytes_that_cannot_be_read_end_the_session_with_a_sentence(pair, heard):
    stream, _ = pair

    def read(begin: int, into: memoryview) -> None:
        raise ZeroDivisionError("by nought")

    stream.send(Kind.HYPER, pack_hyper([{"lr": 0.1}]), step=0)
    stream.send(Kind.GRAD, LazyBytes(BLOCK_BYTES, read), step=0, block=0)
    assert heard.told.wait(SECONDS)
    (error,) = heard.errors
    assert "could not be read (ZeroDivisionError: by nought)" in str(error)


def test_a_frame_that_comes_at_the_end_does_not_cut_the_last_words_off(pair, heard):
    stream, there = pair
    words = pack_error(FleetError("the disk is full"))
    stream.send(Kind.HYPER, pack_hyper([{"lr": 0.1}]), step=0)
    stream.send(Kind.GRAD, bytes(BLOCK_BYTES), step=0, block=0)
    stream.send(Kind.ERROR, words)
    finishing = threading.Thread(target=stream.finish, args=(SECONDS,))
    finishing.start()
    wait_for(lambda: stream._connection is not None and stream._connection[0]._finishing, "the end to begin")
    there.sendall(CONFIRM)
    there.settimeout(SECONDS)
    with there.makefile("rb") as reading:
        said = reading.read()
    assert said.endswith(words)
    there.sendall(CONFIRM)  # a reset would cut off what the other end has not read
    assert finishing.is_alive()
    there.close()
    finishing.join(SECONDS)
    assert not finishing.is_alive()
    assert stream.taken == 0, "what comes at the end is dropped"


@pytest.fixture
def stream_over_tcp(heard: Heard, loop: EventLoop) -> Iterator[tuple[ResumableStream, socket.socket]]:
    """A trainer's stream over TCP, whose bytes the system counts, and the other end of its connection."""
    stream = ResumableStream(
        "parameter server 0", Side.TRAINER, IDENTITY, heard.buffer_of, heard.deliver, loop
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
    stream.attach(here, Directions(greeted(Side.TRAINER, remote=False), greeted(Side.SERVER, remote=True)), 0)
    yield stream, there
    stream.close()
    there.close()


@pytest.mark.skipif(sys.platform != "linux", reason="no other system tells how many bytes have come")
def test_a_part_of_a_large_frame_is_a_sign_of_life(stream_over_tcp):
    stream, there = stream_over_tcp
    stream.send(Kind.PULL)
    arrivals = Arrivals(stream)
    assert not arrivals.look()
    value = Header(
        Kind.PARAM, IDENTITY.job, IDENTITY.attempt, IDENTITY.trainer, block=0, payload_bytes=BLOCK_BYTES
    )
    for part in (pack_header(value), bytes(200_000)):
        there.sendall(part)
        wait_for(arrivals.look, "the bytes to count")
        wait_for(lambda: not arrivals.look(), "nothing to come any more")
    assert stream.taken == 0


def test_a_frame_is_a_sign_of_life_where_no_system_counts_bytes(pair):
    stream, there = pair
    stream.send(Kind.CONFIRM)
    arrivals = Arrivals(stream)
    assert not arrivals.look()
    there.sendall(CONFIRM)
    wait_for(arrivals.look, "the frame to count")
    assert not arrivals.look()


def test_the_end_of_a_connection_is_no_sign_of_life(stream_over_tcp):
    stream, there = stream_over_tcp
    stream.send(Kind.CONFIRM)
    there.sendall(CONFIRM)
    arrivals = Arrivals(stream)
    wait_for(lambda: stream.taken == 1, "the frame")
    arrivals.look()
    there.close()
    wait_for(lambda: stream.bytes_moved() is None or stream.bytes_moved().received == 0, "the end")
    assert not arrivals.look()
