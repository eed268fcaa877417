"""Tensors as they travel: in the dtype in which they are kept, or in a shorter one.

They are converted where a connection begins and where it ends, so that training modes and optimizers see
the dtype of the parameters only.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of, dtype_of
from fleet.transpiler.lowering import PlannedBlock

__all__ = ["WireForm"]


class WireForm:
    """The memory of one connection's blocks in a shorter dtype; none where they travel as they are.

    Parameters
    ----------
    blocks : iterable of PlannedBlock
        What the connection carries.
    dtype : str
        ``bfloat16``, for blocks of longer floating-point numbers; empty for none.
    """

    def __init__(self, blocks: Iterable[PlannedBlock], dtype: str) -> None:
        short = dtype_of(dtype) if dtype else None
        kept = {block.id: (dtype_of(block.dtype), block) for block in blocks}
        extents = {
            number: Extent(short, block.shape)
            for number, (own, block) in kept.items()
            if short is not None and block.numel and own.is_floating_point and own.itemsize > short.itemsize
        }
        self._dtypes = {number: kept[number][0] for number in extents}
        self._leaving, self._arriving = Arena(extents), Arena(extents)
        self._leaving_bytes = {number: bytes_of(self._leaving[number]) for number in extents}
        self._arriving_bytes = {number: bytes_of(self._arriving[number]) for number in extents}
        self.block_bytes = {
            number: block.numel
            * (short.itemsize if short is not None and number in extents else own.itemsize)
            for number, (own, block) in kept.items()
        }
        """How many bytes of each block travel."""

    def leaving(self, block: int, kept: memoryview) -> memoryview:
        """Return the bytes of a block that are to leave, in memory that the block's next ones overwrite."""
        if block not in self._dtypes:
            return kept
        self._leaving[block].copy_(self._tensor(block, kept))
        return self._leaving_bytes[block]

    def landing(self, block: int, kept: memoryview) -> memoryview:
        """Return where arriving bytes of a block belong, which is to be kept in this memory."""
        return self._arriving_bytes.get(block, kept)

    def landed(self, block: int, kept: memoryview) -> None:
        """Bring a block that has arrived to the memory in which it is kept."""
        if block in self._dtypes:
            self._tensor(block, kept).copy_(self._arriving[block])

    def _tensor(self, block: int, kept: memoryview) -> Tensor:
        shape = self._leaving[block].shape
        return torch.frombuffer(kept, dtype=self._dtypes[block]).view(shape)
