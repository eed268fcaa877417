"""The operator's process: starts and stops its components in the right order.

It serves probes and metrics throughout its lifetime. It is active in terms, each of which lasts as long as it
holds the Lease. An operator that has lost the Lease becomes a standby again instead of exiting. Otherwise the
kubelet would delay its restart by CrashLoopBackOff after an outage of the API server. The operator restores
its signal handlers as soon as kopf has replaced them, so that running passes and open connections end first.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import secrets
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from aiohttp import ClientConnectionError

from fleet_operator.engine import Election
from fleet_operator.errors import OperatorError
from fleet_operator.http_server import HttpServer
from fleet_operator.kubernetes.client import ApiClient, TokenBucket
from fleet_operator.kubernetes.informer_cache import NotSyncedError
from fleet_operator.kubernetes.login import ConnectionSettingsError, account_reference, connect
from fleet_operator.logs import configure_logging
from fleet_operator.metrics import Metrics
from fleet_operator.settings import Settings, SettingsError
from fleet_operator.term import Term, unless

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet_operator.kubernetes.login import Connection

logger = logging.getLogger("fleet_operator.startup")  # the same name if this module runs as __main__

AGAIN_SECONDS = 1.0
"""The delay before the next term after a term that ended unexpectedly."""

COLLECTIONS = (5_000, 10, 10)
"""The thresholds of the garbage collector's generations."""


def run_operator(environ: Mapping[str, str] | None = None) -> int:
    """Run the operator until SIGTERM or SIGINT, and return the exit status.

    Parameters
    ----------
    environ : mapping, optional
        Read for the settings and the API server's address; this process's environment if absent.
    """
    environ = os.environ if environ is None else environ
    try:
        settings = Settings.from_environment(environ)
        connection = connect(environ)
    except (SettingsError, ConnectionSettingsError) as error:
        print(f"fleetjob operator: {error}", file=sys.stderr)
        return 2
    configure_logging(settings.log_level, settings.log_format)
    _collect_rarely()
    try:
        return asyncio.run(Operator(settings, connection).run())
    except Exception:
        logger.exception("the operator ends because of a mistake of its own")
        return 1


class NotOpenedError(OperatorError):
    """The operator cannot use its configured address or connection; the message gives the reason."""


class Operator:
    """The operator process, which alternates between standby and leadership.

    Parameters
    ----------
    settings : Settings
        The settings.
    connection : Connection
        The connection to the API server.
    """

    def __init__(self, settings: Settings, connection: Connection) -> None:
        self._settings = settings
        self._connection = connection
        self._metrics = Metrics()
        self._bucket = TokenBucket(settings.writes_per_second, settings.writes_per_second)
        self._client = ApiClient(
            connection, on_request=self._metrics.requested, before_write=self._before_write
        )
        self._electing = ApiClient(connection, on_request=self._metrics.requested)
        self._election = Election(
            self._electing,
            namespace=connection.namespace,
            name=settings.lease,
            identity=settings.identity or f"{socket.gethostname()}-{secrets.token_hex(4)}",
            duration=settings.lease_duration,
            owner=lambda: account_reference(connection),
        )
        self._term: Term | None = None
        self._metrics.watch_jobs(lambda: self._term.jobs() if self._term else ())
        self._metrics.watch_watches(lambda: self._term.failing() if self._term else ())
        self._server = HttpServer(self._metrics.registry, problem=self._problem, waiting=self._waiting)

    async def run(self) -> int:
        """Run until stopped, and return the exit status."""
        stop = asyncio.Event()
        _catch_signals(stop)
        asyncio.get_running_loop().set_exception_handler(_tell_of_loop)
        try:
            await self._open()
            while not stop.is_set() and await unless(stop, self._election.acquire()):
                await self._lead(stop)
        except (NotSyncedError, NotOpenedError) as error:
            logger.error("the operator gives up: %s", error)  # noqa: TRY400 no traceback needed
            return 1
        finally:
            await self._election.release()
            await self._electing.close()
            await self._client.close()
            await self._server.close()
        logger.info("the operator has ended")
        return 0

    async def _open(self) -> None:
        settings = self._settings
        name = self._connection.tls_server_name
        if name is not None and self._connection.server.startswith("https:"):
            # kopf opens its requests itself, and offers no way to set the TLS server name.
            raise NotOpenedError(
                f"the kubeconfig's tls-server-name {name} is not supported for the operator; use a server"
                f" address that its certificate names instead of {self._connection.server}"
            )
        try:
            port = await self._server.start(settings.http_host, settings.http_port)
        except OSError as error:
            raise NotOpenedError(
                f"FLEET_OPERATOR_HTTP_HOST {settings.http_host or '(all)'} and FLEET_OPERATOR_HTTP_PORT"
                f" {settings.http_port} cannot be served on: {error}"
            ) from error
        logger.info("serving /metrics, /healthz and /readyz on port %d", port)
        await self._client.start()
        await self._electing.start()

    async def _lead(self, stop: asyncio.Event) -> None:
        """Serve as the leader until stopped, the lease is lost, or a component ends."""
        ending = asyncio.Event()
        keeping = asyncio.create_task(self._election.keep(), name="keep the lease")
        stopping = asyncio.create_task(stop.wait(), name="wait for a signal")
        for task in (keeping, stopping):
            task.add_done_callback(lambda _: ending.set())
        self._term = Term(self._settings, self._connection, self._client, self._metrics)
        self._metrics.leading(holds=True)

        async def close_server() -> None:
            if stop.is_set():
                await self._server.close()  # kopf would wait for its tasks, which are newer

        try:
            await self._term.run(
                ending, on_signals_taken=lambda: _catch_signals(stop), before_kopf_ends=close_server
            )
        finally:
            self._metrics.leading(holds=False)
            self._term = None
            keeping.cancel()
            stopping.cancel()
        if not ending.is_set():  # the term ended unexpectedly: do not retry immediately
            await unless(stop, asyncio.sleep(AGAIN_SECONDS))

    async def _before_write(self) -> None:
        """Wait for the rate limiter before a write; raise an error if the lease may be lost."""
        await self._bucket.take()
        # Check last, because the lease may be lost while the write waits.
        self._election.check()

    def _problem(self) -> str | None:
        return self._term.problem() if self._term is not None else None

    def _waiting(self) -> str | None:
        if not self._election.asked:
            return f"the API server has not said who holds the lease {self._election.name}"
        if self._term is not None:
            return self._term.waiting()
        return "the term has not begun" if self._election.leads else None


def _collect_rarely() -> None:
    """Make garbage collection less frequent, and exclude imported modules from it.

    Almost no cached object is part of a cycle, but each collection would traverse all cached objects. With a
    thousand jobs, its pauses are long.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECTIONS)


def _tell_of_loop(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log exceptions of the event loop, except those of generators closed at shutdown.

    If kopf is stopped during an event, it leaves the generator of its watch open, and closing that generator
    raises an exception. If it is stopped during concurrent requests, or one of them fails, the errors of the
    other requests are never retrieved. Nothing is lost, but a traceback would suggest otherwise.
    """
    if "asyncgen" in context or isinstance(context.get("exception"), ClientConnectionError):
        logger.debug("%s: %s", context["message"], context.get("exception"))
    else:
        loop.default_exception_handler(context)


def _catch_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


if __name__ == "__main__":
    sys.exit(run_operator())
