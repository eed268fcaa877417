"""Blocks reach the other end rounded where asked to, and one in shared memory stays until it is answered."""

from collections.abc import Mapping
from typing import Any, cast

import pytest
import torch

from fleet.parameter_server.transport.arena import LazyBytes, bytes_of
from fleet.parameter_server.transport.block_transport import Codec, SharedMemoryTransport, StreamTransport
from fleet.parameter_server.transport.shared_memory import SharedBlocks
from fleet.plan.blocks import PlannedBlock
from fleet.wire import Header, Kind

BLOCKS = {0: 4, 1: 4}


def block(number: int, shape: tuple[int, ...], dtype: str = "float32") -> PlannedBlock:
    name = f"p{number}"
    return PlannedBlock(number, name, f"{name}@GRAD", name, shape, dtype, 0, 0, shape, 0, "127.0.0.1:1", 0)


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
    return Codec([block(0, (1,)), block(1, (1,))], "", lambda number: kept[number])


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


def travels(here: Codec, there: Codec, content: memoryview) -> int:
    """Send block 0 from one end to the other; return how many bytes that took."""
    travelling = here.encode(0, content)
    assert isinstance(travelling, LazyBytes)
    travelling.read(0, there.receive_buffer(0))
    there.decode(0)
    return len(travelling)


def test_a_block_is_rounded_on_its_way_and_keeps_its_dtype():
    sent = torch.randn(2, 3)
    kept = torch.zeros(2, 3)
    here, there = (Codec([block(0, (2, 3))], "bfloat16", lambda _: bytes_of(kept)) for _ in range(2))
    assert travels(here, there, bytes_of(sent)) == here.block_bytes[0] == 12
    assert torch.equal(kept, sent.bfloat16().float())


def test_what_is_read_when_it_leaves_is_rounded_then_run_by_run():
    value, kept = torch.randn(100), torch.zeros(100)
    codec = Codec([block(0, (100,))], "bfloat16", lambda _: bytes_of(kept))

    def read(begin: int, into: memoryview) -> None:
        into[:] = bytes_of(value)[begin : begin + len(into)]

    travelling = codec.encode(0, LazyBytes(400, read))
    assert isinstance(travelling, LazyBytes)
    value += 1.0
    for begin, end in ((0, 128), (128, 200)):
        travelling.read(begin, codec.receive_buffer(0)[begin:end])
    codec.decode(0)
    assert torch.equal(kept, value.bfloat16().float())


def test_what_is_short_or_empty_or_a_whole_number_travels_as_it_is():
    blocks = [block(0, (4,), "bfloat16"), block(1, (0, 3)), block(2, (4,), "int64")]
    kept = {number: memoryview(bytearray(size)) for number, size in enumerate((8, 0, 32))}
    codec = Codec(blocks, "bfloat16", lambda number: kept[number])
    assert codec.block_bytes == {0: 8, 1: 0, 2: 32}
    for number, buffer in kept.items():
        assert codec.encode(number, buffer) is buffer
        assert codec.receive_buffer(number) is buffer
        codec.decode(number)


def test_without_a_dtype_nothing_is_converted():
    kept = memoryview(bytearray(16))
    assert Codec([block(0, (4,))], "", lambda _: kept).encode(0, kept) is kept
