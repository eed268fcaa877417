"""Where gradients land on a server: in memory that a trainer shares, or in buffers whose bytes are bounded.

A block's sum has a place of its own, in which the gradient lands that begins it; between two sums the sync
mode keeps there the value from before the last step. What comes after it lands in a buffer until it is added,
and what comes too early waits there for those that are summed before it. A trainer for whom there is no
buffer stays in its socket. It waits only for those that come before it in the order of the sum: part of the
buffers is kept for gradients whose turn has come.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto
from math import prod
from typing import Final

import torch
from torch import Tensor

from fleet.parameter_server.transport.arena import Extent, bytes_of
from fleet.parameter_server.transport.shared_memory import SharedBlocks

__all__ = ["Buffer", "ReceiveBuffers", "Turn"]

_SHARE: Final = 4
_ALIGNMENT_BYTES: Final = 64
_LEAST_BYTES: Final = 1 << 20
"""Buffers hold the n-th part of the blocks' bytes, but at least so many, and two of the largest block."""


class Turn(Enum):
    """When a gradient is used that is about to land."""

    FIRST = auto()
    """At once: it begins its block's sum."""
    NEXT = auto()
    """As soon as it has landed."""
    LATER = auto()
    """After others that have not come yet."""


class _Kind(Enum):
    SUM = auto()
    POOLED = auto()
    APART = auto()


@dataclass(slots=True, eq=False)
class Buffer:
    """Where one gradient lies, or a sum of gradients."""

    block: int
    tensor: Tensor
    bytes: memoryview
    kind: _Kind
    given_by: "_Region | None" = None
    """Where the memory goes back to."""

    @property
    def stays(self) -> bool:
        """Whether a sum may lie here: others need no such buffer."""
        return self.kind is not _Kind.POOLED

    @property
    def in_place(self) -> bool:
        """Whether this is the block's own place for a sum."""
        return self.kind is _Kind.SUM


class _Region:
    """Memory of a fixed size, handed out in runs; its pages are the system's before they are first used."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._memory: Tensor | None = None
        self._taken: dict[int, int] = {}
        """Where each run begins and ends, in ascending order."""

    def take(self, num_bytes: int) -> Tensor | None:
        """Return a run, the first one that fits; None while there is none."""
        begin, size = 0, _aligned(num_bytes)
        for taken, end in self._taken.items():
            if taken - begin >= size:
                break
            begin = end
        if self._num_bytes - begin < size:
            return None
        if self._memory is None:
            self._memory = torch.empty(self._num_bytes, dtype=torch.uint8)
        self._taken = dict(sorted([*self._taken.items(), (begin, begin + size)]))
        return self._memory[begin : begin + num_bytes]

    def give_back(self, run: Tensor) -> None:
        """Let a run be handed out again."""
        del self._taken[int(run.storage_offset()) * run.element_size()]


class ReceiveBuffers:
    """The buffers of one server.

    Parameters
    ----------
    extents : mapping of int to Extent
        The server's blocks.
    most_bytes : int, optional
        How much the buffers may hold, sums apart.
    """

    def __init__(self, extents: Mapping[int, Extent], most_bytes: int | None = None) -> None:
        self.changed = threading.Condition()
        """Guards the buffers, and what else decides whose turn it is; tell it when that changes."""
        self._extents = extents
        self._bytes = {block: prod(each.shape) * each.dtype.itemsize for block, each in extents.items()}
        largest = max(map(_aligned, self._bytes.values()), default=0)
        share = max(sum(self._bytes.values()) // _SHARE, _LEAST_BYTES) if most_bytes is None else most_bytes
        self._regions = _Region(max(share - largest, largest)), _Region(largest)
        """For every gradient, and for those alone whose turn has come."""
        self._sums: dict[int, Buffer] = {}
        self._begun: set[int] = set()
        """Blocks whose place for a sum is in use."""
        self._shared: dict[int, tuple[SharedBlocks, dict[int, Tensor]]] = {}
        self._landing: dict[int, Buffer] = {}
        """Where the gradient lands that each trainer is sending; who is held has none."""
        self._hurried: Counter[int] = Counter()
        self.held: set[int] = set()
        """Trainers for whom there is no buffer at present."""

    def share(self, trainer: int, memory: SharedBlocks | None) -> None:
        """Let a trainer's gradients lie in its own memory; in this process's without any."""
        with self.changed:
            self.forget(trainer)
            if memory is not None:
                self._shared[trainer] = memory, memory.tensors(self._extents)
            else:
                self._shared.pop(trainer, None)

    def land(self, trainer: int, block: int, turn: Callable[[], Turn]) -> memoryview:
        """Return where the gradient lands that a trainer is about to send; wait while there is no buffer.

        Parameters
        ----------
        trainer, block : int
            A second call about the same gradient returns the same bytes.
        turn : callable
            Asked with the lock held, whenever something has changed.
        """
        with self.changed:
            landing = self._landing.get(trainer)
            if landing is None or landing.block != block:
                self.forget(trainer)
                landing = self._landing[trainer] = self._await(trainer, block, turn)
            return landing.bytes

    def landing(self, trainer: int) -> Buffer:
        """Return where the gradient is that a trainer is sending."""
        return self._landing[trainer]

    def landed(self, trainer: int) -> Buffer:
        """Take the gradient that a trainer has sent; `release` it when it is not needed any more."""
        return self._landing.pop(trainer)

    def release(self, buffer: Buffer) -> None:
        """Give a buffer back; with the lock held."""
        match buffer.kind:
            case _Kind.SUM:
                self._begun.discard(buffer.block)
            case _Kind.POOLED if buffer.given_by is not None:
                buffer.given_by.give_back(buffer.tensor)
        self.changed.notify_all()

    def is_begun(self, block: int) -> bool:
        """Whether a block's place for a sum is in use; with the lock held."""
        return block in self._begun

    def begin_sum(self, first: Buffer) -> Buffer:
        """Return where the sum is that begins with this gradient; its buffer is needed no more."""
        if first.stays:
            return first
        with self.changed:
            total = self.place(first.block)
        total.tensor.copy_(first.tensor)
        with self.changed:
            self.release(first)
        return total

    def place(self, block: int) -> Buffer:
        """Take a block's place for a sum; where that is in use, memory of its own. With the lock held."""
        if block in self._begun:
            return self._buffer(block, self._new(block), _Kind.APART)
        if block not in self._sums:
            self._sums[block] = self._buffer(block, self._new(block), _Kind.SUM)
        self._begun.add(block)
        return self._sums[block]

    def forget(self, trainer: int) -> None:
        """Give back what a trainer's gradient was landing in, which will not come; with the lock held."""
        landing = self._landing.pop(trainer, None)
        if landing is not None:
            self.release(landing)

    @contextmanager
    def hurry(self, trainer: int) -> Iterator[None]:
        """Hold a trainer up no more: whoever ends its connection waits for the thread that receives."""
        with self.changed:
            self._hurried[trainer] += 1
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self._hurried[trainer] -= 1

    def _await(self, trainer: int, block: int, turn: Callable[[], Turn]) -> Buffer:
        if trainer in self._shared:
            memory, tensors = self._shared[trainer]
            return Buffer(block, tensors[block], memory[block], _Kind.APART)
        while True:
            now = turn()
            if now is Turn.FIRST and block not in self._begun:
                return self.place(block)
            for region in self._regions[: 1 if now is Turn.LATER else 2]:
                if (run := region.take(self._bytes[block])) is not None:
                    return self._buffer(block, run, _Kind.POOLED, region)
            if self._hurried[trainer]:
                return self._buffer(block, self._new(block), _Kind.POOLED)
            self.held.add(trainer)
            self.changed.wait()
            self.held.discard(trainer)

    def _new(self, block: int) -> Tensor:
        return torch.empty(self._bytes[block], dtype=torch.uint8)

    def _buffer(self, block: int, memory: Tensor, kind: _Kind, region: _Region | None = None) -> Buffer:
        extent = self._extents[block]
        tensor = memory.view(extent.dtype).view(extent.shape)
        return Buffer(block, tensor, bytes_of(tensor), kind, region)


def _aligned(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
