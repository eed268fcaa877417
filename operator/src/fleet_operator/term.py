"""A term: the operator's work while it leads, from the first lists to the last pass.

Our own tasks start before kopf, because at its end kopf waits for every newer task and then cancels it. kopf
replaces the signal handlers while it starts. The caller restores its own immediately, because otherwise a
signal would end only kopf. A term keeps no state for the next term, which lists everything again.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import kopf

from fleet_operator.cluster import Key
from fleet_operator.engine import Engine, SystemClock
from fleet_operator.handlers import kopf_settings, registry_for
from fleet_operator.kubernetes.cluster import KubernetesCluster, metrics_readers
from fleet_operator.kubernetes.events import EventRecorder
from fleet_operator.kubernetes.informer_cache import ClusterView
from fleet_operator.kubernetes.progress import ProgressReader, targets

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterator

    from fleet_operator.api import FleetJob
    from fleet_operator.kubernetes.client import ApiClient
    from fleet_operator.kubernetes.login import Connection
    from fleet_operator.metrics import Metrics
    from fleet_operator.settings import Settings

logger = logging.getLogger(__name__)

WATCH_SECONDS = 120.0
"""How long kopf may take to start watching FleetJobs."""


class Term:
    """The components that work while this operator leads: informer cache, engine and kopf.

    Parameters
    ----------
    settings : Settings
        The operator's settings.
    connection : Connection
        The connection to the API server.
    client : ApiClient
        The client, which limits the rate of writes and refuses them unless we are the leader.
    metrics : Metrics
        Counts passes, writes and actions.
    """

    def __init__(
        self, settings: Settings, connection: Connection, client: ApiClient, metrics: Metrics
    ) -> None:
        self._settings = settings
        self._connection = connection
        self._metrics = metrics
        self._events = events = EventRecorder(client)
        self._view = ClusterView(
            client,
            events,
            namespaces=settings.namespaces,
            features=settings.features,
            on_deleted=metrics.deleted,
        )
        now = SystemClock().now
        self._progress = ProgressReader(
            lambda is_due: targets(self._view, now(), is_due),
            self._view.notify,
            now=now,
            on_read=lambda answered: metrics.progress_read(answered=answered),
        )
        self._cluster = KubernetesCluster(
            client,
            self._view,
            events,
            metrics_readers=metrics_readers(connection.namespace, settings.metrics_readers),
            metrics_open=not settings.metrics_readers,
            progress=self._progress,
        )
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    async def run(
        self,
        ending: asyncio.Event,
        *,
        on_signals_taken: Callable[[], None],
        before_kopf_ends: Callable[[], Awaitable[None]],
    ) -> None:
        """Reconcile FleetJobs until `ending` is set or a component ends unexpectedly.

        Parameters
        ----------
        ending : asyncio.Event
            Set to end the term.
        on_signals_taken : callable
            Called as soon as kopf has replaced the signal handlers.
        before_kopf_ends : callable
            Awaited after the last pass, to end tasks that kopf would wait for.
        """
        try:
            if await unless(ending, self._view.start()):
                await self._work(ending, on_signals_taken, before_kopf_ends)
        finally:
            await self._view.close()
            await self._events.close()

    def jobs(self) -> Iterator[FleetJob]:
        """Return all known jobs."""
        return iter(self._view.jobs)

    def failing(self) -> Iterator[tuple[str, str | None, float]]:
        """Return each watched resource, its namespace, and how many seconds its watch has been failing."""
        return self._view.failing()

    def problem(self) -> str | None:
        """Return a message about a component that has ended unexpectedly, or None."""
        ended = [task.get_name() for task in self._tasks if task.done()] + self._view.ended()
        return f"ended: {', '.join(ended)}" if ended else None

    def waiting(self) -> str | None:
        """Return a message about what delays the first pass, or None."""
        if not self._view.synced:
            return "the first lists from the API server have not arrived"
        return None if self._tasks else "the workers have not been started"

    async def _work(
        self,
        ending: asyncio.Event,
        on_signals_taken: Callable[[], None],
        before_kopf_ends: Callable[[], Awaitable[None]],
    ) -> None:
        """Run the engine until the term is stopped or a component ends unexpectedly."""
        engine = self._engine()
        stop_kopf = asyncio.Event()
        working = asyncio.create_task(engine.run(), name="engine")
        awaited = asyncio.create_task(ending.wait(), name="wait for the end of the term")
        unwatched = asyncio.create_task(self._until_given_up(), name="wait for kopf to watch")
        restored = asyncio.create_task(self._until_restored(), name="wait for another history")
        reading = asyncio.create_task(self._progress.run(), name="read progress")
        watching = asyncio.create_task(self._run_kopf(on_signals_taken, stop_kopf), name="kopf")
        self._tasks = (working, reading, watching)
        try:
            ends = {working, watching, awaited, unwatched, restored}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            engine.stop()
            for task in (reading, awaited, unwatched, restored):
                task.cancel()
            await before_kopf_ends()
            try:
                await working
            finally:
                await self._events.close()  # kopf would wait for the retries of events
                stop_kopf.set()
                await watching

    def _engine(self) -> Engine:
        """Return an engine in which every known job is enqueued."""
        engine = Engine(
            self._cluster,
            workers=self._settings.workers,
            observer=self._metrics,
            resync=self._settings.resync,
        )
        self._view.subscribe(engine.enqueue)
        for job in self._view.jobs:
            self._metrics.seen(job)
            engine.enqueue(Key.of(job))
        return engine

    async def _until_given_up(self) -> None:
        """Return if kopf has not started to watch FleetJobs in time; otherwise never return.

        kopf may have looked for the CRD before the API server served it, and does not look again.
        """
        try:
            async with asyncio.timeout(WATCH_SECONDS):
                await self._view.until_jobs_are_watched()
        except TimeoutError:
            logger.error("FleetJobs have not been watched within %g s; the term ends", WATCH_SECONDS)  # noqa: TRY400 no traceback needed
        else:
            await asyncio.Event().wait()

    async def _until_restored(self) -> None:
        """Return when the API server's history has been rolled back, for example by a restore of etcd.

        kopf would continue to watch from a resourceVersion that the server has not reached yet, and receive
        nothing. The next term lists everything again.
        """
        await self._view.restored.wait()
        logger.warning("the API server was restored from a backup; the next term lists all objects again")

    async def _run_kopf(self, on_signals_taken: Callable[[], None], stop: asyncio.Event) -> None:
        registry = registry_for(
            self._connection,
            self._view.jobs.take,
            on_listed=self._view.jobs.list_again,
            on_watched=self._view.note_job_watch,
            on_request=self._metrics.requested,
        )
        before = asyncio.all_tasks()
        try:
            tasks = await kopf.spawn_tasks(
                registry=registry,
                settings=kopf_settings(),
                standalone=True,
                clusterwide=not self._settings.namespaces,
                namespaces=self._settings.namespaces,
                stop_flag=stop,
            )
            on_signals_taken()
            await kopf.run_tasks(tasks, ignored=before)
        except Exception:
            # Some errors are fatal to kopf, such as an error event in a watch. The next term recovers from
            # them.
            logger.exception("kopf has ended; the term ends with it")


async def unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Run `work` to completion, or cancel it when stopped; return False if it was stopped."""
    doing, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return not stop.is_set()
    finally:
        doing.cancel()
        stopping.cancel()
