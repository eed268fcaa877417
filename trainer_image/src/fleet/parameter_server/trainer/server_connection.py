"""A trainer's session with one server, whichever data connection carries it.

A connection that breaks while the server lives is opened again, by a thread of its own: the training thread
only notices that it waits longer. Whether the server lives is the heartbeat's business to say.
"""

import logging
import threading
from typing import TYPE_CHECKING, Final

from fleet.errors import FleetError
from fleet.parameter_server.control.heartbeat import Heartbeat
from fleet.parameter_server.trainer.awaited import AwaitedValues
from fleet.parameter_server.trainer.dialer import Dialer
from fleet.parameter_server.trainer.parameters import ParameterStore
from fleet.parameter_server.trainer.route import Route
from fleet.parameter_server.trainer.rows import TrainerRows
from fleet.parameter_server.trainer.waits import Waits
from fleet.parameter_server.transport.arena import copy_bytes
from fleet.parameter_server.transport.block_transport import BlockTransport, Codec
from fleet.parameter_server.transport.connection import BrokenConnectionError, End, Frame
from fleet.parameter_server.transport.stream import ResumableStream
from fleet.plan.config import DistributedMode
from fleet.plan.job import TrainerPlan
from fleet.process import progress
from fleet.wire import Identity, Kind, Side
from fleet.wire.messages import read_error, read_numbers

if TYPE_CHECKING:
    from fleet.plan.blocks import PlannedBlock

__all__ = ["ServerConnection"]

_LOOK_SECONDS: Final = 0.05
_FAREWELL_SECONDS: Final = 1.0
_log = logging.getLogger(__name__)


class ServerConnection:
    """Sends gradients to one server, and lets its answers land.

    Parameters
    ----------
    plan : TrainerPlan
    route : Route
    server : int
        Its index in the plan.
    identity : Identity
        Which start of which trainer this is.
    incarnation : str
        The life of the server that this trainer has joined.
    store : ParameterStore
        Where values land.
    values : AwaitedValues
        What is told of each answer.
    waits : Waits
        What is told of an end.
    heartbeat : Heartbeat
        Knows whether the server lives.
    rows : TrainerRows
        What is told of tables.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        route: Route,
        server: int,
        identity: Identity,
        incarnation: str,
        store: ParameterStore,
        values: AwaitedValues,
        waits: Waits,
        heartbeat: Heartbeat,
        rows: TrainerRows,
    ) -> None:
        self.server = server
        self.blocks: dict[int, PlannedBlock] = {block.id: block for block in plan.blocks_on(server)}
        self.completed_trainers: frozenset[int] | None = None
        """The trainers that had completed with this server when it heard that this one has."""
        self.has_ended = False
        """Whether the server has taken leave: nothing more comes, and all is well."""
        self._store = store
        self._in_step = plan.mode is DistributedMode.SYNC and plan.custom is None
        self._values = values
        self._waits = waits
        self._heartbeat = heartbeat
        self._rows = rows
        codec = Codec(self.blocks.values(), waits.settings.wire_dtype, store.landing)
        peer = f"parameter server {route.endpoint}"
        self.stream = ResumableStream(peer, Side.TRAINER, identity, codec.buffer_of, self._deliver)
        self._dialer = Dialer(
            route, identity, incarnation, self.stream, codec, waits.settings, rows.row_bytes
        )

    @property
    def endpoint(self) -> str:
        """The server's, for messages."""
        return self._dialer.endpoint

    @property
    def holds(self) -> bool:
        """Whether the server has some of the model: blocks, or shards of tables."""
        return bool(self.blocks) or bool(self._rows)

    @property
    def transport(self) -> BlockTransport:
        """How blocks travel, once it is connected."""
        return self._dialer.transport

    def connect(self) -> None:
        """Open the first data connection; see `Dialer.open`."""
        self._dialer.open()
        self._dialer.check_shares()

    def send(self, kind: Kind, payload: bytes | memoryview = b"", step: int = 0) -> int:
        """Enqueue a frame; return how many there are now."""
        return self.stream.send(kind, payload, step=step)

    def close(self) -> None:
        """End the session: with what is enqueued where it has come to its end, else at once."""
        self._dialer.close()
        if self.completed_trainers is not None:
            self.stream.finish(_FAREWELL_SECONDS)
        else:
            self.stream.close()

    def _deliver(self, event: Frame | End) -> None:
        """Act on what the stream brings."""
        if isinstance(event, End):
            self._end(event.error)
            return
        header, payload = event
        if header.kind is Kind.ERROR:
            raise read_error(bytes(payload))
        if header.kind is Kind.COMPLETE:
            self.completed_trainers = frozenset(read_numbers(bytes(payload)))
            self.stream.send(Kind.GOODBYE)
        elif header.kind in (Kind.PARAM, Kind.UNCHANGED):
            found = self._dialer.transport.poll(header)
            if found is not None:
                self._take_shared(header.block, found)
            self._values.landed(header.block, header.step, changed=header.kind is Kind.PARAM)

        elif header.kind in (Kind.ROWS, Kind.STEPPED):
            self._rows.landed(self.server, header, memoryview(payload))

    def _take_shared(self, block: int, value: memoryview) -> None:
        """Take a value from the server's memory.

        In sync mode it lies there unchanged until this trainer has sent the next gradient, and before that
        it is adopted: so it can wait there. Any other mode may change it as soon as its frame is taken.
        """
        if self._in_step:
            self._store.lies(block, value)
        else:
            copy_bytes(value, self._store.landing(block))

    def _end(self, error: FleetError | None) -> None:
        """Open another connection for one that broke; pass any other end on."""
        if self._dialer.closing.is_set():
            return
        if isinstance(error, BrokenConnectionError):
            _log.warning("%s; connecting again", error)
            self._heartbeat.connection_lost(self.server, error)
            name = f"fleet-reconnect {self.endpoint}"
            threading.Thread(target=self._reconnect, name=name, daemon=True).start()
        elif error is not None:
            self._waits.fail(error)
        else:
            self.has_ended = True
            self._waits.wake()

    def _reconnect(self) -> None:
        try:
            resent = self._dialer.open(self._lives_since)
        except FleetError as error:
            if not self._dialer.closing.is_set():
                self._waits.fail(error)
            return
        progress.count("reconnections", 1)
        progress.count("frames_resent", resent)
        _log.warning(
            "the data connection with parameter server %s is back; %d frames were sent again",
            self.endpoint,
            resent,
        )
        self._heartbeat.connection_regained(self.server)

    def _lives_since(self, since: float) -> bool:
        """Wait until the server is known to have lived later than that; FleetError when it never will.

        Returns
        -------
        bool
            False where this end closes meanwhile.
        """
        while self._heartbeat.lived(self.server) <= since:
            self._waits.check()
            if self._dialer.closing.wait(_LOOK_SECONDS):
                return False
        self._waits.check()  # in another life it answers as well
        return True
