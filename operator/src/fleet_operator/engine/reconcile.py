"""One pass over one job: take a snapshot, plan, write the status once, carry the actions out.

The status goes first: were the snapshot stale, its write conflicts before anything is created or deleted,
and the plan is thrown away. Only a job's first status may wait until its pods run (`engine.batching`): until
then nothing has happened that a stale snapshot could make happen again. Actions keep their order, but for
pods that are created or deleted in a row: no pod waits for another. Everything that a pass leaves undone is
found again by the next one, because plans are made from what is there and never from what was meant to be.
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
"""When to look again at a job whose own writes have not been seen; seeing them enqueues it earlier."""

REMEMBERED_TRIES = 8
"""How many writes of a status are remembered of which none was answered well."""

AT_ONCE = 16
"""How many pods of one job are created or deleted at the same time."""


@dataclass(frozen=True, slots=True)
class _Untold:
    """Statuses whose writes did not go well, as far as is known, and what each tells."""

    uid: str | None
    before: FleetJobStatus  # upon which they were decided
    tries: tuple[tuple[FleetJobStatus, tuple[Event, ...]], ...]


class Reconciler:
    """Carries plans out.

    Parameters
    ----------
    cluster : Cluster
        Where jobs are read from and where actions are carried out.
    clock : Clock
        Read once a pass.
    decide : callable
        ``plan(job, observed, now, hosts)``; pure.
    observer : Observer
        Told of what has been done.
    """

    def __init__(
        self, cluster: Cluster, *, clock: Clock, decide: Decide, observer: Observer | None = None
    ) -> None:
        self._cluster = cluster
        self._clock = clock
        self._decide = decide
        self._observer = observer or Observer()
        self._batching = StatusBatching()
        self._untold: dict[Key, _Untold] = {}
        self._refusals: dict[Key, tuple[str, str]] = {}  # the last that people were told of, by the job's uid

    async def reconcile(self, key: Key) -> Outcome:
        """Bring one job one step closer to what its spec asks for."""
        await self._tell_late(key)
        job = self._cluster.job(key)
        if job is None:
            self._forget(key)
            return Outcome(Result.GONE)
        observed = self._cluster.observe(job)
        if observed is None:
            return Outcome(Result.WAITING, UNSEEN_WRITE)
        plan = self._decide(job, observed, self._clock.now(), self._cluster.hosts(job))
        if (wait := self._batching.wait(key, job, plan, self._clock.monotonic())) is not None:
            plan = replace(plan, requeue_after=_earlier(wait, plan.requeue_after))
            outcome = await self._act(key, job, plan)
            if outcome.result is not Result.DONE:
                self._batching.hurry(key)  # the next plan says why
            return outcome
        try:
            written = await self._write_status(job, plan)
        except ClusterError as error:  # a conflict, too, may be one with this write, sent again unanswered
            self._note_untold(key, job, plan)
            if not isinstance(error, ConflictError):
                raise
            logger.debug("plan discarded: %s", error, extra={"job": str(key)})
            return Outcome(Result.CONFLICT)
        self._untold.pop(key, None)
        self._batching.forget(key)
        return await self._act(key, written, plan)

    async def _write_status(self, job: FleetJob, plan: Plan) -> FleetJob:
        if plan.status == job.status:
            return job
        written = await self._cluster.write_status(job, plan.status)
        self._observer.status_written(job, written)
        return written

    def _note_untold(self, key: Key, job: FleetJob, plan: Plan) -> None:
        """Note what a status tells that may have been written, beside those that were tried before it."""
        untold = self._untold.get(key)
        if untold is None or (untold.uid, untold.before) != (job.metadata.uid, job.status):
            untold = _Untold(job.metadata.uid, job.status, ())
        # What is tried again and again tells the same: the first tries and the last one are enough.
        tries = (*untold.tries[: REMEMBERED_TRIES - 1], (plan.status, plan.events))
        self._untold[key] = replace(untold, tries=tries)

    async def _tell_late(self, key: Key) -> None:
        """Tell the events of a status that was not known to be written, if it turns out that it was.

        No later plan tells them: each is told when the status first says it.
        """
        untold, job = self._untold.get(key), self._cluster.job(key)
        if untold is None or job is None or (untold.uid == job.metadata.uid and untold.before == job.status):
            return  # it has not been seen yet, or never will be, and is written again then
        del self._untold[key]
        written = (events for status, events in untold.tries if status == job.status)
        for event in next(written, ()) if untold.uid == job.metadata.uid else ():
            await self._cluster.record(job, event)

    async def _act(self, key: Key, job: FleetJob, plan: Plan) -> Outcome:
        """Carry the actions out in their order, up to the first that is refused; then tell the events."""
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
        """Carry out actions of which none waits for another; return those that were refused, in their order.

        After a refusal no further one is begun, and those that are under way end as they would.
        """
        waiting, refused = iter(enumerate(actions)), dict[int, Exception]()

        async def work() -> None:
            for number, action in waiting:
                try:
                    await self._cluster.apply(job, action)
                except Exception as refusal:  # noqa: BLE001 whatever it is, the next pass tries again
                    refused[number] = refusal
                else:
                    self._observer.applied(job, action)
                if refused:
                    return

        async with asyncio.TaskGroup() as group:
            for _ in range(min(AT_ONCE, len(actions))):
                group.create_task(work())
        told = [(actions[number], refusal) for number, refusal in sorted(refused.items())]
        refused.clear()  # what a refusal was raised from holds this, and with it every manifest of the plan
        return told

    async def _refused(
        self, key: Key, job: FleetJob, plan: Plan, refused: Iterable[tuple[Action, Exception]]
    ) -> Outcome:
        """Note what was refused. Conflicts only mean to look again; of anything else the first is told.

        The plan's status has been written, so what is due by it stays due.
        """
        told = False
        wait = timedelta()
        for action, refusal in refused:
            if isinstance(refusal, ConflictError):
                logger.debug("%s: %s", type(action).__name__, refusal, extra={"job": str(key)})
                continue
            if not told:
                await self._tell_refusal(key, job, action, refusal)
            told = True
            wait = max(wait, retry_after(refusal) or timedelta())
        result = Result.FAILED if told else Result.CONFLICT
        return Outcome(result, plan.requeue_after, at_least=wait or None)

    async def _tell_refusal(self, key: Key, job: FleetJob, action: Action, refusal: Exception) -> None:
        """Log a refused action, and tell people, once for each different refusal in a row.

        That the cluster is busy or away is nothing that the job's owner could mend.
        """
        message = f"{type(action).__name__}: {refusal}"
        unexpected = None if isinstance(refusal, ClusterError) else refusal
        logger.warning(
            "an action was refused: %s",
            message,
            exc_info=unexpected,
            extra={"job": str(key)},
        )
        told = (job.metadata.uid, message)
        transient = isinstance(refusal, ClusterError) and refusal.transient
        if not transient and self._refusals.get(key) != told:
            self._refusals[key] = told
            await self._cluster.record(job, Event("Warning", "ActionRefused", message))

    def _forget(self, key: Key) -> None:
        self._batching.forget(key)
        self._untold.pop(key, None)
        self._refusals.pop(key, None)


def _in_order(actions: Iterable[Action]) -> Iterator[Sequence[Action]]:
    """Cut the actions into steps that follow one another: pods in a row are one, anything else is its own.

    The pod that settles a life's key is its own as well.
    """
    for (kind, settles), row in groupby(actions, lambda each: (type(each), _settles_key(each))):
        if kind in (CreatePod, DeletePod) and not settles:
            yield tuple(row)
        else:
            yield from ((action,) for action in row)


def _settles_key(action: Action) -> bool:
    return isinstance(action, CreatePod) and action.brings_key


def retry_after(refusal: Exception) -> timedelta | None:
    """Return how long the cluster asks to be left alone, if it does."""
    seconds = refusal.retry_after_seconds if isinstance(refusal, ClusterError) else 0.0
    return timedelta(seconds=seconds) if seconds else None


def _earlier(one: timedelta, other: timedelta | None) -> timedelta:
    return one if other is None else min(one, other)
