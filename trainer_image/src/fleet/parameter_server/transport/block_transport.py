"""How the bytes of a block get from one end of a session to the other: the seam for further transports.

The frames that tell of blocks always go over the resumable stream, in order. Where a block's bytes are then
is the transport's business: behind the frame's header (`StreamTransport`, over TCP or a Unix socket), or in
memory that both ends share (`SharedMemoryTransport`). A native or an RDMA transport would be a third class.

Behind a header a tensor may travel in a shorter dtype than the one in which it is kept (`Codec`). It is
converted where a connection begins and where it ends, so that training modes and optimizers see the dtype of
the parameters only. Neither end keeps a second copy: what leaves is converted as it is sent, and what comes
lands in one buffer, from which it is converted before the next block comes.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor

from fleet.parameter_server.transport.arena import bytes_of, copy_bytes, dtype_of
from fleet.parameter_server.transport.lazy import LazyBytes
from fleet.parameter_server.transport.shared_memory import SharedBlocks
from fleet.parameter_server.transport.stream import ResumableStream
from fleet.plan.blocks import PlannedBlock
from fleet.wire import Header, Kind

__all__ = ["BlockTransport", "Codec", "SharedMemoryTransport", "StreamTransport"]


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

    def buffer_of(self, header: Header) -> memoryview | None:
        """Return the receive buffer of what follows a header; None where that is not about a block."""
        follows = header.kind in (Kind.GRAD, Kind.PARAM) and not header.shared
        return self.receive_buffer(header.block) if follows else None

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


class BlockTransport(Protocol):
    """One end of a session's blocks. `register` and `poll` are called by the receiving thread alone."""

    def register(self, block: int) -> memoryview:
        """Return the receive buffer of a block: where bytes that follow a frame's header are written."""

    def submit(self, kind: Kind, step: int, block: int, content: memoryview | LazyBytes) -> None:
        """Send a block; the content must not change until the other end has the frame, if it is not lazy.

        Parameters
        ----------
        kind : Kind
            ``GRAD`` or ``PARAM``.
        step, block : int
        content : memoryview or LazyBytes
            The block in its own dtype.
        """

    def poll(self, header: Header) -> memoryview | None:
        """Take a block whose frame has come; called for every frame that is about a block.

        Returns
        -------
        memoryview or None
            Where it lies, in its own dtype, if that is not its registered memory.
        """


class StreamTransport:
    """Blocks follow the headers of their frames.

    Parameters
    ----------
    stream : ResumableStream
    codec : Codec
    """

    def __init__(self, stream: ResumableStream, codec: Codec) -> None:
        self._stream = stream
        self._codec = codec

    def register(self, block: int) -> memoryview:
        """Return where a block's bytes are to be written as they arrive."""
        return self._codec.receive_buffer(block)

    def submit(self, kind: Kind, step: int, block: int, content: memoryview | LazyBytes) -> None:
        """Send a block behind its frame's header."""
        self._stream.send(kind, self._codec.encode(block, content), step=step, block=block)

    def poll(self, header: Header) -> memoryview | None:
        """Take a block that has arrived in its receive buffer."""
        if header.kind is not Kind.UNCHANGED:
            self._codec.decode(header.block)
        return None


class SharedMemoryTransport:
    """Blocks lie in memory that both ends have mapped; their frames say so, and carry nothing.

    This end writes to its own memory only. What lies there may be overwritten once the other end needs it no
    more. That is so when the block was answered since, by an answer that was given after the other end had
    taken it: before, a mode may still have to sum it, and it may have to be sent again. A block that comes
    earlier travels behind its header, as between two hosts; the other end's receiving thread then writes it
    where the one before lay.

    Parameters
    ----------
    stream : ResumableStream
    codec : Codec
        Of blocks that travel behind their headers.
    own : SharedBlocks
        What this end writes and the other one reads.
    theirs : SharedBlocks
        What the other end writes.
    copies : bool
        Whether a block that lies elsewhere is copied to this end's memory. Not on a server, whose memory all
        trainers read: it only sends what lies there already.
    """

    def __init__(
        self, stream: ResumableStream, codec: Codec, own: SharedBlocks, theirs: SharedBlocks, *, copies: bool
    ) -> None:
        self._stream = stream
        self._codec = codec
        self._own = own
        self._theirs = theirs
        self._copies = copies
        self._submitted: dict[int, int] = {}
        """By block the number of the frame that it was sent with last."""
        self._answered: dict[int, int] = {}
        """By block how many frames the other end had taken when it answered last."""

    def register(self, block: int) -> memoryview:
        """Return where a block's bytes are to be written which do not come through shared memory."""
        return self._codec.receive_buffer(block)

    def submit(self, kind: Kind, step: int, block: int, content: memoryview | LazyBytes) -> None:
        """Lay a block into this end's memory where that is free, and tell of it."""
        shared = content is self._own[block] or (
            self._copies and not isinstance(content, LazyBytes) and self._put(block, content)
        )
        payload = b"" if shared else self._codec.encode(block, content)
        self._submitted[block] = self._stream.send(kind, payload, shared=shared, step=step, block=block)

    def poll(self, header: Header) -> memoryview | None:
        """Take a block; return where it lies in the other end's memory, unless it came behind its header."""
        self._answered[header.block] = header.taken
        if header.shared:
            return self._theirs[header.block]
        if header.kind is not Kind.UNCHANGED:
            self._codec.decode(header.block)
        return None

    def _put(self, block: int, content: memoryview) -> bool:
        """Copy a block to this end's memory, and return whether that could be done.

        Not where the one before may still be needed, nor if it does not fit: as a payload of its frame it is
        refused by name.
        """
        memory = self._own[block]
        if len(content) != len(memory) or self._answered.get(block, 0) < self._submitted.get(block, 0):
            return False
        copy_bytes(content, memory)
        return True
