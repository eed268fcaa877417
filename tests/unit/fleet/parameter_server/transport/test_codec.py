"""Tensors as they travel: rounded, whatever their shape, and left alone where they are short already."""

import torch

from fleet.parameter_server.transport.arena import bytes_of
from fleet.parameter_server.transport.block_transport import Codec
from fleet.parameter_server.transport.lazy import LazyBytes
from fleet.plan.blocks import PlannedBlock


def block(number: int, shape: tuple[int, ...], dtype: str = "float32") -> PlannedBlock:
    name = f"p{number}"
    return PlannedBlock(number, name, f"{name}@GRAD", name, shape, dtype, 0, 0, shape, 0, "127.0.0.1:1", 0)


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
