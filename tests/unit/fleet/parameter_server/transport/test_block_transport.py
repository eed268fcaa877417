"""What each end shares with the other: a gradient stays as it is until the server needs it no more."""

from collections.abc import Mapping
from typing import Any, cast

import pytest

from fleet.parameter_server.transport.block_transport import Codec, SharedMemoryTransport, StreamTransport
from fleet.parameter_server.transport.shared_memory import SharedBlocks
from fleet.plan.blocks import PlannedBlock
from fleet.wire import Header, Kind

BLOCKS = {0: 4, 1: 4}


def block(number: int) -> PlannedBlock:
    return PlannedBlock(number, "p", "p@GRAD", "p", (1,), "float32", 0, 0, (1,), 0, "127.0.0.1:1", 0)


class Stream:
    """Numbers frames as a stream does, and keeps the last one."""

    def __init__(self) -> None:
        self.number = 0
        self.last: tuple[bytes, bool] = (b"", False)
        self.on_send: Any = None

    def send(self, kind: Kind, payload: bytes | memoryview, *, shared: bool = False, **_: int) -> int:
        self.number += 1
        self.last = (bytes(payload), shared)
        if self.on_send is not None:
            self.on_send()
        return self.number


@pytest.fixture
def stream() -> Stream:
    return Stream()


@pytest.fixture
def kept() -> Mapping[int, memoryview]:
    return {number: memoryview(bytearray(size)) for number, size in BLOCKS.items()}


@pytest.fixture
def codec(kept: Mapping[int, memoryview]) -> Codec:
    return Codec([block(0), block(1)], "", lambda number: kept[number])


class Ends:
    """A trainer's transport with both memories as the server sees them."""

    def __init__(self, stream: Stream, codec: Codec) -> None:
        own = SharedBlocks.create(BLOCKS)
        self.gradients = SharedBlocks.receive(own.descriptor, BLOCKS, writable=True)
        self.values = SharedBlocks.create(BLOCKS)
        mapped = SharedBlocks.receive(self.values.descriptor, BLOCKS, writable=False)
        self.trainer = SharedMemoryTransport(cast("Any", stream), codec, own, mapped, copies=True)
        self.server = SharedMemoryTransport(
            cast("Any", stream), codec, self.values, self.gradients, copies=False
        )
        self._stream = stream

    def put(self, number: int, gradient: bytes) -> bool:
        """Submit a gradient; return whether it went through shared memory."""
        self.trainer.submit(Kind.GRAD, 0, number, memoryview(gradient))
        payload, shared = self._stream.last
        assert payload == (b"" if shared else gradient)
        return shared

    def answer(self, number: int, taken: int, kind: Kind = Kind.UNCHANGED) -> None:
        self.trainer.poll(Header(kind, 0, 0, 0, block=number, taken=taken))


@pytest.fixture
def ends(stream: Stream, codec: Codec) -> Ends:
    return Ends(stream, codec)


def test_blocks_follow_their_headers_and_land_in_their_receive_buffers(stream, codec, kept):
    transport = StreamTransport(cast("Any", stream), codec)
    transport.submit(Kind.GRAD, 3, 0, memoryview(b"aaaa"))
    assert stream.last == (b"aaaa", False)
    assert transport.register(1) is kept[1]
    assert transport.poll(Header(Kind.PARAM, 0, 0, 0, block=1)) is None


def test_a_gradient_may_be_overwritten_once_it_is_answered(ends):
    assert ends.put(0, b"aaaa")  # frame 1
    assert ends.put(1, b"bbbb")
    assert not ends.put(0, b"cccc")
    assert (bytes(ends.gradients[0]), bytes(ends.gradients[1])) == (b"aaaa", b"bbbb")
    ends.answer(0, taken=3, kind=Kind.PARAM)
    assert ends.put(0, b"dddd")
    assert not ends.put(1, b"eeee")
    assert (bytes(ends.gradients[0]), bytes(ends.gradients[1])) == (b"dddd", b"bbbb")


def test_an_answer_to_what_came_before_a_gradient_does_not_free_it(ends):
    ends.put(0, b"aaaa")
    ends.answer(0, taken=0)
    assert not ends.put(0, b"bbbb")
    assert bytes(ends.gradients[0]) == b"aaaa"


def test_a_gradient_that_travelled_because_of_another_must_be_answered_as_well(ends):
    ends.put(0, b"aaaa")
    ends.put(0, b"bbbb")
    ends.answer(0, taken=1)
    assert not ends.put(0, b"cccc")
    ends.answer(0, taken=3)
    assert ends.put(0, b"dddd")


def test_a_gradient_of_another_size_is_left_to_its_frame_to_be_refused(ends):
    assert not ends.put(0, b"a")
    assert bytes(ends.gradients[0]) == bytes(4)


def test_an_answer_that_is_faster_than_the_note_of_what_it_answers_counts(ends, stream):
    stream.on_send = lambda: ends.answer(0, taken=1)
    ends.put(0, b"aaaa")
    stream.on_send = None
    assert ends.put(0, b"bbbb")


def test_a_server_shares_what_lies_in_its_memory_and_nothing_else(ends, stream):
    ends.server.submit(Kind.PARAM, 0, 1, ends.values[1])
    assert stream.last == (b"", True)
    ends.server.submit(Kind.PARAM, 0, 1, memoryview(b"copy"))
    assert stream.last == (b"copy", False)


def test_each_end_finds_what_the_other_one_has_written(ends):
    ends.values[1][:] = b"wwww"
    found = ends.trainer.poll(Header(Kind.PARAM, 0, 0, 0, block=1, shared=True))
    assert bytes(found) == b"wwww"
    ends.put(0, b"gggg")
    assert ends.server.poll(Header(Kind.GRAD, 0, 0, 0, block=0, shared=True)) is ends.gradients[0]
