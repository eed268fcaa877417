"""Where gradients land on a server: how much memory that takes, and who waits for whom."""

import pytest
import torch

from fleet.parameter_server.receive_buffers import ReceiveBuffers, Turn
from fleet.parameter_server.transport.arena import Extent
from fleet.parameter_server.transport.connection import NotYet

BLOCK_BYTES = 128
BLOCKS = {block: Extent(torch.float32, (32,)) for block in range(10)}


class Sender:
    """A trainer's connection, which tries again whenever it is resumed."""

    def __init__(self, buffers: ReceiveBuffers, trainer: int, block: int, turn: Turn) -> None:
        self.turn = turn
        self.has_landed = False
        self._buffers = buffers
        self._trainer = trainer
        self._block = block
        self._resume()

    def _resume(self) -> None:
        landing = self._buffers.land(self._trainer, self._block, lambda *_: self.turn, self._resume)
        self.has_landed = not isinstance(landing, NotYet)


def land(buffers: ReceiveBuffers, trainer: int, block: int, turn: Turn) -> None:
    assert not isinstance(buffers.land(trainer, block, lambda *_: turn, lambda: None), NotYet)


@pytest.fixture
def full() -> ReceiveBuffers:
    """Return buffers for three gradients, two of which wait for others; the third's turn may come."""
    buffers = ReceiveBuffers(BLOCKS, 3 * BLOCK_BYTES)
    for trainer in (7, 8):
        land(buffers, trainer, 0, Turn.LATER)
        buffers.take(trainer)
    return buffers


def test_who_comes_too_early_waits_while_a_gradient_whose_turn_has_come_lands(full):
    early = Sender(full, 9, 0, Turn.LATER)
    assert full.held == {9}
    land(full, 1, 0, Turn.NEXT)
    with full.changed:
        full.release(full.take(1))
        early.turn = Turn.NEXT
        full.changed.notify_all()
    assert early.has_landed
    assert not full.held


def test_a_sum_has_a_place_beside_the_buffers(full):
    for block in BLOCKS:
        land(full, 0, block, Turn.FIRST)
        assert full.take(0).stays


def test_a_gradient_that_is_landing_stays_in_its_place(full):
    first, again = (full.land(1, 0, lambda *_: Turn.NEXT, lambda: None) for _ in range(2))
    assert again is first


def test_the_buffer_of_a_gradient_that_never_came_is_free_for_others(full):
    land(full, 1, 0, Turn.NEXT)
    other = Sender(full, 2, 0, Turn.NEXT)
    assert full.held == {2}
    with full.changed:
        full.forget(1)
    assert other.has_landed


def test_a_trainer_whose_connection_has_ended_waits_for_no_buffer(full):
    land(full, 1, 0, Turn.NEXT)
    Sender(full, 2, 0, Turn.NEXT)
    with full.changed:
        full.forget(2)
    assert not full.held


def test_a_sum_that_begins_with_what_came_early_does_not_stay_in_a_buffer(full):
    land(full, 1, 0, Turn.NEXT)
    early = full.take(1)
    early.tensor.fill_(3.0)
    total = full.begin_sum(early)
    assert (total.stays, total.tensor[0].item()) == (True, 3.0)
    land(full, 2, 0, Turn.NEXT)


def test_buffers_are_used_again_whatever_the_sizes():
    """What is freed goes to no allocator, which might keep it for another thread."""
    extents = {block: Extent(torch.float32, (size,)) for block, size in enumerate((16, 48, 32, 64))}
    buffers = ReceiveBuffers(extents, 512)
    places = set()
    for trainer in range(8):
        for block in extents:
            land(buffers, trainer, block, Turn.LATER)
            with buffers.changed:
                landed = buffers.take(trainer)
                places.add(landed.tensor.untyped_storage().data_ptr())
                buffers.release(landed)
    assert len(places) == 1


def test_a_gap_between_buffers_is_used(full):
    land(full, 1, 3, Turn.NEXT)
    first = full.take(1)
    with full.changed:
        full.release(first)
    land(full, 2, 3, Turn.NEXT)
    assert full.take(2).tensor.data_ptr() == first.tensor.data_ptr()
