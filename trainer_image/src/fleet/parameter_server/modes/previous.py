"""The value that each block had before its last step, for a trainer that comes back in the middle of one.

A trainer that is killed between two of its gradients leaves blocks that were stepped with what it had sent,
here or on another server, and blocks that still wait for it. It comes back at the step of the latter, and
computes on the values of that step: of the former on those before their last step.

They cost no memory over TCP. The value before a step is asked for only until a trainer sends a gradient of
the next one, as that trainer has seen all servers make the step. So it lies in the place of the block's sum,
until the next sum begins there: the last gradient's buffer takes what is there of the sum, and so the place
is free before the step. Where one gradient is the sum, or a norm is awaited, the value is set aside
meanwhile. Where trainers share memory sums lie in theirs, and this place is taken beside.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fleet.parameter_server.modes.rounds import Rounds
from fleet.parameter_server.receive_buffers import Buffer, Turn
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.transport.arena import bytes_of, copy_bytes

__all__ = ["PreviousValues"]


class PreviousValues:
    """Keeps the values of one server's blocks from before their last steps.

    Parameters
    ----------
    shard : Shard
    rounds : Rounds
        Guarded by the lock of the shard's buffers. A block's round knows where the value lies.
    """

    def __init__(self, shard: Shard, rounds: Rounds) -> None:
        self._store = shard.store
        self._buffers = shard.buffers
        self._rounds = rounds
        self._largest_bytes = max(shard.block_bytes.values(), default=0)
        self._aside: list[Tensor] = []
        """Where values lie while their blocks are stepped; as many as were ever stepped at once."""

    @contextmanager
    def kept(self, block: int) -> Iterator[Buffer]:
        """Keep a block's value, which the caller steps meanwhile; give where it lies afterwards."""
        round_, value = self._rounds.of[block], self._store.view(block)
        place, total = round_.before, round_.total
        if place is None and total is not None and total.in_place:
            aside = self._take_aside()
            copy = aside[: len(value)]
            if value:
                copy.copy_(torch.frombuffer(value, dtype=torch.uint8))  # which leaves it in the caches
            yield total
            copy_bytes(bytes_of(copy), total.bytes)
            self._aside.append(aside)
            return
        if place is None:
            with self._buffers.changed:
                place = self._buffers.place(block)
        copy_bytes(value, place.bytes)
        yield place

    def value(self, block: int, step: int) -> memoryview | None:
        """Return the value that a block had after so many steps, None if it is gone; with the lock held."""
        round_ = self._rounds.of[block]
        if step == round_.step or (step == round_.step - 1 and round_.unchanged):
            return self._store.view(block)
        if step == round_.step - 1 and round_.before is not None:
            return round_.before.bytes
        return None

    def turn(self, trainer: int, block: int, step: int) -> Turn:
        """Return when a gradient is used, and let one that is summed first land; with the lock held."""
        turn = self._rounds.turn(trainer, block, step)
        if turn is Turn.FIRST:
            self.make_room(block)
        return turn

    def make_room(self, block: int) -> None:
        """Let a sum begin in a block's place, unless what is there may be asked for; with the lock held."""
        round_ = self._rounds.of[block]
        if round_.before is not None and not self._rounds.returning:
            self._buffers.release(round_.before)
            round_.before = None

    def _take_aside(self) -> Tensor:
        try:
            return self._aside.pop()
        except IndexError:
            return torch.empty(self._largest_bytes, dtype=torch.uint8)
