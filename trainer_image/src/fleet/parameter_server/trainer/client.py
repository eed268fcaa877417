"""A trainer's session with all parameter servers: join, send gradients, receive values, complete.

The training thread calls; per server one thread receives and one sends. What arrives lands in the
`ParameterStore`; what fails is kept until the training thread asks next.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from fleet import progress
from fleet.clock import WatchClock
from fleet.errors import (
    DeadlineExceededError,
    FleetError,
    RemoteProtocolError,
)
from fleet.parameter_server.control.client import ControlClient, Pending
from fleet.parameter_server.control.heartbeat import Heartbeat
from fleet.parameter_server.control.streams import pieces_of
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer import agreement
from fleet.parameter_server.trainer.meetings import Meetings
from fleet.parameter_server.trainer.parameters import ParameterStore
from fleet.parameter_server.trainer.peer import Peer
from fleet.parameter_server.waiting import WaitLog, wait_for_ports
from fleet.transpiler.lowering import PlannedBlock, TrainerPlan
from fleet.wire import Identity, Kind, job_hash
from fleet.wire.messages import pack_hyper, pack_numbers

if TYPE_CHECKING:
    from fleet.parameter_server.control.proto import control_pb2
    from fleet.role_maker import JobIdentity

__all__ = ["Client"]

Reply = TypeVar("Reply")

_LOOK_SECONDS: Final = 1.0
_log = logging.getLogger(__name__)


class Client:
    """One trainer's session.

    Parameters
    ----------
    plan : TrainerPlan
    job : JobIdentity
        Name and uid of the job, and the start count of this process.
    store : ParameterStore
        Where values land.
    settings : Settings
    facts : mapping of str to str, optional
        What the servers must have in common with this process, beside the plan's agreement.
    """

    def __init__(
        self,
        plan: TrainerPlan,
        job: "JobIdentity",
        store: ParameterStore,
        settings: Settings,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self.plan = plan
        self.restored = ""
        """The random name of the checkpoint that the servers have loaded; empty when they began anew."""
        self.step = 0
        """The number of steps made, from the job's beginning."""
        self._job = job
        self._identity = Identity(job_hash(job.name, job.uid), plan.trainer_id, job.attempt)
        self.store = store
        self._settings = settings
        self._clock = WatchClock(settings.glance_seconds)
        self._agreement = {**plan.agreement, **settings.agreement, **(facts or {})}
        self._controls: list[ControlClient] = []
        self._peers: list[Peer] = []
        self._heartbeat: Heartbeat | None = None
        self._blocks: Mapping[int, PlannedBlock] = {block.id: block for block in plan.blocks}
        self._awaited: set[int] = set()
        self._awaited_from = 0
        self._unchanged: set[int] = set()
        self._wanted: frozenset[int] = frozenset()
        """Blocks for which the training thread waits before the others."""
        self._sending = 0
        self._turn = threading.RLock()
        """Held for the frames of a whole step, so that nothing else comes between them."""
        self._open = 0
        self._failure: FleetError | None = None
        self._changed = threading.Condition()
        self.meetings = Meetings(lambda: self._controls[0], settings, self.check)
        """Barriers and reductions."""

    def start(
        self,
        look: Callable[[], None] = lambda: None,
        told: Callable[[Collection[int]], None] = lambda _: None,
    ) -> None:
        """Join every server, and take the values that they hold.

        Parameters
        ----------
        look : callable
            As of `wait_for_ports`.
        told : callable
            Called before that with the trainers that have completed, where this one may be among them; what
            it raises ends the start.

        Raises
        ------
        ConfigurationError
            A server refuses, with its reason.
        PeerLostError
            A server does not answer in time.
        """
        try:
            self._start(look, told)
        except BaseException:
            self.close()
            raise

    # What a mode asks for; see `fleet.parameter_server.modes.Session`.

    def advance(self) -> None:
        """Count a step as made."""
        self.step += 1

    def expect_values(self) -> None:
        """Await a value, or the word that there is none, for each block; before what it answers is sent."""
        self._expect(self.step)

    def begin_step(self, hyper_parameters: Sequence[dict[str, Any]]) -> None:
        """Announce a step with its hyper-parameters, before its first gradient."""
        self._begin_step(self.step, hyper_parameters)

    def send_gradient(self, block: PlannedBlock, payload: memoryview) -> None:
        """Enqueue a gradient; its memory must not change until the servers have it."""
        self._peers[block.server].send_gradient(block.id, payload, self._sending)

    def end_step(self, absent: Iterable[PlannedBlock]) -> None:
        """Announce that nothing more comes, and for which blocks nothing came."""
        by_server: dict[int, list[int]] = {}
        for block in absent:
            by_server.setdefault(block.server, []).append(block.id)
        for peer in self._holders():
            peer.send(Kind.STEP_END, pack_numbers(by_server.get(peer.server, ())), step=self._sending)

    def send_step(
        self, step: int, hyper_parameters: Sequence[dict[str, Any]], gradients: Mapping[int, memoryview]
    ) -> None:
        """Enqueue a whole step at once, gradients by block; a thread of the mode's own may do it."""
        with self._turn:
            self._begin_step(step, hyper_parameters)
            for block in self.plan.blocks:
                if block.id in gradients:
                    self.send_gradient(block, gradients[block.id])
            self.end_step([block for block in self.plan.blocks if block.id not in gradients])

    def flush(self) -> None:
        """Wait until the servers have what was enqueued: its memory may change then."""
        log = WaitLog()
        marks = [(peer, peer.send(Kind.CONFIRM)) for peer in self._holders()]
        for peer, mark in marks:
            while not peer.wait_until_taken(mark, _LOOK_SECONDS):
                self.check()
                what = f"{peer.endpoint} to take gradients"
                waited = log.note(peer.endpoint, lambda: f"waiting for {what}")  # noqa: B023
                if waited >= self._settings.stalled_seconds:
                    raise DeadlineExceededError(f"waited {waited:.0f} s for {what}")

    def request_values(self) -> None:
        """Expect values, and ask for the present one of each block."""
        self.check()
        with self._turn:
            self._expect(0)
            for peer in self._holders():
                peer.send(Kind.PULL)

    @property
    def values_arrived(self) -> bool:
        """Whether all the values expected have landed."""
        with self._changed:
            return not self._awaited

    def wait_for_values(self, *, background: bool = False) -> None:
        """Wait until they have.

        Parameters
        ----------
        background : bool
            Training goes on meanwhile: the time does not count as waited.

        Raises
        ------
        FleetError
            A server reported an error, came back without its state, or vanished.
        """
        waited = self._wait(lambda: not self._awaited, self._describe_awaited)
        if not background:
            progress.count("wait_seconds", waited)

    def wait_for_some(self, blocks: Collection[int]) -> None:
        """Wait until the values of these blocks have landed; raises as `wait_for_values` does."""
        self._wanted = frozenset(blocks)
        try:
            waited = self._wait(lambda: self._awaited.isdisjoint(self._wanted), self._describe_awaited)
        finally:
            self._wanted = frozenset()
        progress.count("wait_seconds", waited)

    @property
    def nothing_changed(self) -> bool:
        """Whether the answers to the last step say that no block was stepped."""
        with self._changed:
            return len(self._unchanged) == len(self.plan.blocks)

    def adopt_values(self, names: Iterable[str] | None = None) -> None:
        """Make the values that have landed the parameters: all of them, or those of these names."""
        self.store.adopt(self._unchanged, names)

    def fail(self, error: FleetError) -> None:
        """Keep an error until the training thread asks next; the first one counts."""
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()

    def wait_until(self, done: Callable[[], bool], describe: Callable[[], str]) -> None:
        """Wait for something that another thread brings about.

        Raises
        ------
        FleetError
            What another thread has found, or the wait has lasted too long.
        """
        progress.count("wait_seconds", self._wait(done, describe))

    def wake(self) -> None:
        """Let who waits look again."""
        with self._changed:
            self._changed.notify_all()

    def wait_for_ends(self) -> None:
        """Wait until no other trainer makes a step any more: it calls this, has completed or is given up."""
        self.meetings.wait_for_ends()

    def optimizer_state(self) -> "Iterator[control_pb2.StatePiece]":
        """Iterate over the optimizer state of all servers."""
        return self._pieces(values=False)

    def server_values(self) -> "Iterator[control_pb2.StatePiece]":
        """Iterate over the values that the servers hold."""
        return self._pieces(values=True)

    def ask_all(self, ask: "Callable[[ControlClient, float], Pending[Reply]]") -> list[Reply]:
        """Ask every server at once; return their replies in the servers' order.

        Parameters
        ----------
        ask : callable
            Gets the server's control channel, and how many seconds the reply may take: writing and reading
            a shard may take as long as any other delay of a peer that is alive.
        """
        self.check()
        seconds = self._settings.stalled_seconds
        pending = [(control, ask(control, seconds)) for control in self._controls]
        log = WaitLog()
        return [self._await(control, reply, log) for control, reply in pending]

    def ask(self, server: int, ask: "Callable[[ControlClient, float], Pending[Reply]]") -> Reply:
        """Ask one server, as `ask_all` does all of them."""
        self.check()
        control = self._controls[server]
        return self._await(control, ask(control, self._settings.stalled_seconds), WaitLog())

    def agree(self) -> "list[control_pb2.LoadReply]":
        """Have the servers load one checkpoint; see `agreement.agree`."""
        return agreement.agree(self.ask_all, self.plan.endpoints, self._settings.deadline_seconds)

    def complete(self) -> frozenset[int]:
        """Tell every server that this trainer has finished, wait until each knows, and return who has."""
        self.check()
        for peer in self._peers:
            peer.send(Kind.COMPLETE)
        self.wait_until(lambda: self._open == 0, lambda: "the parameter servers to take note of the end")
        self.close()
        return frozenset.intersection(*(peer.completed_trainers for peer in self._peers))

    def close(self) -> None:
        """End the session now; whoever still waits in it, or comes later, gets an error."""
        self.fail(
            FleetError(
                "the session with the parameter servers has ended; what they are asked for, optimizer state "
                "say, must be asked before fleet.stop_worker()"
            )
        )
        if self._heartbeat is not None:
            self._heartbeat.stop()
        for peer in self._peers:
            peer.close()
        for control in self._controls:
            control.close()
        self._controls = []  # the peers stay: a sending thread of a mode's may be at work with them

    def check(self) -> None:
        """Raise the failure that a thread of this session has found, if there is one."""
        if self._failure is not None:
            raise self._failure

    # What the connections report.

    def landed(self, block: int, step: int, *, changed: bool) -> None:
        """Take note of a block's answer."""
        with self._changed:
            if block not in self._awaited or step < self._awaited_from:
                raise RemoteProtocolError(
                    f"a server sent {self._blocks[block].name} of step {step}, which nobody awaits at "
                    f"step {self.step}"
                )
            self._awaited.remove(block)
            if not changed:
                self._unchanged.add(block)
            if not self._awaited or block in self._wanted:
                self._changed.notify_all()

    def lost(self, server: int, error: FleetError) -> None:
        """Find out what became of a server whose connection broke."""
        if self._heartbeat is not None:
            self._heartbeat.connection_lost(server, error)

    def regained(self, server: int) -> None:
        """Take note that a server's connection is there again."""
        if self._heartbeat is not None:
            self._heartbeat.connection_regained(server)

    def ended(self, error: FleetError | None) -> None:
        """Take note that nothing more comes from a server: well, or for a reason."""
        if error is not None:
            self.fail(error)
            return
        with self._changed:
            self._open -= 1
            self._changed.notify_all()

    def lived(self, server: int) -> float:
        """Return up to when a server is known to have lived, by the monotonic clock."""
        return self._heartbeat.lived(server) if self._heartbeat is not None else 0.0

    def _start(self, look: Callable[[], None], told: Callable[[Collection[int]], None]) -> None:
        plan, settings = self.plan, self._settings
        deadline = time.monotonic() + settings.starting_seconds
        if plan.wait_port:
            wait_for_ports(plan.endpoints, settings.starting_seconds, look)
        self._controls = [
            ControlClient(endpoint, self._identity.trainer, self._job.attempt, settings.retry_times)
            for endpoint in plan.endpoints
        ]
        if self._job.life:
            told(agreement.completed_before(self._controls, self._job, settings.deadline_seconds))
        held = self.store.checksums()
        replies = agreement.join(
            plan, self._controls, self._job, self._agreement, held, settings.deadline_seconds, deadline
        )
        incarnations = [reply.incarnation for reply in replies]
        self._heartbeat = Heartbeat(
            self._controls, incarnations, settings, self.fail, self._look_at_peers, self._clock
        )
        self._open = len(replies)
        for server, reply in enumerate(replies):
            peer = Peer(plan, server, self._identity, self.store, self, settings)
            self._peers.append(peer)
            peer.connect(reply)
        self._heartbeat.start()
        if len({reply.restored for reply in replies}) > 1:
            loaded = self.agree()
            self.pull([reply.restored for reply in loaded], [reply.step for reply in loaded])
        else:
            self.pull([reply.restored for reply in replies], [reply.step for reply in replies])

    def _look_at_peers(self) -> None:
        now = self._clock.now()
        for peer in list(self._peers):
            peer.look(now)

    def _begin_step(self, step: int, hyper_parameters: Sequence[dict[str, Any]]) -> None:
        self.check()
        self._sending = step
        payload = pack_hyper(hyper_parameters)
        for peer in self._holders():
            peer.send(Kind.HYPER, payload, step=step)

    def _expect(self, step: int) -> None:
        with self._changed:
            self._awaited = set(self._blocks)
            self._awaited_from = step
            self._unchanged = set()

    def pull(self, restored: Sequence[str], steps: Sequence[int]) -> None:
        """Take the values that the servers hold; only between a step's end and the next one's beginning.

        Parameters
        ----------
        restored : sequence of str
            The checkpoint that each server has loaded.
        steps : sequence of int
            How many steps each has made.

        Raises
        ------
        StateLostError
            The servers have loaded different checkpoints, or are at different steps.
        """
        agreement.check_equal(self.plan.endpoints, restored)
        self.restored = restored[0]
        self.step = agreement.next_step(self.plan, steps)
        self.take_values()

    def take_values(self) -> None:
        """Take the values that the servers hold, whatever this trainer has."""
        self.store.forget()
        self.request_values()
        self.wait_for_values()
        self.adopt_values()

    def _pieces(self, *, values: bool) -> "Iterator[control_pb2.StatePiece]":
        self.check()  # after the end there is nobody to ask, which is not the same as nothing to tell
        for control in self._controls:
            self.check()  # a closed channel takes no call
            yield from pieces_of(control.state(values=values), self.check, self._settings.stalled_seconds)

    def _await(self, control: ControlClient, reply: Pending[Reply], log: WaitLog) -> Reply:
        while not reply.arrives_within(_LOOK_SECONDS):
            self.check()
            log.note(control, lambda: f"waiting for parameter server {control.endpoint}")
        return reply.result()

    def _holders(self) -> "list[Peer]":
        return [peer for peer in self._peers if peer.blocks]

    def _wait(self, done: Callable[[], bool], describe: Callable[[], str]) -> float:
        log, began = WaitLog(self._clock.now), time.monotonic()
        with self._changed:
            while not done():
                self.check()
                waited = log.note("step", lambda: f"waiting for {describe()}")
                if waited >= self._settings.stalled_seconds + self._settings.silent_seconds:
                    raise DeadlineExceededError(f"waited {waited:.0f} s for {describe()}")
                self._changed.wait(_LOOK_SECONDS)  # last: what it was about may have come by its end
        return time.monotonic() - began

    def _describe_awaited(self) -> str:
        """Name the servers and a variable that the step waits for, and whom they wait for in turn."""
        blocks = [self._blocks[block] for block in sorted(self._awaited)]
        servers = ", ".join(sorted({block.endpoint for block in blocks}))
        because = self._heartbeat.waiting_for() if self._heartbeat is not None else ""
        return f"{blocks[0].name} of step {self.step} from {servers}" + (f" ({because})" if because else "")
