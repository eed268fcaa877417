"""Tensors as they travel: rounded, whatever their shape, and left alone where they are short already."""

import torch

from fleet.parameter_server.transport.arena import bytes_of
from fleet.parameter_server.transport.wire_form import WireForm
from fleet.transpiler.lowering import PlannedBlock


def block(number: int, shape: tuple[int, ...], dtype: str = "float32") -> PlannedBlock:
    size = int(torch.empty(shape).numel())
    name = f"p{number}"
    return PlannedBlock(
        number, name, f"{name}@GRAD", name, shape, dtype, 0, 0, size, shape, 0, "127.0.0.1:1", 0
    )


def test_a_block_is_rounded_on_its_way_and_keeps_its_dtype():
    here, there = (WireForm([block(0, (2, 3))], "bfloat16") for _ in range(2))
    sent = torch.randn(2, 3)
    kept = torch.zeros(2, 3)
    travelling = here.leaving(0, bytes_of(sent))
    assert len(travelling) == here.block_bytes[0] == 12
    landing = there.landing(0, bytes_of(kept))
    landing[:] = travelling
    there.landed(0, bytes_of(kept))
    assert torch.equal(kept, sent.bfloat16().float())


def test_what_is_short_or_empty_or_a_whole_number_travels_as_it_is():
    blocks = [block(0, (4,), "bfloat16"), block(1, (0, 3)), block(2, (4,), "int64")]
    form = WireForm(blocks, "bfloat16")
    assert form.block_bytes == {0: 8, 1: 0, 2: 32}
    for number in range(3):
        kept = memoryview(bytearray(form.block_bytes[number]))
        assert form.leaving(number, kept) is kept
        assert form.landing(number, kept) is kept
        form.landed(number, kept)


def test_without_a_dtype_nothing_is_converted():
    form = WireForm([block(0, (4,))], "")
    kept = memoryview(bytearray(16))
    assert form.leaving(0, kept) is kept
