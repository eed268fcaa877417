"""How the bytes of a block get from one end of a session to the other: the seam for further transports.

The frames that tell of blocks always go over the resumable stream, in order. Where a block's bytes are then
is the transport's business: behind the frame's header (`StreamTransport`, over TCP or a Unix socket), or in
memory that both ends share (`SharedMemoryTransport`). A native or an RDMA transport would be a third class.
"""

from typing import Protocol

from fleet.parameter_server.transport.codec import Codec
from fleet.parameter_server.transport.lazy import LazyBytes
from fleet.parameter_server.transport.shared_memory import SharedBlocks, copy_bytes
from fleet.parameter_server.transport.stream import ResumableStream
from fleet.wire import Header, Kind

__all__ = ["BlockTransport", "SharedMemoryTransport", "StreamTransport"]


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
