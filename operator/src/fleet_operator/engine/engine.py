"""The engine, whose workers take jobs from the queue and reconcile them.

It drives any `fleet_operator.cluster.Cluster`, either an API server or this machine. Everything runs on one
event loop, from which `enqueue` and `stop` must be called.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from fleet_operator.cluster import ClusterError
from fleet_operator.engine.passes import Observer, Outcome, Result, SystemClock
from fleet_operator.engine.queue import WorkQueue
from fleet_operator.engine.reconcile import Reconciler, retry_after
from fleet_operator.plan import plan

if TYPE_CHECKING:
    from datetime import timedelta

    from fleet_operator.cluster import Cluster, Key
    from fleet_operator.engine.passes import Clock
    from fleet_operator.engine.reconcile import Decide

logger = logging.getLogger(__name__)

SHARE_OF_NEW_JOBS = 1 / 4
"""The fraction of the workers that may reconcile new jobs.

Pods that are created faster than a scheduler places them do not run sooner, but cause more events.
"""

STOP_SECONDS = 5.0
"""How long passes in progress may take to end when the engine stops."""


class Engine:
    """Reconciles enqueued jobs with a bounded number of workers.

    Parameters
    ----------
    cluster : Cluster
        The cluster of the jobs, in which actions are carried out. Every change in it must lead to a
        call of `enqueue`.
    workers : int
        How many jobs are reconciled at the same time; about a quarter of them, but at least one, may be new.
    clock : Clock, optional
        This machine's clock if absent.
    decide : callable, optional
        ``fleet_operator.plan.plan`` if absent.
    observer : Observer, optional
        Notified of passes, writes and actions.
    resync : timedelta, optional
        How often every known job is reconciled even without changes; never if absent.

    Examples
    --------
    ::

        engine = Engine(cluster, workers=8)
        running = asyncio.create_task(engine.run())
        engine.enqueue(Key("default", "digits"))
        ...
        engine.stop()
        await running
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        workers: int,
        clock: Clock | None = None,
        decide: Decide | None = None,
        observer: Observer | None = None,
        resync: timedelta | None = None,
    ) -> None:
        if workers < 1:
            raise ValueError(f"the engine needs at least one worker, not {workers}")
        self._workers = workers
        self._clock = clock or SystemClock()
        self._observer = observer or Observer()
        self._resync = resync
        self._reconciler = Reconciler(
            cluster, clock=self._clock, decide=decide or plan, observer=self._observer
        )
        self._cluster = cluster
        self._known: set[Key] = set()
        # A burst of new jobs must not delay the statuses of jobs that already have pods.
        self._queue: WorkQueue[Key] = WorkQueue(
            ahead=self._has_begun, others_at_once=max(1, round(workers * SHARE_OF_NEW_JOBS))
        )
        self._news: dict[Key, float] = {}  # by job, the time of the first event that no pass has processed
        self._wake = asyncio.Event()
        self._stopping = False
        self._passes: set[asyncio.Task[None]] = set()

    def enqueue(self, key: Key, after: timedelta | None = None) -> None:
        """Enqueue a job, optionally after a delay; enqueueing it again is cheap and harmless."""
        if after is None:
            self._queue.add(key)
            self._news.setdefault(key, self._clock.monotonic())
        else:
            self._queue.add_at(key, self._clock.monotonic() + after.total_seconds())
        self._wake.set()

    def _has_begun(self, key: Key) -> bool:
        """Return whether this operator or an earlier leader has already reconciled a job."""
        if key in self._known:
            return True
        job = self._cluster.job(key)
        return job is not None and job.status.state is not None

    def stop(self) -> None:
        """Make `run` return once the passes in progress have finished."""
        self._stopping = True
        self._wake.set()

    async def run(self) -> None:
        """Reconcile jobs until `stop` is called; all passes have ended when this returns or is cancelled."""
        resync = None if self._resync is None else asyncio.create_task(self._resync_forever(self._resync))
        try:
            while not self._stopping:
                self._wake.clear()
                self._start_passes()
                self._observer.queued(len(self._queue))
                await self._sleep()
        finally:
            if resync is not None:
                resync.cancel()
            await self._finish_passes()

    def _start_passes(self) -> None:
        while len(self._passes) < self._workers:
            key = self._queue.take(self._clock.monotonic())
            if key is None:
                return
            if (since := self._news.pop(key, None)) is not None:
                self._observer.waited(self._clock.monotonic() - since)
            task = asyncio.create_task(self._pass(key), name=f"reconcile {key}")
            self._passes.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._passes.discard(task)
        self._wake.set()

    async def _sleep(self) -> None:
        """Wait until a key is enqueued, a worker becomes free, or a delayed key is due."""
        due = self._queue.next_due()
        timeout = None if due is None else max(0.0, due - self._clock.monotonic())
        if len(self._passes) >= self._workers:
            timeout = None  # woken by the end of a pass
        try:
            async with asyncio.timeout(timeout):
                await self._wake.wait()
        except TimeoutError:
            pass

    async def _pass(self, key: Key) -> None:
        started = self._clock.monotonic()
        try:
            outcome = await self._reconciler.reconcile(key)
        except ClusterError as error:
            logger.warning("a pass failed and will be retried: %s", error, extra={"job": str(key)})
            outcome = Outcome(Result.FAILED, at_least=retry_after(error))
        except Exception:
            # A failed pass must never end the engine; the log has the error with its job.
            logger.exception("a pass failed", extra={"job": str(key)})
            outcome = Outcome(Result.FAILED)
        except asyncio.CancelledError:
            self._settle(key, Outcome(Result.FAILED), self._clock.monotonic())
            raise
        now = self._clock.monotonic()
        self._settle(key, outcome, now)
        self._observer.passed(key, outcome.result, now - started)

    def _settle(self, key: Key, outcome: Outcome, now: float) -> None:
        """Record in the queue that the pass over a key has ended, and schedule the next pass."""
        if outcome.result is Result.GONE:
            self._known.discard(key)
        else:
            self._known.add(key)
        if outcome.result in (Result.CONFLICT, Result.FAILED):
            least = 0.0 if outcome.at_least is None else outcome.at_least.total_seconds()
            self._queue.failed(key, now, at_least=least)
        else:
            self._queue.done(
                key, rests_until=None if outcome.debounce is None else now + outcome.debounce.total_seconds()
            )
        if outcome.after is not None:
            self._queue.add_at(key, now + outcome.after.total_seconds())

    async def _finish_passes(self) -> None:
        if not self._passes:
            return
        _, late = await asyncio.wait(self._passes, timeout=STOP_SECONDS)
        for task in late:
            logger.warning("%s took longer than %g s to end and is cancelled", task.get_name(), STOP_SECONDS)
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _resync_forever(self, every: timedelta) -> None:
        while True:
            await asyncio.sleep(every.total_seconds())
            for key in self._known:
                self._queue.add(key)
            self._wake.set()
