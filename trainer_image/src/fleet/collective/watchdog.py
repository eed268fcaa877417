"""The watchdog of collective training, which detects lost trainers and names trainers that delay this one.

Every trainer writes heartbeats to trainer 0's store from a thread that never waits for a step, and reads the
others' only while its own training waits. In a healthy job this costs one small write per trainer and
heartbeat, and one small read per waiting trainer.

One of the waiting trainers, the observer, reads all heartbeats and publishes a report for the others, so the
number of reads grows linearly with the number of trainers, not quadratically. A trainer that finds no
observer, or a report that is two heartbeats old, becomes the observer itself. The loss of an observer is
therefore detected as quickly as that of any other trainer.
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import NamedTuple

from torch._C._distributed_c10d import Store
from torch.distributed import DistError, DistStoreError

from fleet.collective.devices import is_from_script, own_fault, reason_of
from fleet.collective.heartbeats import (
    SHOWN,
    Absence,
    Cohort,
    Heartbeat,
    Report,
    TrainerState,
    WaitKind,
    report_of,
)
from fleet.collective.world import World
from fleet.environment.deadlines import Deadlines
from fleet.errors import ConfigurationError, DeadlineExceededError, FleetError, PeerLostError
from fleet.process.resources import WatchClock

__all__ = ["Heartbeats", "Watchdog"]

LOG_AFTER_SECONDS = 5.0
STORE_SECONDS = 10.0
ANSWER_ATTEMPTS = 8
"""The number of polls for the result of another trainer's search, a quarter of a heartbeat interval apart."""
_REPORT = "what heartbeats say"
_SEARCH = "who looks for the silent"
_DEADLOCKED, _ALL_DEADLOCKED = "how many are stuck", "all are stuck"

_log = logging.getLogger(__name__)


class Heartbeats:
    """Writes this trainer's heartbeats to trainer 0's store, and reads those of the other trainers.

    Parameters
    ----------
    store : Store
        Used by this object only: another thread's blocked call must not delay a heartbeat.
    world : World
    deadlines : Deadlines
    clock : WatchClock
    """

    def __init__(self, store: Store, world: World, deadlines: Deadlines, clock: WatchClock) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._world = world
        self._deadlines = deadlines
        self._clock = clock
        self._own = Heartbeat(-1, TrainerState())
        self._seen: dict[int, tuple[int, float]] = {}
        """The number of each trainer's last heartbeat and the time when it was first read, by rank."""
        self._text, self._since, self._report = "", 0.0, Report()
        """The latest report as text, the time when it was first read, and the parsed report."""
        self._searches = 0

    def start(self) -> None:
        """Write the first heartbeat, so that the other trainers can find this one."""
        self._store.set_timeout(timedelta(seconds=STORE_SECONDS))
        self.beat(TrainerState())

    def beat(self, state: TrainerState) -> None:
        """Write the next heartbeat."""
        self._own = Heartbeat(self._own.number + 1, state)
        with self._one_call():
            self._store.set(_key(self._world.rank), self._own.to_text())

    def observe(self) -> Report:
        """Return the latest report on all trainers; the observer writes a new report first."""
        now = self._clock.now()
        self._publish("", self._claim(()), now)  # writes only if there is no report yet
        age = now - self._since
        if self._report.ended:
            self._take_over(self._report.absences, now)
        elif self._report.observer != self._world.rank and age > self._patience_seconds:
            absences = self._report.aged(age).absences
            observer = Absence(self._report.observer, self._report.number, age)
            self._take_over([*absences, observer], now)
        if self._report.observer == self._world.rank:
            self._publish(self._text, self._observation(now), now)
        return self._report.aged(now - self._since)

    def retire(self) -> None:
        """Give up the role of observer if this trainer has it; called when the trainer stops waiting."""
        if self._report.observer == self._world.rank and not self._report.ended:
            ended = Report(self._world.rank, self._own.number, absences=self._report.absences)
            self._publish(self._text, ended, self._clock.now())

    def still_absent(self, absences: Sequence[Absence]) -> list[Absence]:
        """Return the given absences that have not ended."""
        found = self._read([each.rank for each in absences])
        return [each for each in absences if found[each.rank].number == each.number]

    def confirm_deadlock(self) -> None:
        """Announce that this trainer has found a deadlock; wait briefly for the others to find it too."""
        if self._store.add(_DEADLOCKED, 1) == self._world.size:
            self._store.set(_ALL_DEADLOCKED, "")
        self._store.wait([_ALL_DEADLOCKED], timedelta(seconds=self._deadlines.silent_seconds))

    def find_silent(self, pause: Callable[[float], object]) -> list[int]:
        """Compare two reads of the heartbeats; return the trainers that have missed at least one.

        All trainers whose connections failed call this at about the same time. One of them reads the
        heartbeats for all.

        Parameters
        ----------
        pause : callable
            Waits for some seconds.
        """
        began_before = True
        while True:
            self._searches += 1
            ours = f"{self._world.rank} {self._searches}"
            if (search := self._exchange(_SEARCH, "", ours)) == ours:
                return self._search(ours, pause)
            found = self._result_of(search, pause)
            # A search that began before this trainer's request may have missed the failure that caused it.
            if found or (found is not None and not began_before):
                return found
            self._exchange(_SEARCH, search, "")  # the searching trainer may have ended without an answer
            began_before = False

    def _search(self, ours: str, pause: Callable[[float], object]) -> list[int]:
        before = self._read(self._world.others)
        pause(1.5 * self._deadlines.heartbeat_seconds)
        # The pause was longer than a heartbeat, so every living trainer has written another one.
        after = self._read(self._world.others)
        silent = [rank for rank in self._world.others if before[rank].number == after[rank].number]
        with self._one_call():
            self._store.set(f"{_SEARCH}: {ours}", json.dumps(silent))
        self._exchange(_SEARCH, ours, "")  # later requests need another search
        return silent

    def _result_of(self, search: str, pause: Callable[[float], object]) -> list[int] | None:
        """Wait for another trainer's search result; return its silent trainers, or None after a timeout."""
        pause(1.5 * self._deadlines.heartbeat_seconds)
        key = f"{_SEARCH}: {search}"
        for _ in range(ANSWER_ATTEMPTS):
            with self._one_call():
                answer = self._store.get(key) if self._store.check([key]) else None
            if answer is not None:
                return [rank for rank in json.loads(answer) if rank != self._world.rank]
            pause(self._deadlines.heartbeat_seconds / 4)
        return None

    @property
    def _patience_seconds(self) -> float:
        """The age in seconds after which a report or heartbeat is overdue."""
        return 2 * self._deadlines.heartbeat_seconds

    def _take_over(self, absences: Sequence[Absence], now: float) -> None:
        """Become the observer unless another trainer already is; keep the known absences."""
        if self._publish(self._text, self._claim(absences), now):
            self._seen = {each.rank: (each.number, now - each.seconds) for each in absences}

    def _claim(self, absences: Sequence[Absence]) -> Report:
        return Report(self._world.rank, self._own.number, ended=False, absences=absences)

    def _observation(self, now: float) -> Report:
        found = self._read(self._world.others)
        for rank, heartbeat in found.items():
            if rank not in self._seen or self._seen[rank][0] != heartbeat.number:
                self._seen[rank] = (heartbeat.number, now)
        ages = {rank: now - self._seen[rank][1] for rank in found}
        absences = {rank: seconds for rank, seconds in ages.items() if seconds > self._patience_seconds}
        found[self._world.rank] = self._own
        return report_of(
            self._world.rank, dict(sorted(found.items())), absences, self._deadlines.silent_seconds
        )

    def _publish(self, expected: str, report: Report, now: float) -> bool:
        """Publish a report if the current one is `expected`; return whether the new report is now current."""
        text = report.to_text()
        there = self._exchange(_REPORT, expected, text)
        if there != self._text:
            self._text, self._since, self._report = there, now, Report.from_text(there)
        return there == text

    def _read(self, ranks: Sequence[int]) -> dict[int, Heartbeat]:
        with self._one_call():
            found = self._store.multi_get([_key(rank) for rank in ranks])
        return {rank: Heartbeat.from_text(text.decode()) for rank, text in zip(ranks, found, strict=True)}

    def _exchange(self, key: str, expected: str, text: str) -> str:
        """Set a key whose value is missing or equals `expected`; return the key's resulting value."""
        with self._one_call():
            return self._store.compare_set(key, expected, text).decode()

    @contextlib.contextmanager
    def _one_call(self) -> Iterator[None]:
        # A store in a stopped process never answers, and the client's timeout does not end the call.
        if not self._lock.acquire(timeout=2 * STORE_SECONDS):
            raise DistStoreError(f"an earlier call had no answer for {2 * STORE_SECONDS:.0f} s")
        try:
            yield
        finally:
            self._lock.release()


class _Wait(NamedTuple):
    """A wait of this trainer; if it continues on a GPU, `is_over` returns whether it has ended."""

    state: TrainerState
    since: float
    is_over: Callable[[], bool] | None = None


class Watchdog:
    """Writes heartbeats in a background thread, and reports the trainers that this one is waiting for.

    Parameters
    ----------
    store : Store
        Used by this object only.
    world : World
    deadlines : Deadlines
    on_failure : callable
        Called in the watchdog's thread with the error that ends this trainer's wait.
    clock : callable
        Seconds of a monotonic clock.
    """

    def __init__(
        self,
        store: Store,
        world: World,
        deadlines: Deadlines,
        on_failure: Callable[[FleetError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Unless the process is frozen, the clock is read at least once per heartbeat and two failing calls.
        most_seconds = deadlines.heartbeat_seconds + 2 * STORE_SECONDS
        self._clock = WatchClock(min(most_seconds, deadlines.deadline_seconds / 2), clock)
        self._world = world
        self._deadlines = deadlines
        self._on_failure = on_failure
        self._state = TrainerState()
        # A wait is replaced as a whole, so the watchdog's thread needs no lock to read it.
        self._wait: _Wait | None = None
        self._deadlock: ConfigurationError | None = None
        self._stop = threading.Event()
        self._heartbeats = Heartbeats(store, world, deadlines, self._clock)
        self._thread = threading.Thread(target=self._run, name="fleet-watch", daemon=True)

    def start(self) -> None:
        """Write the first heartbeat, and start the thread."""
        self._heartbeats.start()
        self._thread.start()

    def close(self) -> None:
        """Stop the thread because this trainer has left the job."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(STORE_SECONDS)

    @contextlib.contextmanager
    def waiting(
        self, what: str, kind: WaitKind = WaitKind.OTHER, until: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Monitor a `with` block that waits for other trainers.

        If the wait is long, log the awaited trainers. If an operation of torch.distributed fails in the
        block, the error names the trainer that caused it.

        Parameters
        ----------
        what : str
            The awaited event, for messages.
        kind : WaitKind
        until : callable, optional
            The wait continues after the block until this is true, as a GPU's wait does while the script
            continues. Called in the watchdog's thread, where no device is current: it must not call CUDA.

        Raises
        ------
        PeerLostError
            Another trainer has vanished; the message names it.
        ConfigurationError
            All trainers have detected a deadlock, and the operation failed because another one ended first.
        DeadlineExceededError
            The operation failed although all trainers are alive.
        FleetError
            This trainer's own device failed.
        """
        # PowerSGD's hook may wait within the wait for the whole pass, which then continues.
        outer = self._wait if self._wait is not None and self._wait.is_over is None else None
        self._state = self._state.begin(what, kind)
        self._wait = wait = _Wait(self._state, self._clock.now())
        try:
            yield
        except BaseException as error:
            self._end_wait(outer, None)  # recorded now, because the search for silent trainers takes a while
            if isinstance(error, DistError | RuntimeError) and (found := self._explained(what, error)):
                raise found from error
            raise
        self._end_wait(outer, wait._replace(is_over=until) if until is not None else None)

    def _end_wait(self, outer: _Wait | None, continued: _Wait | None) -> None:
        if outer is None:
            self._state, self._wait = self._state.end(), continued
        else:
            self._state = self._state.resume(outer.state)
            self._wait = _Wait(self._state, self._clock.now())

    def _explained(self, what: str, error: DistError | RuntimeError) -> FleetError | None:
        """Return an error that names the cause of a failure, or None if the script's code failed."""
        reason = reason_of(error)
        if help_ := own_fault(error):
            return FleetError(f"this trainer's device failed in {what}: {reason}; {help_}")
        if is_from_script(error):
            return None
        if (deadlock := self._deadlock) is not None:
            # All have detected it, and the first one that ended closed the connection. The watchdog's thread
            # reports it.
            self._thread.join(self._deadlines.silent_seconds + 2 * STORE_SECONDS)
            return deadlock
        if silent := self.silent_now():
            return PeerLostError(f"{self._world.names(silent)} vanished while {what} waited: {reason}")
        return DeadlineExceededError(
            f"{what} failed although every trainer is alive: {reason}; a trainer may have taken longer than "
            f"{self._deadlines.stalled_seconds:.0f} s, or lost its connections"
        )

    def silent_now(self) -> list[int]:
        """Return the trainers that have missed a heartbeat, or only trainer 0 if its store is unreachable."""
        try:
            return self._heartbeats.find_silent(self._stop.wait)
        except (DistError, RuntimeError):
            return [0]

    def _run(self) -> None:
        unreachable_since: float | None = None
        while not self._stop.wait(self._deadlines.heartbeat_seconds):
            try:
                wait = self._current_wait()
                self._heartbeats.beat(wait.state if wait is not None else self._state)
                if wait is not None:
                    self._check(self._heartbeats.observe())
                else:
                    self._heartbeats.retire()
                unreachable_since = None
            except FleetError as error:
                self._on_failure(error)
                return
            except (DistError, RuntimeError) as error:
                unreachable_since = unreachable_since or self._clock.now()
                self._report_unreachable(self._clock.now() - unreachable_since, error)

    def _current_wait(self) -> _Wait | None:
        """Return the current wait of this trainer or its GPU, or None."""
        wait = self._wait
        if wait is None or wait.is_over is None:
            return wait
        if not wait.is_over():
            # The script still runs and may reach another call; it will have to wait for its GPU eventually.
            lasting = self._clock.now() - wait.since > self._deadlines.silent_seconds
            return wait if lasting else wait._replace(state=replace(wait.state, kind=WaitKind.OTHER))
        return None  # the next wait replaces this one; clearing it here could erase a wait that begins now

    def _check(self, report: Report) -> None:
        """Log the silent trainers; raise an error if one has vanished or if this trainer is in a deadlock."""
        now = self._clock.now()
        wait = self._current_wait()  # read after the others' states, as `deadlocks_with` requires
        if wait is None:
            return
        self._check_deadlock(wait.state, report.cohorts)
        absences = [each for each in report.absences if each.rank != self._world.rank]
        silent = [each for each in absences if each.seconds > self._deadlines.silent_seconds]
        vanished = [each for each in silent if each.seconds > self._deadlines.deadline_seconds]
        # The report may be as old as the observer's last heartbeat, so the store decides.
        if vanished and (vanished := self._heartbeats.still_absent(vanished)):
            raise PeerLostError(
                f"{self._names(vanished, report)} sent no heartbeat for {vanished[0].seconds:.0f} s while "
                f"{wait.state.what} waited; see its log for why it ended"
            )
        if now - wait.since > LOG_AFTER_SECONDS and report.cohorts:
            about = "every trainer is alive"
            if silent:
                about = f"no heartbeat from {self._names(silent, report)}"
            if elsewhere := self._names_elsewhere(wait.state, report.cohorts):
                about += f", not there yet: {elsewhere}"
            _log.warning("%s has been waiting for %.0f s; %s", wait.state.what, now - wait.since, about)

    def _names(self, absences: Sequence[Absence], report: Report) -> str:
        """Return the names of the first few absent trainers, and the number of the others."""
        number = max(len(absences), report.silent) if len(absences) >= SHOWN else len(absences)
        return self._world.names([each.rank for each in absences], number)

    def _names_elsewhere(self, mine: TrainerState, cohorts: Sequence[Cohort]) -> str:
        """Return the names of the live trainers that are waiting for a different event than this trainer."""
        ranks, number = [], 0
        for cohort in cohorts:
            if cohort.state.what != mine.what:
                alive = cohort.ranks[: cohort.alive]
                ranks += [rank for rank in alive if rank != self._world.rank]
                number += cohort.alive - (self._world.rank in alive)
        return self._world.names(sorted(ranks), number)

    def _check_deadlock(self, mine: TrainerState, cohorts: Sequence[Cohort]) -> None:
        for cohort in cohorts:
            others = [rank for rank in cohort.ranks if rank != self._world.rank]
            if not others or not mine.deadlocks_with(cohort.state):
                continue
            self._deadlock = ConfigurationError(
                f"{self._world.name(others[0])} waits for {cohort.state.what} after "
                f"{_exchanges(cohort.state)}, and this trainer, {self._world.rank}, for {mine.what} after "
                f"{_exchanges(mine)}: neither wait would ever end; give every trainer the same number of "
                "batches, and make the same calls on each"
            )
            # The first trainer that ends would look lost to the others, so all must detect the deadlock
            # first.
            with contextlib.suppress(DistError, RuntimeError):
                self._heartbeats.beat(mine)  # this wait may have begun after the last heartbeat
                self._heartbeats.observe()
                self._heartbeats.confirm_deadlock()
            raise self._deadlock

    def _report_unreachable(self, seconds: float, error: Exception) -> None:
        reason, trainer = reason_of(error), self._world.name(0)
        if seconds > self._deadlines.deadline_seconds:
            self._on_failure(PeerLostError(f"{trainer} has been unreachable for {seconds:.0f} s: {reason}"))
            self._stop.set()
        else:
            _log.warning("%s has been unreachable for %.0f s: %s", trainer, seconds, reason)


def _key(rank: int) -> str:
    return f"beat/{rank}"


def _exchanges(state: TrainerState) -> str:
    """Describe the number of gradient exchanges that a trainer has completed."""
    number = state.exchanges - (state.kind is WaitKind.EXCHANGE)
    return f"{number} exchange{'' if number == 1 else 's'} of gradients"
