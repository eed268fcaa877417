"""Tensors as they travel: in the dtype in which they are kept, or in a shorter one.

They are converted where a connection begins and where it ends, so that training modes and optimizers see
the dtype of the parameters only.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of, dtype_of
from fleet.transpiler.lowering import PlannedBlock

__all__ = ["Codec"]


class Codec:
    """Converts the blocks of one session; passes them as they are where no dtype is given.

    Parameters
    ----------
    blocks : iterable of PlannedBlock
        What the session carries.
    dtype : str
        ``bfloat16``, for blocks of longer floating-point numbers; empty for none.
    buffer_of : callable
        Returns the memory, by block, in which the values that arrive are kept, in the blocks' own dtypes.
    """

    def __init__(
        self, blocks: Iterable[PlannedBlock], dtype: str, buffer_of: Callable[[int], memoryview]
    ) -> None:
        short = dtype_of(dtype) if dtype else None
        kept = {block.id: (dtype_of(block.dtype), block) for block in blocks}
        extents = {
            number: Extent(short, block.shape)
            for number, (own, block) in kept.items()
            if short is not None and block.numel and own.is_floating_point and own.itemsize > short.itemsize
        }
        self._buffer_of = buffer_of
        self._dtypes = {number: kept[number][0] for number in extents}
        self._encoded, self._received = Arena(extents), Arena(extents)
        self._encoded_bytes = {number: bytes_of(self._encoded[number]) for number in extents}
        self._received_bytes = {number: bytes_of(self._received[number]) for number in extents}
        self.block_bytes = {
            number: block.numel
            * (short.itemsize if short is not None and number in extents else own.itemsize)
            for number, (own, block) in kept.items()
        }
        """How many bytes of each block travel."""

    def encode(self, block: int, content: memoryview) -> memoryview:
        """Return the bytes that travel for a block, in memory that the block's next ones overwrite."""
        if block not in self._dtypes:
            return content
        self._encoded[block].copy_(self._tensor(block, content))
        return self._encoded_bytes[block]

    def receive_buffer(self, block: int) -> memoryview:
        """Return where the bytes that travel for a block are to be written as they arrive."""
        return self._received_bytes[block] if block in self._dtypes else self._buffer_of(block)

    def decode(self, block: int) -> None:
        """Bring a block that has arrived in its receive buffer to the memory in which it is kept."""
        if block in self._dtypes:
            self._tensor(block, self._buffer_of(block)).copy_(self._received[block])

    def _tensor(self, block: int, kept: memoryview) -> Tensor:
        shape = self._encoded[block].shape
        return torch.frombuffer(kept, dtype=self._dtypes[block]).view(shape)
