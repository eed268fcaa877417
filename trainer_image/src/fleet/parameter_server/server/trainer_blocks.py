"""The blocks of one trainer's session on the server: its gradients come in, the values that answer go out."""

import logging
from collections.abc import Mapping, Sequence

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.modes import Answer, ServerMode
from fleet.parameter_server.server.pacing import Pacing
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.transport.block_transport import (
    BlockTransport,
    SharedMemoryTransport,
    StreamTransport,
)
from fleet.parameter_server.transport.codec import Codec
from fleet.parameter_server.transport.handshake import Caller
from fleet.parameter_server.transport.shared_memory import SharedBlocks, copy_bytes
from fleet.parameter_server.transport.stream import ResumableStream
from fleet.wire import Header, Kind

__all__ = ["TrainerBlocks"]

_log = logging.getLogger(__name__)


class TrainerBlocks:
    """Moves one trainer's blocks, over its stream or through memory that it shares.

    Parameters
    ----------
    trainer : int
    mode : ServerMode
    shard : Shard
        The blocks of this server, and where values and gradients lie.
    stream : ResumableStream
    codec : Codec
        Its receive buffers are those of the mode.
    pacing : Pacing
    """

    def __init__(
        self,
        trainer: int,
        mode: ServerMode,
        shard: Shard,
        stream: ResumableStream,
        codec: Codec,
        pacing: Pacing,
    ) -> None:
        self._trainer = trainer
        self._mode = mode
        self._shard = shard
        self._stream = stream
        self._codec = codec
        self._pacing = pacing
        self._shared: SharedBlocks | None = None
        """The trainer's memory, where it shares this host; values then lie in the shard's."""
        self._transport: BlockTransport = StreamTransport(stream, codec)
        self._asked = False
        """Whether it has asked for values: an answer that is older was meant for an earlier process."""

    @property
    def block_bytes(self) -> Mapping[int, int]:
        """How many bytes of each block travel."""
        return self._codec.block_bytes

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
            self._shard.lay_gradients(self._trainer, self._shared)
            self._transport = StreamTransport(self._stream, self._codec)
        if values is None or self._shared is None:
            return []
        if not isinstance(self._transport, SharedMemoryTransport):
            self._transport = SharedMemoryTransport(
                self._stream, self._codec, values, self._shared, copies=False
            )
        return [values.descriptor]

    def take(self, header: Header) -> None:
        """Bring a gradient that has come to where the mode expects it."""
        if header.shared and self._shared is None:
            raise RemoteProtocolError("a gradient is said to lie in shared memory, and there is none")
        if not header.shared:
            self._pacing.took(self._trainer, header.payload_bytes)
        found = self._transport.poll(header)
        if found is not None:
            destination = self._mode.destination(self._trainer, header.block)
            if found is not destination:  # a mode may have memory of its own
                copy_bytes(found, destination)

    def ask(self) -> None:
        """Note that the trainer has asked for values, and takes them from here on."""
        self._asked = True

    def send(self, answer: Answer) -> None:
        """Send a block's value, or that it was not stepped."""
        if not self._asked:
            return
        step, block = answer.step, answer.block
        if answer.changed:
            self._transport.submit(Kind.PARAM, step, block, self._mode.value(self._trainer, block))
        else:
            self._stream.send(Kind.UNCHANGED, step=step, block=block)

    def end_step(self) -> None:
        """Note that no more gradients come for the step in progress."""
        self._pacing.ended(self._trainer)

    def _map(self, descriptor: int) -> SharedBlocks | None:
        """Map a trainer's memory; None, so that its tensors come over the socket, where that fails."""
        try:
            return SharedBlocks.receive(descriptor, self._shard.block_bytes, writable=True)
        except OSError as error:
            _log.debug("trainer %d's memory cannot be mapped: %s", self._trainer, error)
            return None
