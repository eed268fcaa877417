"""The trainers of a server: how they join and leave, and how their frames reach the mode."""

import contextlib
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from fleet.errors import FleetError, PeerLostError, RemoteProtocolError
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.modes import Answer, ServerMode
from fleet.parameter_server.pieces import lead_bytes
from fleet.parameter_server.server.barriers import Barriers
from fleet.parameter_server.server.membership import (
    Membership,
    check_agreement,
    check_identity,
    check_job,
)
from fleet.parameter_server.server.scheduling import LEAST_BYTES, Overrun, Pacing
from fleet.parameter_server.server.shard_loader import ShardLoader
from fleet.parameter_server.server.trainer_session import TrainerSession
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.transport.connection import BrokenConnectionError, End, Frame, Work
from fleet.parameter_server.transport.event_loop import EventLoop
from fleet.parameter_server.waits import name_trainers, wait_for_all
from fleet.process.resources import WatchClock, available_cores
from fleet.tables import RowGradients
from fleet.wire import Header, Hello, Identity, Kind, job_hash
from fleet.wire.messages import pack_numbers, read_error, read_hyper, read_numbers
from fleet.wire.rows import MOST_ROW_BYTES, pack_rows, read_ids, read_row_gradient

if TYPE_CHECKING:
    from fleet.role_maker import JobIdentity

__all__ = ["Serving", "Trainers"]

_FLOAT_BYTES: Final = 4
_LEAST_WORKERS: Final = 2
_ROW_BYTES_PER_ID_BYTE: Final = 8
"""The estimated size of the rows in an answer, in bytes for each byte of the look-up's ids."""
_OF_TABLES: Final = frozenset({Kind.LOOK_UP, Kind.ROW_GRADIENT})
_RARE: Final = frozenset({Kind.PULL, Kind.COMPLETE})
_FLUSH_SECONDS: Final = 10.0
_log = logging.getLogger(__name__)


class Serving:
    """The state of a server while it serves: its failure, if any, and whether it is closing."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        """Guards the membership; notified when the membership or this state changes."""
        self.incarnation = secrets.token_hex(8)
        """A random name, by which trainers distinguish this process of the server from a later one."""
        self.failure: FleetError | None = None
        self.is_closing = False

    def fail(self, error: FleetError) -> None:
        """End the service with an error. Any thread may call this; only the first error is kept."""
        with self.changed:
            if self.failure is None:
                self.failure = error
            self.changed.notify_all()

    def close(self) -> None:
        """End the service without an error."""
        with self.changed:
            self.is_closing = True
            self.changed.notify_all()

    def check(self) -> None:
        """Raise the error that ended the service, if there is one; the caller holds the lock."""
        if self.failure is not None:
            raise self.failure


class Trainers:
    """Admits a server's trainers, passes their frames to the mode, and sends the mode's answers.

    Parameters
    ----------
    shard : Shard
    mode : ServerMode
    job : JobIdentity
        The job of the server, to which its trainers must belong.
    agreement : mapping of str to str
        The facts on which a trainer must agree with the server.
    initial : mapping of str to str
        The facts about this process's state before the first step; a loaded checkpoint replaces them.
    settings : Settings
    serving : Serving
        The state of the service; its lock guards the membership.
    membership : Membership
    clock : WatchClock
        The clock of the membership.
    loader : ShardLoader
    barriers : Barriers
    """

    def __init__(
        self,
        shard: Shard,
        mode: ServerMode,
        job: "JobIdentity",
        agreement: Mapping[str, str],
        initial: Mapping[str, str],
        settings: Settings,
        serving: Serving,
        membership: Membership,
        clock: WatchClock,
        loader: ShardLoader,
        barriers: Barriers,
    ) -> None:
        self.membership = membership
        self.sessions: dict[int, TrainerSession] = {}
        """The session of each trainer that may still send frames."""
        self._shard = shard
        self._mode = mode
        self._job = job
        self._agreement = agreement
        self._initial = initial
        self._settings = settings
        self._serving = serving
        self._clock = clock
        self._loader = loader
        self._barriers = barriers
        lead = lead_bytes(shard.plan, settings)
        self._pacing = Pacing(lead) if lead is not None else None
        self._loop = EventLoop(max(_LEAST_WORKERS, available_cores()))
        self._step_bytes = dict(shard.block_bytes)
        """For each block, the bytes that one update changes: the blocks of a norm are updated together."""
        for norm in shard.plan.clipping.norms:
            together = sum(shard.block_bytes[block] for block in norm.blocks)
            self._step_bytes |= dict.fromkeys(norm.blocks, together)
        self._largest_bytes = max(self._step_bytes.values(), default=0)
        self._tables_in_pool: list[int] = []
        """The table of each long task in the pool. The task may hold the table's lock."""
        self._overrun = Overrun(mode.step_of, shard.plan.trainers)
        self._hello = Hello(serving.incarnation, len(shard.plan.blocks))
        self._joining = threading.Lock()
        """Held while a trainer joins, so that only one joins at a time."""

    def start(self) -> None:
        """Start the event loop for the trainers' data connections."""
        self._loop.start()

    def close(self) -> None:
        """Close all sessions without notifying the trainers."""
        for session in list(self.sessions.values()):
            session.abandon()
        self._loop.close()

    def join(self, request: control_pb2.JoinRequest) -> tuple[str, int]:
        """Admit a trainer; reject it if it does not run the same training as this server.

        Returns
        -------
        tuple of str and int
            The random name of the loaded checkpoint, empty without one, and the trainer's next step.

        Raises
        ------
        FleetError
            The trainer may not join, or this server is ending.
        """
        check_job(request, self._job)
        restored = self._loader.restored
        check_agreement(self._agreement, request.agreement, None if restored else self._initial)
        trainer, attempt = request.trainer.id, request.trainer.attempt
        with self._joining:
            with self._serving.changed:
                self._serving.check()
                again = self.membership.attempt(trainer) >= 0
                self.membership.admit(trainer, attempt, self._clock.now())
                # In this order: the last frame of the old attempt ends, the mode drops what that attempt has
                # left, and only then can the new attempt open a data connection.
                old = self.sessions.pop(trainer, None)
                self._barriers.admit(trainer)
            if old is not None:
                replaced = f"trainer {trainer} was replaced by its attempt {attempt}"
                # Without the lock of the membership: the old process has a second to read the reason.
                old.fail(FleetError(f"{replaced}; this process has attempt {old.identity.attempt}"), 1.0)
            self._mode.admit(trainer, attempt)
            session = TrainerSession(
                Identity(job_hash(self._job.name, self._job.uid), trainer, attempt),
                self._shard,
                self._mode.turn,
                self._hello,
                self._settings.wire_dtype,
                self._pacing,
                self._loop,
                deliver=self.take,
                on_connected=self.connected,
            )
            with self._serving.changed:
                self._serving.check()  # again: a server that ends notifies only the sessions it knows
                self.sessions[trainer] = session
        restored, step = self._loader.inform(trainer)
        self._overrun.joined(trainer, again=again)
        _log.log(
            logging.WARNING if again else logging.INFO,
            "trainer %d joined%s%s at step %d",
            trainer,
            " again" if again else "",
            f" (attempt {attempt})" if attempt else "",
            step,
        )
        return restored, step

    def heard(self, trainer: int, attempt: int) -> int:
        """Record a trainer's heartbeat; return how many steps the trainer ran after the others completed."""
        with self._serving.changed:
            if self.membership.attempt(trainer) == attempt:
                self.membership.heard(trainer, self._clock.now())
        return self._overrun.steps(trainer)

    def session_of(self, identity: Identity) -> TrainerSession:
        """Return a trainer's session; raise RemoteProtocolError if the trainer has not joined."""
        with self._serving.changed:
            joined = self.membership.attempt(identity.trainer)
        check_identity(identity, self._job, joined)
        session = self.sessions.get(identity.trainer)
        if session is None or session.identity != identity:
            raise RemoteProtocolError(
                f"trainer {identity.trainer} with attempt {identity.attempt} has no session on this server "
                "any more; it must join again"
            )
        return session

    def give_up(self, trainer: int, error: PeerLostError) -> None:
        """Treat a trainer as lost, so that the others continue without it; the trainer may join again."""
        with self._serving.changed:
            self.membership.give_up(trainer)
            self._barriers.release()
            session = self.sessions.pop(trainer, None)
            remaining = self.membership.live
        if session is not None:
            session.fail(error, 1.0)
        _log.error(
            "%s; %s",
            error,
            f"training continues with {name_trainers(remaining)}" if remaining else "no trainer is left",
        )
        self.answer(self._mode.complete(trainer))

    def answer(self, answers: Sequence[Answer]) -> None:
        """Send each answer to those of its trainers that have a session and have requested values."""
        for answer in answers:
            step, block, value = answer.step, answer.block, answer.value
            for trainer in answer.trainers:
                session = self.sessions.get(trainer)
                if session is None or not session.asked:
                    continue
                if answer.of_table:
                    session.stream.send(Kind.STEPPED, value or b"", step=step, block=block)
                elif not answer.changed:
                    session.stream.send(Kind.UNCHANGED, step=step, block=block)
                else:
                    own = value if value is not None else self._mode.value(trainer, block)
                    content = own if own is not None else self._shard.store.view(block)
                    session.transport.submit(Kind.PARAM, step, block, content)

    def take(self, session: TrainerSession, event: Frame | End, *, in_pool: bool = False) -> Work | None:
        """Handle a frame or the end of a connection; return any long work, which the pool then runs."""
        if isinstance(event, End):
            # A gradient that was cut short is sent again from its beginning, if at all. Until then, its
            # buffer serves the other trainers. A later attempt has none yet: it joins only after this event.
            with self._shard.buffers.changed:
                self._shard.buffers.forget(session.identity.trainer)
            self.ended(session, event.error)
            return None
        header, payload = event
        if not in_pool and (work := self._work_for_pool(session, event)) is not None:
            return work
        trainer, mode = session.identity.trainer, self._mode
        match header.kind:
            case Kind.GRAD:
                self._take_gradient(session, header)
            case Kind.LOOK_UP:
                self._look_up(session, header, memoryview(payload))
            case Kind.ROW_GRADIENT:
                row_floats = session.row_bytes[header.block] // _FLOAT_BYTES
                rows = RowGradients.of(*read_row_gradient(memoryview(payload), row_floats))
                self._use(session, header, mode.row_gradient(trainer, header.block, header.step, rows))
            case Kind.HYPER:
                if not session.begun:
                    # Checked once, because no checkpoint is loaded after the first step.
                    self._loader.begin_step(trainer)
                    session.begun = True
                if trainer in self._overrun.late:
                    self._overrun.begins(trainer)
                if payload != session.hyper[0]:
                    session.hyper = bytes(payload), read_hyper(bytes(payload))
                mode.begin(trainer, header.step, session.hyper[1])
            case Kind.STEP_END:
                if self._pacing is not None:
                    self._pacing.ended(trainer)
                absent = read_numbers(bytes(payload)) if payload else ()
                self.answer(mode.end(trainer, header.step, absent))
            case _:
                self._take_rare(session, header, bytes(payload))
        return None

    def _work_for_pool(self, session: TrainerSession, event: Frame) -> Work | None:
        """Return work for the pool if handling a frame may be slow or may block; otherwise return None."""
        header, mode, tables = event.header, self._mode, self._shard.tables
        kind, number, num_bytes = header.kind, header.block, header.payload_bytes
        of_table = waits = False
        if kind is Kind.GRAD:
            used = not mode.defers or number in session.converted
            long = used and self._shard.block_bytes[number] >= LEAST_BYTES
        elif kind is Kind.STEP_END:
            long = num_bytes > 0 and self._largest_bytes >= LEAST_BYTES
        elif of_table := kind in _OF_TABLES:
            if kind is Kind.LOOK_UP:
                long = num_bytes * _ROW_BYTES_PER_ID_BYTE >= LEAST_BYTES or not session.begun
            else:
                of_rows = (
                    num_bytes if mode.defers else tables.update_bytes(number, num_bytes, session.hyper[1])
                )
                long = of_rows >= LEAST_BYTES
            long = long or number in tables.on_disk
            # A save may take the lock after this look. Then the loop waits while one part of the table is
            # copied; a table on a disk, where that takes long, always goes to the pool.
            waits = number in self._tables_in_pool or tables.is_locked(number)
        else:
            long = kind in _RARE or (kind is Kind.HYPER and not session.begun)
        if not (long or waits):
            return None
        work = partial(self.take, session, event, in_pool=True)
        return self._on_table(number, work) if of_table and long else work

    def _take_gradient(self, session: TrainerSession, header: Header) -> None:
        """Pass a received gradient to the mode, converted to its block's dtype if necessary."""
        trainer, block = session.identity.trainer, header.block
        if header.shared:
            session.transport.register(block)
        elif self._pacing is not None:
            self._pacing.took(trainer, header.payload_bytes)
        session.transport.poll(header)
        self._use(session, header, self._mode.gradient(trainer, block, header.step))

    def _take_rare(self, session: TrainerSession, header: Header, payload: bytes) -> None:
        """Handle a frame of a kind that most steps do not contain."""
        trainer = session.identity.trainer
        match header.kind:
            case Kind.PULL:
                self._pull(session, header.step)
            case Kind.COMPLETE:
                self._overrun.completed(trainer, self._mode.step_of(trainer))
                self.answer(self._mode.complete(trainer))
                self.completed(session)
            case Kind.CONFIRM:
                session.stream.send(Kind.CONFIRM)
            case Kind.GOODBYE:
                session.ending.left.set()
            case Kind.ERROR:
                raise read_error(payload)

    def assure_waiting(self) -> None:
        """Send a sign of life to each trainer whose gradient is waiting for a receive buffer.

        The server reads nothing from such a trainer, not even its probes; without other frames, the trainer
        would open another connection again and again.
        """
        buffers = self._shard.buffers
        with buffers.changed:
            waiting = list(buffers.held)
        for trainer in waiting:
            if (session := self.sessions.get(trainer)) is not None:
                session.stream.send(Kind.CONFIRM)

    def connected(self, session: TrainerSession) -> None:
        """Record that a session has a data connection."""
        with self._serving.changed:
            if self.sessions.get(session.identity.trainer) is session:
                self.membership.connected(session.identity.trainer, self._clock.now())
                self._serving.changed.notify_all()

    def completed(self, session: TrainerSession) -> None:
        """Record that a trainer has completed."""
        trainer = session.identity.trainer
        with self._serving.changed:
            # Answered first, because the server may close the session as soon as the trainer has completed.
            completed = {*self.membership.completed, trainer}
            session.stream.send(Kind.COMPLETE, pack_numbers(sorted(completed)))
            self.membership.complete(trainer)
            self._barriers.release()

    def ended(self, session: TrainerSession, error: FleetError | None) -> None:
        """Record the end of a session's connection, with its error unless the end was normal."""
        trainer = session.identity.trainer
        if self._pacing is not None:
            self._pacing.ended(trainer)
        with self._serving.changed:
            current = self.sessions.get(trainer) is session and trainer not in self.membership.completed
            if current and error is not None:
                self.membership.lost(trainer, self._clock.now())
                self._serving.changed.notify_all()
        if not current or error is None or self._serving.is_closing:
            return
        broken = isinstance(error, BrokenConnectionError)
        _log.warning(
            "trainer %d (attempt %d), at step %d: %s%s",
            trainer,
            session.identity.attempt,
            self._mode.step_of(trainer),
            error,
            "; waiting for it to come back" if broken else "",
        )
        if not broken:
            # Not in this thread, which must not wait until the trainer has read the error.
            farewell = threading.Thread(
                target=session.fail, args=(error, 1.0), name="fleet-farewell", daemon=True
            )
            try:
                farewell.start()
            except RuntimeError as raised:
                _log.warning("%s: trainer %d reads the error when it reconnects", raised, trainer)
                session.fail(error, 0.0)

    def dismiss(self, error: FleetError | None) -> None:
        """End all sessions: send each trainer its last frames and the server's error, if there is one."""
        if error is None:
            self.wait_for_goodbyes()
        self._serving.close()
        if error is not None:
            self._serving.fail(error)

        def finish(session: TrainerSession) -> None:
            with contextlib.suppress(OSError):
                if error is not None and session.identity.trainer in self.membership.live:
                    session.fail(error, 1.0)
                else:
                    session.finish(_FLUSH_SECONDS)

        sessions = list(self.sessions.values())
        with ThreadPoolExecutor(max(1, len(sessions)), thread_name_prefix="fleet-farewell") as at_once:
            list(at_once.map(finish, sessions))  # so that a trainer that does not read delays no others
        if error is not None:
            self._wait_until_notified()

    def wait_for_goodbyes(self) -> None:
        """Wait until every trainer has confirmed the end of training, even if it must first reconnect."""
        sessions = list(self.sessions.values())
        wait_for_all((session.ending.left for session in sessions), self._settings.silent_seconds)

    def _wait_until_notified(self) -> None:
        """Wait until every live trainer has received the error, even if it must first reconnect.

        A live trainer detects within two heartbeats that it can reconnect.
        """
        with self._serving.changed:
            live = set(self.membership.live) - self.membership.vanished(self._clock.now())
        sessions = [each for trainer, each in list(self.sessions.items()) if trainer in live]
        wait_for_all(
            (session.ending.notified for session in sessions), 2 * self._settings.heartbeat_seconds + 1.0
        )

    def _use(self, session: TrainerSession, header: Header, answers: Sequence[Answer]) -> None:
        """Send the answers to a gradient, then let the mode apply it in this thread or in the pool."""
        if answers:
            self.answer(answers)
        if not self._mode.defers:
            return
        number, of_table = header.block, header.kind is Kind.ROW_GRADIENT
        if of_table:
            arrived = self._mode.arrived_bytes(number, header.payload_bytes)
            if arrived is None:
                return
            num_bytes = self._shard.tables.update_bytes(number, arrived, session.hyper[1])
        else:
            num_bytes = self._step_bytes[number]
        if num_bytes >= LEAST_BYTES:
            work = partial(self._advance, session, number, of_table=of_table)
            self._loop.submit(self._on_table(number, work) if of_table else work)
        else:
            self.answer(self._mode.advance(number, of_table=of_table))

    def _advance(self, session: TrainerSession, number: int, *, of_table: bool) -> None:
        """Let the mode apply a gradient in a thread of the pool; an error ends the session."""
        try:
            self.answer(self._mode.advance(number, of_table=of_table))
        except FleetError as error:
            self.ended(session, error)
        except Exception as raised:  # noqa: BLE001 - the pool continues
            _log.exception("a gradient of trainer %d could not be used", session.identity.trainer)
            self.ended(session, FleetError(f"a gradient could not be used: {raised!r}"))

    def _on_table(self, table: int, work: Callable[[], object]) -> Callable[[], None]:
        """Wrap long work on a table, so that the pool also handles other frames for the table meanwhile."""
        # Before the work is queued, so that the next frame for the table follows it.
        self._tables_in_pool.append(table)

        def run() -> None:
            try:
                work()
            finally:
                self._tables_in_pool.remove(table)

        return run

    def _look_up(self, session: TrainerSession, header: Header, payload: memoryview) -> None:
        """Answer a look-up; reject it if too many earlier answers to this trainer are unread."""
        trainer, table, unread = session.identity.trainer, header.block, session.unread
        while unread and unread[0][0] <= header.taken:
            unread.popleft()
        kept_bytes = sum(num_bytes for _, num_bytes in unread)
        if kept_bytes >= MOST_ROW_BYTES:
            raise RemoteProtocolError(
                f"trainer {trainer} requests more rows before it has read {kept_bytes} bytes of earlier "
                f"answers; expected at most {MOST_ROW_BYTES} unread bytes"
            )
        ids = read_ids(payload, session.row_bytes[table])
        if session.begun:
            found = self._mode.look_up(trainer, table, header.step, ids)
        else:  # a checkpoint may have been loaded since the trainer chose the step
            with self._loader.step_to_answer(trainer, header.step) as step:
                found = self._mode.look_up(trainer, table, step, ids)
        rows = pack_rows(found.numpy())
        unread.append((session.stream.send(Kind.ROWS, rows, step=header.step, block=table), len(rows)))

    def _pull(self, session: TrainerSession, asked_step: int) -> None:
        trainer, session.asked = session.identity.trainer, True
        with self._loader.step_to_answer(trainer, asked_step) as step:
            answers = self._mode.pull(trainer, step)
        if step != asked_step:
            # The trainer refuses values of any other step than the one that it asked for.
            answers = [replace(answer, step=asked_step) for answer in answers]
        self.answer(answers)
