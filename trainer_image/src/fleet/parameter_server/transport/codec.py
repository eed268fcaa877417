"""Tensors as they travel: in the dtype in which they are kept, or in a shorter one.

They are converted where a connection begins and where it ends, so that training modes and optimizers see
the dtype of the parameters only. Neither end keeps a second copy: what leaves is converted as it is sent, and
what comes lands in one buffer, from which it is converted before the next block comes.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from fleet.parameter_server.transport.arena import bytes_of, dtype_of
from fleet.parameter_server.transport.lazy import LazyBytes
from fleet.transpiler.block import PlannedBlock

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
        self._buffer_of = buffer_of
        self._short = short
        self._dtypes: dict[int, torch.dtype] = {}
        """Of the blocks that are converted, the dtypes in which they are kept."""
        self.block_bytes: dict[int, int] = {}
        """How many bytes of each block travel."""
        for block in blocks:
            own = travels = dtype_of(block.dtype)
            if short is not None and block.numel and own.is_floating_point and own.itemsize > short.itemsize:
                self._dtypes[block.id], travels = own, short
            self.block_bytes[block.id] = block.numel * travels.itemsize
        most_bytes = max((self.block_bytes[block] for block in self._dtypes), default=0)
        self._landed = memoryview(bytearray(most_bytes))

    def encode(self, block: int, content: memoryview | LazyBytes) -> memoryview | LazyBytes:
        """Return the bytes that travel for a block; what is converted is read when it leaves."""
        own, short = self._dtypes.get(block), self._short
        if own is None or short is None:
            return content

        def convert(begin: int, into: memoryview) -> None:
            first, length = (each * own.itemsize // short.itemsize for each in (begin, len(into)))
            if isinstance(content, LazyBytes):
                kept = torch.empty(length, dtype=torch.uint8)
                content.read(first, bytes_of(kept))
            else:
                kept = torch.frombuffer(content[first : first + length], dtype=torch.uint8)
            torch.frombuffer(into, dtype=short).copy_(kept.view(own))

        return LazyBytes(self.block_bytes[block], convert)

    def receive_buffer(self, block: int) -> memoryview:
        """Return where the bytes that travel for a block are to be written as they arrive."""
        if block in self._dtypes:
            return self._landed[: self.block_bytes[block]]
        return self._buffer_of(block)

    def decode(self, block: int) -> None:
        """Bring the block that has arrived last in its receive buffer to the memory in which it is kept."""
        if (own := self._dtypes.get(block)) is not None and self._short is not None:
            landed: Tensor = torch.frombuffer(self.receive_buffer(block), dtype=self._short)
            torch.frombuffer(self._buffer_of(block), dtype=own).copy_(landed)
