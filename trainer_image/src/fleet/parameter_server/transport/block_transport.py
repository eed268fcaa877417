"""The transport of blocks within a session, with an interface that other transports can implement.

The frames about blocks always use the resumable stream, in order. The transport decides where a block's bytes
are: after the frame's header (`StreamTransport`, over TCP or a Unix socket), or in memory that both ends
share (`SharedMemoryTransport`). A native or an RDMA transport would be a third class.

On the wire a tensor may have a shorter dtype than in memory (`Codec`). It is converted at both ends of a
connection, so that training modes and optimizers see only the dtype of the parameters. Neither end keeps a
second copy: a block is converted as it is sent. The receiving end has a single buffer for all blocks, from
which each block is converted before the next one arrives.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.transport.arena import LazyBytes, bytes_of, copy_bytes, dtype_of
from fleet.parameter_server.transport.connection import NotYet
from fleet.parameter_server.transport.shared_memory import SharedBlocks
from fleet.parameter_server.transport.stream import ResumableStream
from fleet.plan.blocks import PlannedBlock
from fleet.wire import Header, Kind

__all__ = ["BlockTransport", "Codec", "SharedMemoryTransport", "StreamTransport"]


class Codec:
    """The conversion of a session's blocks between their own dtype and the dtype on the wire.

    Parameters
    ----------
    blocks : iterable of PlannedBlock
        The blocks of the session.
    dtype : str
        ``bfloat16``, for blocks of longer floating-point numbers; empty for no conversion.
    buffer_of : callable
        Returns the memory for a block's received values, in the block's own dtype, or `NotYet`; later calls
        for the same values return the same memory.

    Attributes
    ----------
    block_bytes : dict of int to int
        The size of each block on the wire in bytes.
    converted : dict of int to torch.dtype
        The converted blocks, each with its own dtype.
    """

    def __init__(
        self,
        blocks: Iterable[PlannedBlock],
        dtype: str,
        buffer_of: Callable[[int], memoryview | NotYet],
    ) -> None:
        short = dtype_of(dtype) if dtype else torch.float32  # unused if no block is converted
        self.block_bytes: dict[int, int] = {}
        self.converted: dict[int, torch.dtype] = {}
        self._buffer_of = buffer_of
        self._short = short
        for block in blocks:
            sent = own = dtype_of(block.dtype)
            if dtype and block.numel and own.is_floating_point and own.itemsize > short.itemsize:
                self.converted[block.id], sent = own, short
            self.block_bytes[block.id] = block.numel * sent.itemsize
        most_bytes = max((self.block_bytes[block] for block in self.converted), default=0)
        self._landing = memoryview(bytearray(most_bytes))
        """The buffer in which converted blocks are received, one at a time."""

    def encode(self, block: int, content: memoryview | LazyBytes) -> memoryview | LazyBytes:
        """Return the bytes to send for a block; a block that needs conversion is read only when sent."""
        own, short = self.converted.get(block), self._short
        if own is None:
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

    def buffer_of(self, header: Header) -> memoryview | NotYet | None:
        """Return the receive buffer for a frame's payload, or None if the payload is not a block.

        Returns `NotYet` if the block's own memory, to which it will be converted, is not free.
        """
        if header.kind not in (Kind.GRAD, Kind.PARAM) or header.shared:
            return None
        block = header.block
        own = self._buffer_of(block)
        if block in self.converted and not isinstance(own, NotYet):
            return self._landing[: self.block_bytes[block]]
        return own

    def receive_buffer(self, block: int) -> memoryview:
        """Return the buffer that receives the bytes of a block."""
        return self._landing[: self.block_bytes[block]] if block in self.converted else self._own(block)

    def decode(self, block: int) -> None:
        """Convert a received block to its own dtype, and write it to its own memory."""
        if (own := self.converted.get(block)) is not None:
            landed = torch.frombuffer(self.receive_buffer(block), dtype=self._short)
            torch.frombuffer(self._own(block), dtype=own).copy_(landed)

    def _own(self, block: int) -> memoryview:
        memory = self._buffer_of(block)
        if isinstance(memory, NotYet):
            raise RemoteProtocolError(f"block {block} has no receive buffer, expected one before its bytes")
        return memory


class BlockTransport(Protocol):
    """One end of a session's transport of blocks. `register` and `poll` are called in frame order."""

    def register(self, block: int) -> memoryview:
        """Return the buffer for a block's bytes that follow the frame's header."""

    def submit(self, kind: Kind, step: int, block: int, content: memoryview | LazyBytes) -> None:
        """Send a block. Unless lazy, its bytes must not change until the peer has received the frame.

        Parameters
        ----------
        kind : Kind
            ``GRAD`` or ``PARAM``.
        step, block : int
        content : memoryview or LazyBytes
            The bytes of the block, in its own dtype.
        """

    def poll(self, header: Header) -> memoryview | None:
        """Accept a block after its frame has arrived; called once for each frame with a block.

        Returns
        -------
        memoryview or None
            The block's bytes, in its own dtype; None if they are in its registered memory.
        """


class StreamTransport:
    """A transport that sends a block as the payload of its frame.

    Parameters
    ----------
    stream : ResumableStream
    codec : Codec
    """

    def __init__(self, stream: ResumableStream, codec: Codec) -> None:
        self._stream = stream
        self._codec = codec

    def register(self, block: int) -> memoryview:
        """Return the buffer that receives a block."""
        return self._codec.receive_buffer(block)

    def submit(self, kind: Kind, step: int, block: int, content: memoryview | LazyBytes) -> None:
        """Send a frame with a block as its payload."""
        if block in self._codec.converted:
            content = self._codec.encode(block, content)
        more = kind is Kind.GRAD  # the end of the step follows
        self._stream.send(kind, content, step=step, block=block, more=more)

    def poll(self, header: Header) -> memoryview | None:
        """Accept a block that is complete in its receive buffer."""
        if header.block in self._codec.converted and header.kind is not Kind.UNCHANGED:
            self._codec.decode(header.block)
        return None


class SharedMemoryTransport(StreamTransport):
    """A transport that passes blocks through memory shared by both ends; frames have no payload.

    Each end writes only to its own memory. It may overwrite a block there once the other end has received the
    block's frame and then answered the block: until then a mode may still have to sum the block, and the
    frame may have to be resent. If a block is submitted before that, its bytes follow the header, as between
    two hosts. The other end then receives them into the same region, over the previous block.

    Parameters
    ----------
    stream : ResumableStream
    codec : Codec
        For blocks that follow their headers.
    own : SharedBlocks
        The memory that this end writes and the other one reads.
    theirs : SharedBlocks
        The memory that the other end writes.
    copies : bool
        Whether a block outside this end's memory is copied there. False on a server, because all trainers
        read its memory: a server shares only blocks that are already there.
    """

    def __init__(
        self, stream: ResumableStream, codec: Codec, own: SharedBlocks, theirs: SharedBlocks, *, copies: bool
    ) -> None:
        super().__init__(stream, codec)
        self._own = own
        self._theirs = theirs
        self._copies = copies
        self._submitted: dict[int, int] = {}
        """For each block, the number of frames sent up to and including its latest frame."""
        self._answered: dict[int, int] = {}
        """For each block, the number of received frames that the other end reported in its latest answer."""

    def submit(self, kind: Kind, step: int, block: int, content: memoryview | LazyBytes) -> None:
        """Copy a block to this end's shared memory if its region is free, then send the frame."""
        # The views are compared by identity: `SharedBlocks` returns the same view in each call, and equal
        # bytes elsewhere are not shared.
        shared = content is self._own[block] or (
            self._copies and not isinstance(content, LazyBytes) and self._put(block, content)
        )
        payload = b"" if shared else self._codec.encode(block, content)
        self._submitted[block] = self._stream.send(kind, payload, shared=shared, step=step, block=block)

    def poll(self, header: Header) -> memoryview | None:
        """Accept a block; return its bytes in the peer's memory, unless they were the frame's payload."""
        # The number may be older than the answer. Then the next block follows its header, which is always
        # correct.
        self._answered[header.block] = header.taken
        return self._theirs[header.block] if header.shared else super().poll(header)

    def _put(self, block: int, content: memoryview) -> bool:
        """Copy a block to this end's memory; return False if the peer may still read the previous one.

        A block of the wrong size is not copied either: sent as a payload, it is refused with an error that
        names it.
        """
        memory = self._own[block]
        if len(content) != len(memory) or self._answered.get(block, 0) < self._submitted.get(block, 0):
            return False
        copy_bytes(content, memory)
        return True
