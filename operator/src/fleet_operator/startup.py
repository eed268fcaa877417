"""The operator's process: what is started in which order, and how it ends.

Own tasks come first and kopf last, because kopf waits for, and then cancels, every task that is younger than
itself when it ends. kopf takes the signals over while it starts; they are taken back when it is ready, so
that passes under way and open connections end before it does.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import kopf
import uvloop

from fleet_operator.cluster.client import ApiClient
from fleet_operator.cluster.connection import ConnectionSettingsError, connect
from fleet_operator.cluster.events import EventRecorder
from fleet_operator.cluster.kubernetes import KubernetesCluster
from fleet_operator.cluster.progress import ProgressReader, targets
from fleet_operator.cluster.view import ClusterView, NotSyncedError, job_key
from fleet_operator.engine import Engine, SystemClock
from fleet_operator.errors import OperatorError
from fleet_operator.handlers import kopf_settings, registry_for
from fleet_operator.http_server import HttpServer
from fleet_operator.logs import configure_logging
from fleet_operator.metrics import Metrics
from fleet_operator.settings import Settings, SettingsError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from fleet_operator.cluster.connection import Connection

logger = logging.getLogger("fleet_operator.startup")  # also when it is run as a program


def run_operator(environ: Mapping[str, str] | None = None) -> int:
    """Run the operator until SIGTERM or SIGINT; return the process's exit status.

    Parameters
    ----------
    environ : mapping, optional
        Read for the settings and for where the API server is; this process's environment if absent.
    """
    environ = os.environ if environ is None else environ
    try:
        settings = Settings.from_environment(environ)
        connection = connect(environ)
    except (SettingsError, ConnectionSettingsError) as error:
        print(f"fleetjob operator: {error}", file=sys.stderr)
        return 2
    configure_logging(settings.log_level, settings.log_format)
    try:
        return uvloop.run(Operator(settings, connection).run())
    except Exception:
        logger.exception("the operator ends because of a mistake of its own")
        return 1


class NotOpenedError(OperatorError):
    """What the operator was told cannot be served on or connected with; the message says why."""


class Operator:
    """One operator: the cluster, the engine, kopf, and what they serve.

    Parameters
    ----------
    settings : Settings
        How it is to behave.
    connection : Connection
        Where the API server is.
    """

    def __init__(self, settings: Settings, connection: Connection) -> None:
        self._settings = settings
        self._connection = connection
        self._metrics = Metrics()
        self._client = ApiClient(connection, on_request=self._metrics.requested)
        events = EventRecorder(self._client)
        self._view = ClusterView(
            self._client, events, namespaces=settings.namespaces, on_deleted=self._metrics.deleted
        )
        self._progress = ProgressReader(
            lambda: targets(self._view),
            self._view.notify,
            now=SystemClock().now,
            on_read=lambda answered: self._metrics.progress_read(answered=answered),
        )
        self._cluster = KubernetesCluster(self._client, self._view, events, progress=self._progress)
        self._metrics.watch_jobs(self._view.jobs)
        self._server = HttpServer(self._metrics.registry, problem=self._problem, waiting=self._waiting)
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    async def run(self) -> int:
        """Run until told to stop; return the exit status."""
        stop = asyncio.Event()
        _catch_signals(stop)
        try:
            await self._open()
            if await _unless(stop, self._view.start()):
                await self._work(stop)
        except (NotSyncedError, NotOpenedError) as error:
            logger.error("the operator gives up: %s", error)  # noqa: TRY400 the sentence says it all
            return 1
        finally:
            await self._view.close()
            await self._client.close()
            await self._server.close()
        logger.info("the operator has ended")
        return 0

    async def _open(self) -> None:
        settings = self._settings
        try:
            port = await self._server.start(settings.http_host, settings.http_port)
        except OSError as error:
            raise NotOpenedError(
                f"FLEET_OPERATOR_HTTP_HOST {settings.http_host} and FLEET_OPERATOR_HTTP_PORT"
                f" {settings.http_port} cannot be served on: {error}"
            ) from error
        logger.info("serving /metrics, /healthz and /readyz on port %d", port)
        try:
            await self._client.start()
        except OSError as error:  # one of the ssl module's
            raise NotOpenedError(
                f"the certificates for {self._connection.server} cannot be used: {error}"
            ) from error

    async def _work(self, stop: asyncio.Event) -> None:
        """Reconcile until told to stop, or until a part of the operator ends by itself."""
        engine = Engine(
            self._cluster,
            workers=self._settings.workers,
            observer=self._metrics,
            resync=self._settings.resync,
        )
        self._view.subscribe(engine.enqueue)
        for job in self._view.jobs():
            engine.enqueue(job_key(job))
        ready, stop_kopf = asyncio.Event(), asyncio.Event()
        working = asyncio.create_task(engine.run(), name="engine")
        stopping = asyncio.create_task(stop.wait(), name="wait for a signal")
        signals = asyncio.create_task(_catch_signals_after(ready, stop), name="take the signals back")
        reading = asyncio.create_task(self._progress.run(), name="read progress")
        watching = asyncio.create_task(self._run_kopf(ready, stop_kopf), name="kopf")
        self._tasks = (working, reading, watching)
        self._metrics.leading(holds=True)
        try:
            await asyncio.wait({working, watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._metrics.leading(holds=False)
            engine.stop()
            for task in (reading, signals, stopping):
                task.cancel()
            await self._server.close()  # its connections are younger than kopf, which would wait for them
            try:
                await working
            finally:
                stop_kopf.set()
                await watching

    async def _run_kopf(self, ready: asyncio.Event, stop: asyncio.Event) -> None:
        await kopf.operator(
            registry=registry_for(self._connection, self._view.take_job),
            settings=kopf_settings(),
            standalone=True,
            clusterwide=not self._settings.namespaces,
            namespaces=self._settings.namespaces,
            ready_flag=ready,
            stop_flag=stop,
        )

    def _problem(self) -> str | None:
        ended = [task.get_name() for task in self._tasks if task.done()] + self._view.ended()
        return f"ended: {', '.join(ended)}" if ended else None

    def _waiting(self) -> str | None:
        if not self._view.synced:
            return "the first lists from the API server have not arrived"
        return None if self._tasks else "the workers have not been started"


async def _unless(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Do `work` to its end, or give it up when told to stop; return whether it came to its end."""
    doing, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if doing.done():
            doing.result()
        return not stop.is_set()
    finally:
        doing.cancel()
        stopping.cancel()


def _catch_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


async def _catch_signals_after(ready: asyncio.Event, stop: asyncio.Event) -> None:
    await ready.wait()
    _catch_signals(stop)


if __name__ == "__main__":
    sys.exit(run_operator())
