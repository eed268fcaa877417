"""Connections that one thread serves: what is delivered, and when a connection waits without a thread."""

import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fleet.errors import DeadlineExceededError
from fleet.parameter_server.certificates import Certificates
from fleet.parameter_server.transport import connection as connection_module
from fleet.parameter_server.transport.arena import LazyBytes
from fleet.parameter_server.transport.connection import (
    Connection,
    Directions,
    End,
    Frame,
    NotYet,
    OutgoingFrame,
    Work,
)
from fleet.parameter_server.transport.event_loop import EventLoop
from fleet.parameter_server.transport.sockets import receive_exactly
from fleet.parameter_server.transport.tls import TlsSocket
from fleet.wire import HEADER_BYTES, Conversation, Header, Identity, Kind, Side, pack_header
from tests.support.certificates import make_authority
from tests.support.threads import at_once

IDENTITY = Identity(job=1, trainer=0, attempt=0)
SECONDS = 10.0
SIZES = dict(enumerate((0, 1, 4, 1000, 70_000, 300_000, 3_000_000)))


def header(kind: Kind, block: int | None = None) -> Header:
    made = Header(kind, IDENTITY.job, IDENTITY.attempt, IDENTITY.trainer)
    return made if block is None else made._replace(block=block, payload_bytes=SIZES[block])


def conversation(side: Side, *, remote: bool) -> Conversation:
    greeted = Conversation(side, IDENTITY, SIZES, remote=remote)
    greeted.advance(header(Kind.HELLO))
    return greeted


class Talker:
    """One end of a connection, which keeps the frames that arrive unless it has work with them."""

    def __init__(self, loop: EventLoop, side: Side, connected: socket.socket) -> None:
        self.arrived = queue.SimpleQueue[Frame | End]()
        self.work: Callable[[Frame], Work | None] = lambda _: None
        self.buffer_of: Callable[[Header], memoryview | NotYet | None] = lambda _: None
        other = Side.SERVER if side is Side.TRAINER else Side.TRAINER
        self.connection = Connection(
            connected,
            "the other end",
            Directions(conversation(side, remote=False), conversation(other, remote=True)),
            lambda each: self.buffer_of(each),
            self._deliver,
            loop,
        )
        self.connection.start()

    def _deliver(self, event: Frame | End) -> Work | None:
        work = self.work(event) if isinstance(event, Frame) else None
        if work is None:
            self.arrived.put(event)
        return work

    def next(self) -> Any:
        return self.arrived.get(timeout=SECONDS)

    def send(self, kind: Kind, block: int | None = None, payload: Any = b"") -> None:
        self.connection.send(OutgoingFrame(header(kind, block), payload))


@pytest.fixture
def make(loop: EventLoop) -> Iterator[Callable[[Side], tuple[Talker, socket.socket]]]:
    """Make an end of a connection, and the socket of the other end."""
    made = []

    def make_one(side: Side) -> tuple[Talker, socket.socket]:
        here, there = socket.socketpair()
        there.settimeout(SECONDS)
        made.append((Talker(loop, side, here), there))
        return made[-1]

    yield make_one
    for end, there in made:
        end.connection.close()
        there.close()


def values(rng: random.Random, count: int) -> list[tuple[int, bytes]]:
    """Return values of random blocks."""
    blocks = [rng.choice(list(SIZES)) for _ in range(count)]
    return [(block, bytes([rng.randrange(256)]) * SIZES[block]) for block in blocks]


def stream(sent: list[tuple[int, bytes]]) -> bytes:
    return b"".join(pack_header(header(Kind.PARAM, block)) + value for block, value in sent)


@pytest.mark.parametrize("seed", range(6))
def test_frames_arrive_whole_and_in_order_however_the_bytes_come(make, seed):
    rng = random.Random(seed)  # noqa: S311
    end, there = make(Side.TRAINER)
    places = {block: memoryview(bytearray(SIZES[block])) for block in SIZES if block % 2}
    landed: list[tuple[int, bytes]] = []
    end.buffer_of = lambda each: places.get(each.block)

    def look(frame: Frame) -> None:
        block = frame.header.block
        landed.append((block, bytes(places.get(block, frame.payload))))

    end.work = look
    sent = values(rng, 60)
    rest = memoryview(stream(sent))
    while rest:
        count = rng.choice((1, 50, HEADER_BYTES, 60, 5000, 200_000))
        there.sendall(rest[:count])
        rest = rest[count:]
    for _ in sent:
        end.next()
    assert landed == sent


@pytest.mark.parametrize("seed", range(3))
def test_lazy_and_other_frames_leave_whole_and_in_order(make, seed):
    end, there = make(Side.SERVER)
    sent = values(random.Random(seed), 60)  # noqa: S311
    read = threading.Event()

    def lazy(value: bytes) -> LazyBytes:
        def read_value(begin: int, into: memoryview) -> None:
            read.set()
            into[:] = value[begin : begin + len(into)]

        return LazyBytes(len(value), read_value)

    for number, (block, value) in enumerate(sent):
        end.send(Kind.PARAM, block, lazy(value) if number % 3 == 0 else memoryview(value))
    expected = stream(sent)
    received = bytearray(len(expected))
    receive_exactly(there, memoryview(received))
    assert received == expected
    assert read.is_set()


def test_only_the_pool_reads_large_lazy_bytes_after_the_kernel_has_refused_some_too(make, loop, monkeypatch):
    """The loop may go on as soon as the kernel takes bytes again, before the pool has ended its part."""
    end, there = make(Side.SERVER)
    threads, again, call, some = set[str](), threading.Event(), loop.call, 100_000
    first = [True]

    def call_late(function: Callable[[], None]) -> None:
        if threading.current_thread().name.startswith("fleet-work") and first:
            first.clear()
            receive_exactly(there, memoryview(received)[:some])
            call(lambda: end.connection._outgoing.unblock())
            call(again.set)
            assert again.wait(SECONDS)
        call(function)

    def read_value(begin: int, into: memoryview) -> None:
        threads.add(threading.current_thread().name[:-2])
        into[:] = bytes(len(into))

    expected = stream([(6, bytes(SIZES[6]))] * 2)
    received = bytearray(len(expected))
    monkeypatch.setattr(loop, "call", call_late)
    for _ in range(2):
        end.send(Kind.PARAM, 6, LazyBytes(SIZES[6], read_value))
    assert again.wait(SECONDS)
    receive_exactly(there, memoryview(received)[some:])
    assert received == expected
    assert threads == {"fleet-work"}


def test_a_connection_whose_frame_is_used_for_too_long_is_not_waited_for(make, monkeypatch):
    monkeypatch.setattr(connection_module, "_WORK_SECONDS", 0.05)
    end, there = make(Side.TRAINER)
    begun, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert may_end.wait(SECONDS)

    end.work = lambda _: wait
    there.sendall(stream([(1, b"1")]))
    assert begun.wait(SECONDS)
    with pytest.raises(DeadlineExceededError, match=r"was not closed within 0\.05 s, because a frame of it"):
        end.connection.close()
    may_end.set()


def test_the_next_frame_waits_for_work_on_a_frame_and_other_connections_do_not(make):
    (busy, to_busy), (other, to_other) = make(Side.TRAINER), make(Side.TRAINER)
    may_end = threading.Event()

    def work(frame: Frame) -> Work | None:
        if frame.header.block != 1:
            return None

        def wait() -> None:
            assert may_end.wait(SECONDS)
            busy.arrived.put(frame)

        return wait

    busy.work = work
    to_busy.sendall(stream([(1, b"1"), (2, b"2222"), (1, b"3"), (2, b"4444")]))
    to_other.sendall(stream([(1, b"5")]))
    assert other.next().payload == b"5"
    assert busy.arrived.empty()
    may_end.set()
    assert [bytes(busy.next().payload) for _ in range(4)] == [b"1", b"2222", b"3", b"4444"]


@pytest.mark.parametrize("resumes", [True, False], ids=["resumed", "after-a-time"])
def test_a_frame_without_a_buffer_waits_and_occupies_no_thread(make, loop, resumes):
    held = [make(Side.TRAINER) for _ in range(8)]
    other, to_other = make(Side.TRAINER)
    place, asked = memoryview(bytearray(SIZES[5])), threading.Semaphore(0)
    free = threading.Event()

    def buffer_of(_: Header) -> memoryview | NotYet:
        asked.release()
        return place if free.is_set() else NotYet(None if resumes else 0.01)

    value = b"x" * SIZES[5]
    senders = []
    for end, there in held:
        end.buffer_of = buffer_of
        senders.append(threading.Thread(target=there.sendall, args=(stream([(5, value)]),)))
        senders[-1].start()
    for _ in held:
        assert asked.acquire(timeout=SECONDS)
    done = threading.Event()
    for _ in range(2):
        loop.submit(lambda: None)
    loop.submit(done.set)
    assert done.wait(SECONDS), "no thread of the pool waits"
    to_other.sendall(stream([(1, b"5")]))
    assert other.next().payload == b"5"
    assert all(end.arrived.empty() for end, _ in held)
    free.set()
    for end, _ in held:
        if resumes:
            end.connection.resume()
        assert end.next().header.block == 5
    assert place == value
    for sender in senders:
        sender.join(SECONDS)


def test_the_end_of_a_connection_waits_for_no_buffer(make):
    end, there = make(Side.TRAINER)
    asked = threading.Event()

    def buffer_of(_: Header) -> NotYet:
        asked.set()
        return NotYet()

    end.buffer_of = buffer_of
    there.sendall(stream([(1, b"1")]))
    assert asked.wait(SECONDS)
    end.connection.close()
    assert isinstance(end.next(), End)
    assert end.arrived.empty()


def test_the_end_of_a_connection_waits_for_work_on_its_frame(make):
    end, there = make(Side.TRAINER)
    begun, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert may_end.wait(SECONDS)
        end.arrived.put(Frame(header(Kind.CONFIRM)))

    end.work = lambda _: wait
    there.sendall(stream([(1, b"1"), (1, b"2")]))
    assert begun.wait(SECONDS)
    closing = threading.Thread(target=end.connection.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    may_end.set()
    closing.join(SECONDS)
    assert isinstance(end.next(), Frame)
    assert isinstance(end.next(), End)
    assert end.arrived.empty(), "no frame follows the end"


def test_lazy_bytes_that_wait_hold_up_no_other_connection(make):
    """Reading a value may wait for a step of its block."""
    (slow, from_slow), (other, from_other) = make(Side.SERVER), make(Side.SERVER)
    stepped = threading.Event()

    def read(_: int, into: memoryview) -> None:
        assert stepped.wait(SECONDS)
        into[:] = b"y" * len(into)

    slow.send(Kind.PARAM, 5, LazyBytes(SIZES[5], read))
    other.send(Kind.PARAM, 5, b"z" * SIZES[5])
    received = bytearray(HEADER_BYTES + SIZES[5])
    receive_exactly(from_other, memoryview(received))
    assert received[-1:] == b"z"
    stepped.set()
    receive_exactly(from_slow, memoryview(received))
    assert received[-1:] == b"y"


def test_encrypted_values_move_both_ways_at_once_over_one_thread(loop, tmp_path):
    """More than all buffers hold, so that an end which receives only after it has sent waits for ever."""
    certificates = Certificates(make_authority(tmp_path / "authority").issue(tmp_path / "issued"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        opened = socket.create_connection(listener.getsockname(), timeout=SECONDS)
        taken, _ = listener.accept()
    for each in (opened, taken):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
    ends = TlsSocket(opened, certificates, "127.0.0.1"), TlsSocket(taken, certificates)
    at_once(*(each.handshake for each in ends))
    trainer, server = (
        Talker(loop, side, each) for side, each in zip((Side.TRAINER, Side.SERVER), ends, strict=True)
    )
    trainer.send(Kind.HYPER)
    sent = values(random.Random(0), 40)  # noqa: S311
    for block, value in sent:
        trainer.send(Kind.GRAD, block, value)
        server.send(Kind.PARAM, block, value)
    assert server.next().header.kind is Kind.HYPER
    for end in (server, trainer):
        arrived = [end.next() for _ in sent]
        assert [(each.header.block, bytes(each.payload)) for each in arrived] == sent
    trainer.connection.finish(SECONDS)
    assert isinstance(server.next(), End)
    server.connection.close()


def test_an_answer_waits_for_the_frames_that_came_with_its_question(make):
    """Answers to frames of one call of the kernel leave in one, which wakes the other end once."""
    end, there = make(Side.SERVER)
    end.work = lambda _: end.send(Kind.CONFIRM)
    confirm = pack_header(header(Kind.CONFIRM))
    there.sendall(confirm * 5)
    assert there.recv(1 << 16) == confirm * 5
