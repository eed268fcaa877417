"""A server's session with one trainer, whichever data connection carries it."""

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from fleet.errors import FleetError, RemoteProtocolError
from fleet.parameter_server.modes import Answer, ServerMode, Work
from fleet.parameter_server.server.memory_sharing import MemorySharing
from fleet.parameter_server.server.pacing import Pacing
from fleet.parameter_server.server.table_frames import TableFrames
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.transport.block_transport import Codec
from fleet.parameter_server.transport.connection import End, Frame
from fleet.parameter_server.transport.handshake import Caller
from fleet.parameter_server.transport.sockets import ConnectionEndedError
from fleet.parameter_server.transport.stream import Arrivals, ResumableStream, StreamEndedError
from fleet.process import progress
from fleet.wire import Header, Hello, Identity, Kind, Side
from fleet.wire.messages import pack_error, pack_numbers, read_error, read_hyper, read_numbers

__all__ = ["SessionOwner", "TrainerSession"]

_log = logging.getLogger(__name__)


class SessionOwner(Protocol):
    """The server, as its sessions see it."""

    def begins(self, trainer: int) -> None:
        """Let a trainer begin a step; FleetError refuses it."""

    def step_to_answer(self, trainer: int, step: int) -> AbstractContextManager[int]:
        """Give the step whose values a trainer gets that asks for those of one."""

    def answer(self, answers: Sequence[Answer]) -> None:
        """Send values to the trainers that they are meant for."""

    def do(self, session: "TrainerSession", followed: Sequence[Answer] | Work, received_bytes: int) -> None:
        """Send what follows from a gradient that was so long, or do what it makes possible, now or soon."""

    def connected(self, session: "TrainerSession") -> None:
        """Take note that a session has a data connection."""

    def completes(self, trainer: int, step: int) -> None:
        """Take note that a trainer makes no more steps, before the others make one without it."""

    def completed(self, session: "TrainerSession") -> None:
        """Take note that a trainer has finished."""

    def ended(self, session: "TrainerSession", error: FleetError | None) -> None:
        """Take note that a session receives nothing more."""


@dataclass(slots=True)
class Ending:
    """How far a session has come to its end."""

    failure: FleetError | None = None
    """Why the trainer may not come back, where it may not."""
    left: threading.Event = field(default_factory=threading.Event)
    """Set once the trainer knows that the server knows that it has finished."""
    told: threading.Event = field(default_factory=threading.Event)
    """Set once the trainer has been told why it may not come back, or nobody can tell it any more."""


@dataclass(slots=True)
class _Resumption:
    """How a session resumes over another connection."""

    expected: Hello
    """How a trainer that means this server greets."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while it does."""
    name: str | None = None
    """The random name that the trainer's process has given the session; None before it has greeted."""
    reaches: bool = False
    """Whether the connection that there is leads to the trainer: not once it has opened another one."""


class TrainerSession:
    """Takes one trainer's frames to the training mode, and sends it what the server answers.

    Parameters
    ----------
    identity : Identity
        Which start of which trainer.
    owner : SessionOwner
    mode : ServerMode
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
        owner: SessionOwner,
        mode: ServerMode,
        expected: Hello,
        shard: Shard,
        wire_dtype: str,
        pacing: Pacing,
    ) -> None:
        trainer = identity.trainer
        self.identity = identity
        self.ending = Ending()
        self._mode = mode
        self._shard = shard
        self._owner = owner
        self._pacing = pacing
        self._resumption = _Resumption(expected)

        def land(block: int) -> memoryview:
            return shard.buffers.land(trainer, block, lambda: mode.turn(trainer, block))

        codec = Codec(shard.plan.blocks, wire_dtype, land)

        def buffer_of(header: Header) -> memoryview | None:
            if header.kind is Kind.GRAD and not header.shared:
                pacing.begin(trainer, header.step)
            return codec.buffer_of(header)

        self._stream = ResumableStream(f"trainer {trainer}", Side.SERVER, identity, buffer_of, self._deliver)
        self.arrivals = Arrivals(self._stream)
        """Whether anything comes from the trainer."""
        self._sharing = MemorySharing(trainer, shard, self._stream, codec)
        self._tables = TableFrames(
            mode, trainer, self._stream, lambda step: owner.step_to_answer(trainer, step)
        )
        self._asked = False
        """Whether it has asked for values: an answer that is older was meant for an earlier process."""

    @property
    def block_bytes(self) -> Mapping[int, int]:
        """How many bytes of each block travel."""
        return self._sharing.codec.block_bytes

    @property
    def row_bytes(self) -> Mapping[int, int]:
        """How many bytes a row of each table has."""
        return self._shard.tables.row_bytes

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
        with self._resumption.lock:
            again = self._resumption.name is not None
            self._fence(caller)
            shared = self._sharing.share(caller)
            ours = Hello(
                self._resumption.expected.incarnation,
                self._resumption.expected.num_blocks,
                caller.hello.session,
                self._stream.taken,
                bool(shared),
            )
            directions = caller.answer(ours, self.block_bytes, shared, self.row_bytes)
            self._owner.connected(self)
            try:
                resent = self._stream.attach(caller.connected, directions, caller.hello.taken)
            except StreamEndedError:
                self._check(caller.hello)  # the reason is worth more to the trainer than that there is an end
                raise
            self._resumption.reaches = True
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
        if self.ending.failure is not None:
            self.ending.told.set()

    def _fence(self, caller: Caller) -> None:
        """Take no more from the connection before, once the frame that it is at has been taken."""
        self._check(caller.hello)
        caller.check_waiting()  # else it would end the connection that has taken its place
        self._resumption.reaches = False
        self._resumption.name = caller.hello.session
        with self._sharing.hurry():
            self._stream.fence()
        self._check(caller.hello)  # again: the frame that this has waited for may have failed
        if self._stream.has_ended:
            raise ConnectionEndedError("this server has closed the session meanwhile")
        caller.check_waiting()

    def send_value(self, answer: Answer) -> None:
        """Enqueue a block's value, or that it was not stepped."""
        if not self._asked:
            return
        step, block = answer.step, answer.block
        if answer.of_table:
            self._stream.send(Kind.STEPPED, answer.value or b"", step=step, block=block)
        elif answer.changed:
            value = self._mode.value(self.identity.trainer, block) if answer.value is None else answer.value
            own = self._shard.store.view(block)
            self._sharing.transport.submit(Kind.PARAM, step, block, own if value is None else value)
        else:
            self._stream.send(Kind.UNCHANGED, step=step, block=block)

    def complete(self, completed: Collection[int]) -> None:
        """Enqueue the answer to COMPLETE: the trainers that have completed, this one among them."""
        self._stream.send(Kind.COMPLETE, pack_numbers(sorted(completed)))

    def fail(self, error: FleetError, timeout_seconds: float) -> None:
        """Tell the trainer of an error, now or when it comes back, and close."""
        self.ending.failure = error
        self._stream.send(Kind.ERROR, pack_error(error))
        reaches = self._resumption.reaches
        if self.finish(timeout_seconds) and reaches:
            self.ending.told.set()

    def finish(self, timeout_seconds: float) -> bool:
        """Send what is enqueued, and close; return whether there was a connection."""
        with self._sharing.hurry():
            return self._stream.finish(timeout_seconds)

    def abandon(self) -> None:
        """Close now: nobody comes to tell the trainer anything any more."""
        self.finish(0.0)
        self.ending.told.set()

    def _deliver(self, event: Frame | End) -> None:
        """Act on what the stream brings."""
        if isinstance(event, Frame):
            self._take(event)
            return
        self._pacing.ended(self.identity.trainer)
        self._owner.ended(self, event.error)

    def _take(self, frame: Frame) -> None:
        trainer, (header, payload) = self.identity.trainer, frame
        match header.kind:
            case Kind.GRAD:
                self._take_gradient(header)
            case Kind.LOOK_UP:
                self._tables.look_up(header, memoryview(payload), self.row_bytes[header.block])
            case Kind.ROW_GRADIENT:
                of = self.row_bytes[header.block]
                followed = self._tables.take_gradient(header, memoryview(payload), of)
                self._owner.do(self, followed, header.payload_bytes)
            case Kind.HYPER:
                self._owner.begins(trainer)
                self._mode.begin(trainer, header.step, read_hyper(bytes(payload)))
            case Kind.STEP_END:
                self._pacing.ended(trainer)
                self._owner.answer(self._mode.end(trainer, header.step, read_numbers(bytes(payload))))
            case Kind.PULL:
                self._asked = True
                with self._owner.step_to_answer(trainer, header.step) as step:
                    answers = self._mode.pull(trainer, step)
                if step != header.step:
                    answers = [replace(answer, step=header.step) for answer in answers]
                self._owner.answer(answers)
            case Kind.COMPLETE:
                self._owner.completes(trainer, self._mode.step_of(trainer))
                self._owner.answer(self._mode.complete(trainer))
                self._owner.completed(self)
            case Kind.CONFIRM:
                self._stream.send(Kind.CONFIRM)
            case Kind.GOODBYE:
                self.ending.left.set()
            case Kind.ERROR:
                raise read_error(bytes(payload))

    def _take_gradient(self, header: Header) -> None:
        """Take a gradient where it lies, and answer it, or have done what it makes possible."""
        if header.shared:
            self._sharing.transport.register(header.block)
        else:
            self._pacing.took(self.identity.trainer, header.payload_bytes)
        self._sharing.transport.poll(header)
        followed = self._mode.gradient(self.identity.trainer, header.block, header.step)
        self._owner.do(self, followed, header.payload_bytes)

    def _check(self, hello: Hello) -> None:
        if self.ending.failure is not None:
            raise self.ending.failure
        expected = self._resumption.expected
        if (hello.incarnation, hello.num_blocks) != (expected.incarnation, expected.num_blocks):
            raise RemoteProtocolError(f"the trainer greets {hello}, expected {expected}; it must join again")
        if self._resumption.name not in (None, hello.session):
            raise RemoteProtocolError(
                f"another process is trainer {self.identity.trainer} with attempt {self.identity.attempt} by "
                "now; give each trainer an id of its own (PADDLE_TRAINER_ID)"
            )
