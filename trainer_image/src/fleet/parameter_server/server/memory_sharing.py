"""Whether one trainer and this server share memory: settled by each handshake of their session."""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.transport.block_transport import (
    BlockTransport,
    Codec,
    SharedMemoryTransport,
    StreamTransport,
)
from fleet.parameter_server.transport.handshake import Caller
from fleet.parameter_server.transport.shared_memory import SharedBlocks
from fleet.parameter_server.transport.stream import ResumableStream

__all__ = ["MemorySharing"]

_log = logging.getLogger(__name__)


class MemorySharing:
    """Chooses the transport of one trainer's blocks.

    Parameters
    ----------
    trainer : int
    shard : Shard
        Where values and gradients lie.
    stream : ResumableStream
    codec : Codec
    """

    def __init__(self, trainer: int, shard: Shard, stream: ResumableStream, codec: Codec) -> None:
        self.codec = codec
        self.transport: BlockTransport = StreamTransport(stream, codec)
        """How blocks travel since the last handshake."""
        self._trainer = trainer
        self._shard = shard
        self._stream = stream
        self._shared: SharedBlocks | None = None
        """The trainer's memory, where it shares this host; values then lie in the shard's."""

    def share(self, caller: Caller) -> Sequence[int]:
        """Settle whether memory is shared from here on.

        Returns
        -------
        sequence of int
            The descriptor of this server's memory, if it is.

        Raises
        ------
        RemoteProtocolError
            That differs from an earlier connection of the session.
        """
        values, hello = self._shard.shared_values, caller.hello
        offered = hello.shared and (self._shared is not None or len(caller.descriptors) > 0)
        shares = values is not None and offered
        if self._stream.taken and shares != (self._shared is not None):
            raise RemoteProtocolError(
                "the trainer shared memory on one connection of its session and not on another; it must join "
                "again"
            )
        if not shares or self._shared is None:
            self._shared = self._map(caller.descriptors[0]) if shares else None
            self._shard.buffers.share(self._trainer, self._shared)
            self.transport = StreamTransport(self._stream, self.codec)
        if values is None or self._shared is None:
            return []
        if not isinstance(self.transport, SharedMemoryTransport):
            self.transport = SharedMemoryTransport(
                self._stream, self.codec, values, self._shared, copies=False
            )
        return [values.descriptor]

    def hurry(self) -> AbstractContextManager[None]:
        """Hold the trainer up no more, until the context's end; see `ReceiveBuffers.hurry`."""
        return self._shard.buffers.hurry(self._trainer)

    def _map(self, descriptor: int) -> SharedBlocks | None:
        """Map a trainer's memory; None, so that its tensors come over the socket, where that fails."""
        try:
            return SharedBlocks.receive(descriptor, self._shard.block_bytes, writable=True)
        except OSError as error:
            _log.debug("trainer %d's memory cannot be mapped: %s", self._trainer, error)
            return None
