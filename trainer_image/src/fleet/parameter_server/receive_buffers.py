"""A server's receive buffers: bounded memory for arriving gradients, and one sum buffer for each block.

Each block has one sum buffer. The gradient that begins a sum lands there; between two sums the sync mode
keeps the previous value there. Later gradients of the block, and gradients that arrive before their turn,
land in pooled buffers until they are added. If no buffer is free, a gradient stays in its trainer's socket,
and no thread waits for it: the change that may free a buffer resumes the trainer's connection. The gradient
waits there only for gradients of trainers that come earlier in the order of the sum, because one region of
the pool is reserved for gradients whose turn has come. Trainers that share memory with the server need no
buffers.
"""

import threading
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from enum import Enum, auto
from math import prod
from typing import Final

import torch
from torch import Tensor

from fleet.parameter_server.transport.arena import Extent
from fleet.parameter_server.transport.connection import NotYet
from fleet.parameter_server.transport.shared_memory import SharedBlocks

__all__ = ["Buffer", "ReceiveBuffers", "Turn"]

_SHARE: Final = 4
"""The pool has 1/n of the bytes of all blocks, but at least `_LEAST_BYTES` and twice the largest block."""
_LEAST_BYTES: Final = 1 << 20
_ALIGNMENT_BYTES: Final = 64


class Turn(Enum):
    """When an arriving gradient is to be added to its block's sum."""

    FIRST = auto()
    """Immediately: the gradient begins the block's sum."""
    NEXT = auto()
    """As soon as the gradient has landed."""
    LATER = auto()
    """After other gradients that have not arrived yet."""


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory for a gradient or a sum."""

    block: int
    tensor: Tensor
    bytes: memoryview
    stays: bool
    """Whether a sum may stay here; False in the pool, because other gradients need the memory."""
    in_place: bool = False
    """Whether this is the block's own sum buffer."""
    region: "_Region | None" = None
    """The region of the pool to which the memory returns; None for memory outside the pool."""


class _Region:
    """A memory region of fixed size from which buffers are allocated."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._memory: Tensor | None = None
        self._taken: dict[int, int] = {}
        """The end of each allocated range, by its start, in ascending order."""

    def take(self, num_bytes: int) -> Tensor | None:
        """Allocate the first free range that is large enough; return None if there is none."""
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

    def free(self, run: Tensor) -> None:
        """Free an allocated range."""
        # The tensor has the dtype of its block, so its offset counts elements, not bytes.
        del self._taken[int(run.storage_offset()) * run.element_size()]


class _Changes(threading.Condition):
    """A condition variable that also resumes connections waiting for a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.resumes: dict[int, Callable[[], None]] = {}
        """For each trainer that waits for a buffer, the function that resumes its connection."""

    def notify_all(self) -> None:
        """Wake all waiting threads, and resume all connections that wait for a buffer."""
        super().notify_all()
        for trainer in list(self.resumes):
            # The caller holds the lock, but this only queues a call in the event loop.
            self.resumes.pop(trainer)()


class ReceiveBuffers:
    """All receive buffers and sum buffers of one server.

    Parameters
    ----------
    extents : mapping of int to Extent
        The server's blocks.
    most_bytes : int, optional
        The size of the pool, without the sum buffers.
    """

    def __init__(self, extents: Mapping[int, Extent], most_bytes: int | None = None) -> None:
        self.changed = _Changes()
        """Guards the buffers and the state that determines turns; notified when either changes."""
        self._extents = extents
        self._bytes = {block: prod(each.shape) * each.dtype.itemsize for block, each in extents.items()}
        largest = max(map(_aligned, self._bytes.values()), default=0)
        share = max(sum(self._bytes.values()) // _SHARE, _LEAST_BYTES) if most_bytes is None else most_bytes
        self._regions = _Region(max(share - largest, largest)), _Region(largest)
        """One region for any gradient, and one reserved for gradients whose turn has come."""
        self._sums: dict[int, Buffer] = {}
        self.begun: set[int] = set()
        """Blocks whose own sum buffer is in use."""
        self._shared: dict[int, tuple[SharedBlocks, dict[int, Tensor]]] = {}
        self._landing: dict[int, Buffer] = {}
        """The buffer of the gradient that each trainer is sending."""

    def share(self, trainer: int, memory: SharedBlocks | None) -> None:
        """Use shared memory for a trainer's gradients or, if `memory` is None, the server's own buffers."""
        with self.changed:
            self.forget(trainer)
            if memory is not None:
                self._shared[trainer] = memory, memory.tensors(self._extents)
            else:
                self._shared.pop(trainer, None)

    @property
    def held(self) -> Set[int]:
        """The trainers that wait for a buffer; the caller holds the lock."""
        return self.changed.resumes.keys()

    def land(
        self, trainer: int, block: int, turn: Callable[[int, int], Turn], resume: Callable[[], None]
    ) -> memoryview | NotYet:
        """Return a buffer for a gradient that a trainer is about to send, or `NotYet` if no buffer is free.

        Parameters
        ----------
        trainer, block : int
            The trainer and the block of the gradient. A second call for the same gradient returns the same
            bytes.
        turn : callable
            Returns the turn of this trainer's gradient of this block. Called with the lock held.
        resume : callable
            Called once, with the lock held, when a buffer may be free; the caller then tries again.
        """
        with self.changed:
            landing = self._landing.get(trainer)
            if landing is None or landing.block != block:
                if landing is not None:
                    self.forget(trainer)
                landing = self._find_buffer(trainer, block, turn)
                if landing is None:
                    self.changed.resumes[trainer] = resume
                    return NotYet()
                self._landing[trainer] = landing
            return landing.bytes

    def landing(self, trainer: int) -> Buffer:
        """Return the buffer of the gradient that a trainer is sending or has just sent."""
        return self._landing[trainer]

    def take(self, trainer: int) -> Buffer:
        """Return the buffer of a gradient that has arrived completely; the caller must release it."""
        return self._landing.pop(trainer)

    def release(self, buffer: Buffer) -> None:
        """Free a buffer; the caller holds the lock."""
        if buffer.in_place:
            self.begun.discard(buffer.block)
        elif buffer.region is not None:
            buffer.region.free(buffer.tensor)
        self.changed.notify_all()

    def begin_sum(self, first: Buffer) -> Buffer:
        """Copy a gradient to the block's sum buffer as the first summand, and free its own buffer."""
        with self.changed:
            total = self.sum_buffer(first.block)
        # Without the lock, which every arriving gradient needs.
        total.tensor.copy_(first.tensor)
        with self.changed:
            self.release(first)
        return total

    def sum_buffer(self, block: int) -> Buffer:
        """Return the block's sum buffer, or new memory if it is in use; the caller holds the lock."""
        if block in self.begun:
            return self._buffer(block, self._new(block), stays=True)
        if block not in self._sums:
            self._sums[block] = self._buffer(block, self._new(block), stays=True, in_place=True)
        self.begun.add(block)
        return self._sums[block]

    def forget(self, trainer: int) -> None:
        """Free the buffer of a gradient that will not arrive. The caller holds the lock."""
        # A trainer whose connection has ended waits for no buffer; `held` must not hide that it is missing.
        self.changed.resumes.pop(trainer, None)
        landing = self._landing.pop(trainer, None)
        if landing is not None:
            self.release(landing)

    def _find_buffer(self, trainer: int, block: int, turn: Callable[[int, int], Turn]) -> Buffer | None:
        if trainer in self._shared:
            memory, tensors = self._shared[trainer]
            return Buffer(block, tensors[block], memory[block], stays=True)
        now = turn(trainer, block)
        # The sum buffer may be in use: it keeps the previous value while a restarted trainer may request
        # that.
        if now is Turn.FIRST and block not in self.begun:
            return self.sum_buffer(block)
        # The second region is reserved for gradients whose turn has come: early ones must not block sums.
        for region in self._regions[: 1 if now is Turn.LATER else 2]:
            if (run := region.take(self._bytes[block])) is not None:
                return self._buffer(block, run, stays=False, region=region)
        return None

    def _new(self, block: int) -> Tensor:
        return torch.empty(self._bytes[block], dtype=torch.uint8)

    def _buffer(
        self,
        block: int,
        memory: Tensor,
        *,
        stays: bool,
        in_place: bool = False,
        region: _Region | None = None,
    ) -> Buffer:
        extent = self._extents[block]
        tensor = memory.view(extent.dtype).view(extent.shape)
        return Buffer(block, tensor, memoryview(memory.numpy().data), stays, in_place, region)


def _aligned(num_bytes: int) -> int:
    return -(-max(num_bytes, 1) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
