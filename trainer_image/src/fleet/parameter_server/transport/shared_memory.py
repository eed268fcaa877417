"""Memory that two processes on one host share, with a region for each block.

The memory is an anonymous file (memfd). One process passes its descriptor to the other over a Unix socket.
The file is sealed against shrinking, so that no later access to the mapping can fail. Both ends compute the
same layout from the blocks, so that a frame only needs to name its block.
"""

import fcntl
import mmap
import os
import sys
import weakref
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.transport.arena import Extent

__all__ = ["SharedBlocks"]

_ALIGNMENT_BYTES: Final = 64


class SharedBlocks:
    """A memory mapping with a region for each block; it is unmapped when nothing refers to it.

    Parameters
    ----------
    descriptor : int
        The descriptor of the memory, which is not closed here.
    block_bytes : mapping of int to int
        The size of each block in bytes; the blocks are laid out in the order of their numbers.
    writable : bool
        Whether this process may write to the memory.

    Raises
    ------
    OSError
        The memory cannot be mapped.
    """

    def __init__(self, descriptor: int, block_bytes: Mapping[int, int], *, writable: bool) -> None:
        begins, size = _lay_out(block_bytes)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapped = memoryview(mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=protection))
        self.descriptor = descriptor
        """The descriptor of the memory; valid as long as the owner of the descriptor keeps it open."""
        self._regions = {
            block: mapped[begins[block] : begins[block] + length] for block, length in block_bytes.items()
        }

    @classmethod
    def create(cls, block_bytes: Mapping[int, int]) -> "SharedBlocks":
        """Allocate zeroed memory that another process can map; the object owns the file descriptor.

        Raises
        ------
        OSError
            The system does not support such memory, or none is left.
        """
        if sys.platform != "linux":
            raise OSError("only Linux has memory that is sealed")
        descriptor = os.memfd_create("fleet-blocks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, _lay_out(block_bytes)[1])
            # Not F_SEAL_WRITE, because this process writes here in every step.
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
            created = cls(descriptor, block_bytes, writable=True)
        except BaseException:
            os.close(descriptor)
            raise
        weakref.finalize(created, os.close, descriptor)
        return created

    @classmethod
    def receive(cls, descriptor: int, block_bytes: Mapping[int, int], *, writable: bool) -> "SharedBlocks":
        """Map another process's memory from a file descriptor, which the caller must close.

        Raises
        ------
        RemoteProtocolError
            The memory is not sealed, or does not have the size of these blocks.
        OSError
            The memory cannot be mapped.
        """
        found, expected = os.fstat(descriptor).st_size, _lay_out(block_bytes)[1]
        try:
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
        except OSError:  # the descriptor does not refer to a memfd
            sealed = False
        # The peer could truncate a file without seals; the next access would then kill this process by
        # SIGBUS.
        if found != expected or not sealed:
            raise RemoteProtocolError(
                f"the peer shares {'' if sealed else 'un'}sealed memory of {found} bytes for "
                f"{len(block_bytes)} blocks, expected sealed memory of {expected}"
            )
        return cls(descriptor, block_bytes, writable=writable)

    def __getitem__(self, block: int) -> memoryview:
        """Return the memory region of a block; repeated calls return the same object."""
        return self._regions[block]

    def tensors(self, extents: Mapping[int, Extent]) -> dict[int, Tensor]:
        """Return the blocks as tensors in this memory. The memory must be writable."""
        return {
            # torch.frombuffer() refuses an empty buffer.
            block: torch.frombuffer(self._regions[block], dtype=extent.dtype).view(extent.shape)
            if self._regions[block]
            else torch.zeros(extent.shape, dtype=extent.dtype)
            for block, extent in extents.items()
        }


def _lay_out(block_bytes: Mapping[int, int]) -> tuple[dict[int, int], int]:
    """Return the offset of each block, and the total size of the memory."""
    begins: dict[int, int] = {}
    end = 0
    for block, length in sorted(block_bytes.items()):
        begins[block] = end
        end += -(-length // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    # At least one page: an empty file cannot be mapped.
    whole_pages = -(-max(end, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    return begins, whole_pages


_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW if sys.platform == "linux" else 0
