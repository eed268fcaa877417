"""A server's session with one trainer, whichever data connection carries it."""

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Protocol

from fleet.errors import FleetError, RemoteProtocolError
from fleet.parameter_server.modes import Answer, ServerMode
from fleet.parameter_server.server.pacing import Pacing
from fleet.parameter_server.server.trainer_blocks import TrainerBlocks
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.transport.codec import Codec
from fleet.parameter_server.transport.connection import End, Frame
from fleet.parameter_server.transport.handshake import Caller
from fleet.parameter_server.transport.sockets import ConnectionEndedError
from fleet.parameter_server.transport.stream import ResumableStream, StreamEndedError
from fleet.process import progress
from fleet.wire import Header, Hello, Identity, Kind, Side
from fleet.wire.messages import pack_error, pack_numbers, read_error, read_hyper, read_numbers

__all__ = ["SessionOwner", "TrainerSession"]

_log = logging.getLogger(__name__)


class SessionOwner(Protocol):
    """The server, as its sessions see it."""

    def answer(self, answers: Sequence[Answer]) -> None:
        """Send values to the trainers that they are meant for."""

    def begins(self, trainer: int) -> None:
        """Let a trainer begin a step; FleetError refuses it."""

    def connected(self, session: "TrainerSession") -> None:
        """Take note that a session has a data connection."""

    def completed(self, session: "TrainerSession", step: int) -> None:
        """Take note that a trainer has finished."""

    def ended(self, session: "TrainerSession", error: FleetError | None) -> None:
        """Take note that a session receives nothing more."""


class TrainerSession:
    """Takes one trainer's frames to the training mode, and sends it what the server answers.

    Parameters
    ----------
    identity : Identity
        Which start of which trainer.
    mode : ServerMode
    owner : SessionOwner
    expected : Hello
        How a trainer that means this server greets.
    shard : Shard
        The blocks of this server, and where values and gradients lie.
    wire_dtype : str
        As of `Codec`.
    pacing : Pacing
        The server's.
    """

    def __init__(
        self,
        identity: Identity,
        mode: ServerMode,
        owner: SessionOwner,
        expected: Hello,
        shard: Shard,
        wire_dtype: str,
        pacing: Pacing,
    ) -> None:
        trainer = identity.trainer
        self.identity = identity
        self.failure: FleetError | None = None
        """Why this trainer may not come back, where it may not."""
        self.left = threading.Event()
        """Set once the trainer knows that the server knows that it has finished."""
        self.told = threading.Event()
        """Set once the trainer has been told why it may not come back, or nobody can tell it any more."""
        self._mode = mode
        self._owner = owner
        self._expected = expected
        self._name: str | None = None
        """The random name that the trainer's process has given the session; None before it has greeted."""
        codec = Codec(shard.plan.blocks, wire_dtype, partial(mode.destination, trainer))

        def buffer_of(header: Header) -> memoryview | None:
            if header.kind is not Kind.GRAD or header.shared:
                return None
            pacing.begin(trainer, header.step)
            return codec.receive_buffer(header.block)

        self._stream = ResumableStream(f"trainer {trainer}", Side.SERVER, identity, buffer_of, self._deliver)
        self._blocks = TrainerBlocks(trainer, mode, shard, self._stream, codec, pacing)
        self._resuming = threading.Lock()
        self._reaches = False
        """Whether the connection that there is leads to the trainer: not once it has opened another one."""

    @property
    def block_bytes(self) -> Mapping[int, int]:
        """How many bytes of each block travel."""
        return self._blocks.block_bytes

    def resume(self, caller: Caller) -> None:
        """Go on over a new connection; what is still being taken from the one before is waited for.

        Parameters
        ----------
        caller : Caller
            The trainer, which waits to be greeted.

        Raises
        ------
        FleetError
            This trainer may not speak here, or not any more.
        OSError
            The connection broke.
        """
        with self._resuming:
            again = self._name is not None
            self._fence(caller)
            shared = self._blocks.share(caller)
            ours = Hello(
                self._expected.incarnation,
                self._expected.num_blocks,
                caller.hello.session,
                self._stream.taken,
                bool(shared),
            )
            directions = caller.answer(ours, self.block_bytes, shared)
            self._owner.connected(self)
            try:
                resent = self._stream.attach(caller.connected, directions, caller.hello.taken)
            except StreamEndedError:
                self._check(caller.hello)  # the reason is worth more to the trainer than that there is an end
                raise
            self._reaches = True
        if again:
            progress.count("reconnections", 1)
            progress.count("frames_resent", resent)
            _log.warning(
                "the data connection with trainer %d is back; %d frames were sent again",
                self.identity.trainer,
                resent,
            )

    def refused(self) -> None:
        """Take note that the trainer has been told why it may not come back, where that is so."""
        if self.failure is not None:
            self.told.set()

    def _fence(self, caller: Caller) -> None:
        """Take no more from the connection before, once the frame that it is at has been taken."""
        self._check(caller.hello)
        caller.check_waiting()  # else it would end the connection that has taken its place
        self._reaches = False
        self._name = caller.hello.session
        self._stream.fence()
        self._check(caller.hello)  # again: the frame that this has waited for may have failed
        if self._stream.has_ended:
            raise ConnectionEndedError("this server has closed the session meanwhile")
        caller.check_waiting()

    def send_value(self, answer: Answer) -> None:
        """Enqueue a block's value, or that it was not stepped."""
        self._blocks.send(answer)

    def complete(self, completed: Collection[int]) -> None:
        """Enqueue the answer to COMPLETE: the trainers that have completed, this one among them."""
        self._stream.send(Kind.COMPLETE, pack_numbers(sorted(completed)))

    def fail(self, error: FleetError, timeout_seconds: float) -> None:
        """Tell the trainer of an error, now or when it comes back, and close."""
        self.failure = error
        self._stream.send(Kind.ERROR, pack_error(error))
        reaches = self._reaches
        if self._stream.finish(timeout_seconds) and reaches:
            self.told.set()

    def finish(self, timeout_seconds: float) -> None:
        """Send what is enqueued, and close."""
        self._stream.finish(timeout_seconds)

    def abandon(self) -> None:
        """Close now: nobody comes to tell the trainer anything any more."""
        self.finish(0.0)
        self.told.set()

    def _deliver(self, event: Frame | End) -> None:
        """Act on what the stream brings."""
        if isinstance(event, Frame):
            self._take(event)
            return
        self._blocks.end_step()
        self._owner.ended(self, event.error)

    def _take(self, frame: Frame) -> None:
        trainer, (header, payload) = self.identity.trainer, frame
        match header.kind:
            case Kind.GRAD:
                self._blocks.take(header)
                self._owner.answer(self._mode.gradient(trainer, header.block, header.step))
            case Kind.HYPER:
                self._owner.begins(trainer)
                self._mode.begin(trainer, header.step, read_hyper(bytes(payload)))
            case Kind.STEP_END:
                self._blocks.end_step()
                self._owner.answer(self._mode.end(trainer, header.step, read_numbers(bytes(payload))))
            case Kind.PULL:
                self._blocks.ask()
                self._owner.answer(self._mode.pull(trainer))
            case Kind.COMPLETE:
                step = self._mode.step_of(trainer)  # before the others' next one may be made without it
                self._owner.answer(self._mode.complete(trainer))
                self._owner.completed(self, step)
            case Kind.CONFIRM:
                self._stream.send(Kind.CONFIRM)
            case Kind.GOODBYE:
                self.left.set()
            case Kind.ERROR:
                raise read_error(bytes(payload))

    def _check(self, hello: Hello) -> None:
        if self.failure is not None:
            raise self.failure
        expected = self._expected
        if (hello.incarnation, hello.num_blocks) != (expected.incarnation, expected.num_blocks):
            raise RemoteProtocolError(f"the trainer greets {hello}, expected {expected}; it must join again")
        if self._name not in (None, hello.session):
            raise RemoteProtocolError(
                f"another process is trainer {self.identity.trainer} with attempt {self.identity.attempt} by "
                "now; give each trainer an id of its own (PADDLE_TRAINER_ID)"
            )
