"""One pass over a job: take a snapshot, plan, write the status once, and execute the actions.

The status is written first: with a stale snapshot the write conflicts before anything is created or deleted,
and the plan is discarded. Only a job's first status may wait until its pods run (`engine.batching`): until
then a stale snapshot cannot repeat an action. Actions keep their order, except that consecutive creations or
deletions of pods run concurrently. The next pass finds everything that a pass leaves undone, because plans
are made from the observed state and never from intentions.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import TYPE_CHECKING

from fleet_operator.cluster import ClusterError, ConflictError
from fleet_operator.engine.batching import StatusBatching, debounce
from fleet_operator.engine.passes import Observer, Outcome, Result
from fleet_operator.plan.model import CreatePod, DeletePod, Event

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from datetime import datetime

    from fleet_operator.api import FleetJob, FleetJobStatus
    from fleet_operator.build import Hosts
    from fleet_operator.cluster import Cluster, Key
    from fleet_operator.engine.passes import Clock
    from fleet_operator.plan.model import Action, Observed, Plan

    Decide = Callable[[FleetJob, Observed, datetime, Hosts], Plan]

logger = logging.getLogger(__name__)

UNSEEN_WRITE = timedelta(seconds=5)
"""The delay before a retry if our writes have not been observed; observing them enqueues the job earlier."""

REMEMBERED_TRIES = 8
"""How many failed status writes are remembered for each job."""

MOST_ON_LOOP = 200
"""The number of replicas above which a job is planned in a thread, so as not to block the event loop."""

AT_ONCE = 16
"""How many pods of a job are created or deleted concurrently."""


@dataclass(frozen=True, slots=True)
class _Untold:
    """A job's statuses whose writes failed but may have taken effect, with their events."""

    uid: str | None
    before: FleetJobStatus  # the status on which they are based
    tries: tuple[tuple[FleetJobStatus, tuple[Event, ...]], ...]


class Reconciler:
    """Reconciles jobs by planning each one's next step and executing the plan.

    Parameters
    ----------
    cluster : Cluster
        The cluster of the jobs, in which actions are carried out.
    clock : Clock
        The clock, whose time of day is read once per pass.
    decide : callable
        ``plan(job, observed, now, hosts)``; pure.
    observer : Observer
        Notified of writes and actions.
    """

    def __init__(
        self, cluster: Cluster, *, clock: Clock, decide: Decide, observer: Observer | None = None
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._decide = decide
        self._observer = observer or Observer()
        self._batching = StatusBatching()
        self._unreported: dict[Key, _Untold] = {}
        self._refusals: dict[Key, tuple[str, str]] = {}  # the last reported refusal, with the job's uid

    async def reconcile(self, key: Key) -> Outcome:
        """Bring a job one step closer to its spec."""
        await self._tell_late(key)
        job = self._cluster.job(key)
        if job is None:
            self._forget(key)
            return Outcome(Result.GONE)
        observed = self._cluster.observe(job)
        if observed is None:
            return Outcome(Result.WAITING, UNSEEN_WRITE)
        plan = await self._plan(job, observed)
        if (wait := self._batching.wait(key, job, plan, self._clock.monotonic())) is not None:
            plan = replace(plan, requeue_after=_earlier(wait, plan.requeue_after))
            outcome = await self._act(key, job, plan)
            if outcome.result is not Result.DONE:
                self._batching.hurry(key)  # the next plan reports why
            return outcome
        try:
            written = await self._write_status(job, plan)
        except ClusterError as error:  # a conflict may be with this same write, resent after a lost response
            self._note_unreported(key, job, plan)
            if not isinstance(error, ConflictError):
                raise
            logger.debug("plan discarded: %s", error, extra={"job": str(key)})
            return Outcome(Result.CONFLICT)
        self._unreported.pop(key, None)
        self._batching.forget(key)
        return await self._act(key, written, plan)

    async def _plan(self, job: FleetJob, observed: Observed) -> Plan:
        """Plan on the event loop or, for a large job, in a thread because planning may be slow.

        In the meantime, the loop handles other jobs and renews the lease. A change of the job itself leads to
        another pass.
        """
        arguments = (job, observed, self._clock.now(), self._cluster.hosts(job))
        if job.num_replicas <= MOST_ON_LOOP:
            return self._decide(*arguments)
        return await asyncio.to_thread(self._decide, *arguments)

    async def _write_status(self, job: FleetJob, plan: Plan) -> FleetJob:
        if plan.status == job.status:
            return job
        written = await self._cluster.write_status(job, plan.status)
        self._observer.status_written(job, written)
        return written

    def _note_unreported(self, key: Key, job: FleetJob, plan: Plan) -> None:
        """Remember a status and its events, because a failed write may still have taken effect."""
        untold = self._unreported.get(key)
        if untold is None or (untold.uid, untold.before) != (job.metadata.uid, job.status):
            untold = _Untold(job.metadata.uid, job.status, ())
        # Repeated attempts have the same events: the first ones and the last one suffice.
        tries = (*untold.tries[: REMEMBERED_TRIES - 1], (plan.status, plan.events))
        self._unreported[key] = replace(untold, tries=tries)

    async def _tell_late(self, key: Key) -> None:
        """Record the events of a status that was written although the write reported an error.

        No later plan contains them: an event belongs to the first status that reports it.
        """
        untold, job = self._unreported.get(key), self._cluster.job(key)
        if untold is None or job is None or (untold.uid == job.metadata.uid and untold.before == job.status):
            return  # not observed yet, or not written: the next pass writes it again
        del self._unreported[key]
        written = (events for status, events in untold.tries if status == job.status)
        for event in next(written, ()) if untold.uid == job.metadata.uid else ():
            await self._cluster.record(job, event)

    async def _act(self, key: Key, job: FleetJob, plan: Plan) -> Outcome:
        """Execute the actions in order until one is refused, then record the events."""
        outcome = Outcome(Result.DONE, plan.requeue_after, debounce(plan.status))
        for together in _in_order(plan.actions):
            if refused := await self._apply(job, together):
                outcome = await self._refused(key, job, plan, refused)
                break
        else:
            self._refusals.pop(key, None)
        for event in plan.events:
            await self._cluster.record(job, event)
        return outcome

    async def _apply(self, job: FleetJob, actions: Sequence[Action]) -> list[tuple[Action, Exception]]:
        """Execute independent actions concurrently; return the refused ones, in order.

        After a refusal, no further action starts, and actions in progress are completed.
        """
        waiting, refused = iter(enumerate(actions)), dict[int, Exception]()

        async def work() -> None:
            for number, action in waiting:
                try:
                    await self._cluster.apply(job, action)
                except Exception as refusal:  # noqa: BLE001 after any error the next pass tries again
                    refused[number] = refusal
                else:
                    self._observer.applied(job, action)
                if refused:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(min(AT_ONCE, len(actions))):
                group.create_task(work())
        found = [(actions[number], refusal) for number, refusal in sorted(refused.items())]
        refused.clear()  # the exception's traceback would keep every manifest of the plan alive
        return found

    async def _refused(
        self, key: Key, job: FleetJob, plan: Plan, refused: Iterable[tuple[Action, Exception]]
    ) -> Outcome:
        """Report the first refusal that is not a conflict, and return the outcome of the pass.

        The deadlines of the plan remain valid, because its status has been written.
        """
        reported = False
        wait = timedelta()
        for action, refusal in refused:
            if isinstance(refusal, ConflictError):
                logger.debug("%s: %s", type(action).__name__, refusal, extra={"job": str(key)})
                continue
            if not reported:
                await self._report_refusal(key, job, action, refusal)
            reported = True
            wait = max(wait, retry_after(refusal) or timedelta())
        result = Result.FAILED if reported else Result.CONFLICT
        return Outcome(result, plan.requeue_after, at_least=wait or None)

    async def _report_refusal(self, key: Key, job: FleetJob, action: Action, refusal: Exception) -> None:
        """Log a refused action and record an event, unless it was already reported.

        No event reports an overloaded or unavailable cluster, which the job's owner could not correct.
        """
        message = f"{type(action).__name__}: {refusal}"
        unexpected = None if isinstance(refusal, ClusterError) else refusal
        logger.warning(
            "an action was refused: %s",
            message,
            exc_info=unexpected,
            extra={"job": str(key)},
        )
        report = (job.metadata.uid, message)
        transient = isinstance(refusal, ClusterError) and refusal.transient
        if not transient and self._refusals.get(key) != report:
            self._refusals[key] = report
            await self._cluster.record(job, Event("Warning", "ActionRefused", message))

    def _forget(self, key: Key) -> None:
        self._batching.forget(key)
        self._unreported.pop(key, None)
        self._refusals.pop(key, None)


def _in_order(actions: Iterable[Action]) -> Iterator[Sequence[Action]]:
    """Group actions into steps: consecutive pod creations, consecutive pod deletions, or one other action.

    The pod that determines the key of a life is also a step of its own.
    """
    for (kind, settles), row in groupby(actions, lambda each: (type(each), _settles_key(each))):
        if kind in (CreatePod, DeletePod) and not settles:
            yield tuple(row)
        else:
            yield from ((action,) for action in row)


def _settles_key(action: Action) -> bool:
    return isinstance(action, CreatePod) and action.brings_key


def retry_after(refusal: Exception) -> timedelta | None:
    """Return the delay that the cluster requests before a retry, or None."""
    seconds = refusal.retry_after_seconds if isinstance(refusal, ClusterError) else 0.0
    return timedelta(seconds=seconds) if seconds else None


def _earlier(one: timedelta, other: timedelta | None) -> timedelta:
    return one if other is None else min(one, other)
