"""A server's end of one trainer's session, whichever data connection carries it."""

import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from fleet import progress
from fleet.errors import FleetError, RemoteProtocolError
from fleet.parameter_server.modes import Answer, ServerMode
from fleet.parameter_server.server.pacing import Pacing
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.transport.handshake import Caller
from fleet.parameter_server.transport.line import Line, LineEndedError
from fleet.parameter_server.transport.shared_memory import SharedBlocks, copy_bytes
from fleet.parameter_server.transport.sockets import ConnectionEndedError
from fleet.parameter_server.transport.wire_form import WireForm
from fleet.wire import Header, Hello, Identity, Kind, Side
from fleet.wire.messages import pack_error, pack_numbers, read_error, read_hyper, read_numbers

__all__ = ["Link", "LinkOwner"]

_log = logging.getLogger(__name__)


class LinkOwner(Protocol):
    """The server, as its links see it."""

    def answer(self, answers: Sequence[Answer]) -> None:
        """Send values to the trainers that they are meant for."""

    def begins(self, trainer: int) -> None:
        """Let a trainer begin a step; FleetError refuses it."""

    def connected(self, link: "Link") -> None:
        """Take note that a link has a data connection."""

    def completed(self, link: "Link", step: int) -> None:
        """Take note that a trainer has finished."""

    def ended(self, link: "Link", error: FleetError | None) -> None:
        """Take note that a link receives nothing more."""


class Link:
    """Takes one trainer's frames to the training mode, and sends it what the server answers.

    Parameters
    ----------
    identity : Identity
        Which start of which trainer.
    mode : ServerMode
    owner : LinkOwner
    expected : Hello
        How a trainer that means this server greets.
    shard : Shard
        The blocks of this server, and where values and gradients lie.
    form : WireForm
        How they travel; this link's own.
    pacing : Pacing
        The server's.
    """

    def __init__(
        self,
        identity: Identity,
        mode: ServerMode,
        owner: LinkOwner,
        expected: Hello,
        shard: Shard,
        form: WireForm,
        pacing: Pacing,
    ) -> None:
        self.identity = identity
        self.form = form
        self.failure: FleetError | None = None
        """Why this trainer may not come back, where it may not."""
        self.left = threading.Event()
        """Set once the trainer knows that the server knows that it has finished."""
        self.told = threading.Event()
        """Set once the trainer has been told why it may not come back, or nobody can tell it any more."""
        self._mode = mode
        self._owner = owner
        self._expected = expected
        self._shard = shard
        self._pacing = pacing
        self._shared: SharedBlocks | None = None
        """The trainer's memory, where it shares this host; values then lie in the shard's."""
        self._asked = False
        """Whether it has asked for values: an answer that is older was meant for an earlier process."""
        self._session: str | None = None
        self._line = Line(f"trainer {identity.trainer}", Side.SERVER, identity, self)
        self._greeting = threading.Lock()
        self._reaches = False
        """Whether the connection that there is leads to the trainer: not once it has opened another one."""

    @property
    def block_bytes(self) -> Mapping[int, int]:
        """How many bytes of each block travel."""
        return self.form.block_bytes

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
        with self._greeting:
            again = self._session is not None
            self._fence(caller)
            shared = self._share(caller)
            ours = Hello(
                self._expected.incarnation,
                self._expected.num_blocks,
                caller.hello.session,
                self._line.taken,
                bool(shared),
            )
            directions = caller.answer(ours, self.block_bytes, shared)
            self._owner.connected(self)
            try:
                resent = self._line.attach(caller.connected, directions, caller.hello.taken)
            except LineEndedError:
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
        self._session = caller.hello.session
        self._line.fence()
        self._check(caller.hello)  # again: the frame that this has waited for may have failed
        if self._line.has_ended:
            raise ConnectionEndedError("this server has closed the session meanwhile")
        caller.check_waiting()

    def send_value(self, answer: Answer) -> None:
        """Enqueue a block's value, or that it was not stepped."""
        if not self._asked:
            return
        step, block = answer.step, answer.block
        if not answer.changed:
            self._line.send(Kind.UNCHANGED, step=step, block=block)
            return
        value, here = self._mode.value(self.identity.trainer, block), self._shard.shared_values
        if self._shared is not None and here is not None and value is here[block]:
            self._line.send(Kind.PARAM, shared=True, step=step, block=block)
        else:
            self._line.send(Kind.PARAM, self.form.leaving(block, value), step=step, block=block)

    def complete(self, completed: Collection[int]) -> None:
        """Enqueue the answer to COMPLETE: the trainers that have completed, this one among them."""
        self._line.send(Kind.COMPLETE, pack_numbers(sorted(completed)))

    def fail(self, error: FleetError, timeout_seconds: float) -> None:
        """Tell the trainer of an error, now or when it comes back, and close."""
        self.failure = error
        self._line.send(Kind.ERROR, pack_error(error))
        reaches = self._reaches
        if self._line.finish(timeout_seconds) and reaches:
            self.told.set()

    def finish(self, timeout_seconds: float) -> None:
        """Send what is enqueued, and close."""
        self._line.finish(timeout_seconds)

    def abandon(self) -> None:
        """Close now: nobody comes to tell the trainer anything any more."""
        self.finish(0.0)
        self.told.set()

    def destination(self, header: Header) -> memoryview | None:
        """Say where a gradient belongs that follows its header."""
        if header.kind is Kind.GRAD and not header.shared:
            self._pacing.begin(self.identity.trainer, header.step)
            kept = self._mode.destination(self.identity.trainer, header.block)
            return self.form.landing(header.block, kept)
        return None

    def received(self, header: Header, payload: memoryview) -> None:
        """Act on a frame."""
        trainer = self.identity.trainer
        match header.kind:
            case Kind.GRAD:
                if header.shared:
                    self._take_shared(header.block)
                else:
                    self._pacing.took(trainer, header.payload_bytes)
                    self.form.landed(header.block, self._mode.destination(trainer, header.block))
                self._owner.answer(self._mode.gradient(trainer, header.block, header.step))
            case Kind.HYPER:
                self._owner.begins(trainer)
                self._mode.begin(trainer, header.step, read_hyper(bytes(payload)))
            case Kind.STEP_END:
                self._pacing.ended(trainer)
                self._owner.answer(self._mode.end(trainer, header.step, read_numbers(bytes(payload))))
            case Kind.PULL:
                self._asked = True
                self._owner.answer(self._mode.pull(trainer))
            case Kind.COMPLETE:
                step = self._mode.step_of(trainer)  # before the others' next one may be made without it
                self._owner.answer(self._mode.complete(trainer))
                self._owner.completed(self, step)
            case Kind.CONFIRM:
                self._line.send(Kind.CONFIRM)
            case Kind.GOODBYE:
                self.left.set()
            case Kind.ERROR:
                raise read_error(bytes(payload))

    def ended(self, error: FleetError | None) -> None:
        """Pass the end on."""
        self._pacing.ended(self.identity.trainer)
        self._owner.ended(self, error)

    def _share(self, caller: Caller) -> Sequence[int]:
        """Settle whether memory is shared from here on; return the descriptor of this server's if it is."""
        values, hello, descriptors = self._shard.shared_values, caller.hello, caller.descriptors
        offered = hello.shared and (self._shared is not None or len(descriptors) > 0)
        shares = values is not None and offered
        if self._line.taken and shares != (self._shared is not None):
            raise RemoteProtocolError(
                "the trainer shared memory on one connection of its session and not on another; it must join "
                "again"
            )
        if not shares or self._shared is None:
            self._shared = self._map(descriptors[0]) if shares else None
            self._shard.lay_gradients(self.identity.trainer, self._shared)
        return [values.descriptor] if values is not None and self._shared is not None else []

    def _map(self, descriptor: int) -> SharedBlocks | None:
        """Map a trainer's memory; None, so that its tensors come over the socket, where that fails."""
        try:
            return SharedBlocks.receive(descriptor, self._shard.block_bytes, writable=True)
        except OSError as error:
            _log.debug("trainer %d's memory cannot be mapped: %s", self.identity.trainer, error)
            return None

    def _take_shared(self, block: int) -> None:
        """Let the mode find a gradient that the trainer has laid into its memory where it expects it.

        That is there already, unless a mode has a place of its own.
        """
        if self._shared is None:
            raise RemoteProtocolError("a gradient is said to lie in shared memory, and there is none")
        destination = self._mode.destination(self.identity.trainer, block)
        if destination is not self._shared[block]:
            copy_bytes(self._shared[block], destination)

    def _check(self, hello: Hello) -> None:
        if self.failure is not None:
            raise self.failure
        expected = self._expected
        if (hello.incarnation, hello.num_blocks) != (expected.incarnation, expected.num_blocks):
            raise RemoteProtocolError(f"the trainer greets {hello}, expected {expected}; it must join again")
        if self._session not in (None, hello.session):
            raise RemoteProtocolError(
                f"another process is trainer {self.identity.trainer} with attempt {self.identity.attempt} by "
                "now; give each trainer an id of its own (PADDLE_TRAINER_ID)"
            )
