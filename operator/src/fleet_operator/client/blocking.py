"""The blocking client: the calls of the asyncio client, run by an event loop in a thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, Self, TypeVar

from fleet_operator.client.asynchronous import AsyncFleetJobClient

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
    from pathlib import Path

    from fleet_operator.api import FleetJob, FleetJobStatus, Role
    from fleet_operator.client.logs import LogLine

T = TypeVar("T")


class _ClosedError(RuntimeError):
    """The client is closed, or was closed during the call."""


class FleetJobClient:
    """A blocking client for the FleetJobs in one namespace of a cluster.

    Use it as ``with FleetJobClient() as client``, or call `close`. It works in notebooks, where an event loop
    is already running, and from several threads. Errors are those of `AsyncFleetJobClient`.

    Parameters
    ----------
    namespace : str, optional
        The namespace of the jobs. Default: that of the context, or of the pod in which this runs.
    context : str, optional
        The context of the kubeconfig. Default: the current one.
    kubeconfig : path, optional
        The kubeconfig. Default: as for kubectl, ``KUBECONFIG`` or ``~/.kube/config``, or else the service
        account of the pod in which this runs.

    Raises
    ------
    ConnectionSettingsError
        There is no kubeconfig and no service account, or it is not usable.
    """

    def __init__(
        self,
        *,
        namespace: str | None = None,
        context: str | None = None,
        kubeconfig: str | Path | None = None,
    ) -> None:
        self._client = AsyncFleetJobClient(namespace=namespace, context=context, kubeconfig=kubeconfig)
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._closed = asyncio.Event()
        self._lock = threading.Lock()
        self._calls: set[Future[Any]] | None = set()
        """The calls that wait for the loop; None once the loop is closed."""
        # A daemon, so that a program that forgot to close the client can end.
        self._thread = threading.Thread(target=self._serve, name="FleetJobClient", daemon=True)
        self._thread.start()
        try:
            self._run(self._client.__aenter__())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return this client, which is already connected."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all requests and close all connections; closing a client twice is harmless."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closed.set)
            self._thread.join()

    @property
    def namespace(self) -> str:
        """The namespace in which the client looks for jobs."""
        return self._client.namespace

    def submit(
        self,
        job: str | Path | Mapping[str, Any] | FleetJob,
        *,
        force: bool = False,
        allow_unknown_fields: bool = False,
    ) -> FleetJob:
        """Create a job, or update it to match its manifest; see `AsyncFleetJobClient.submit`."""
        return self._run(self._client.submit(job, force=force, allow_unknown_fields=allow_unknown_fields))

    def get(self, name: str) -> FleetJob:
        """Return the job with the given name."""
        return self._run(self._client.get(name))

    def status(self, name: str) -> FleetJobStatus:
        """Return the status of a job; ``status.explanation.message`` explains its state."""
        return self._run(self._client.status(name))

    def list(self, *, all_namespaces: bool = False) -> list[FleetJob]:
        """Return the jobs in the namespace, or in all namespaces."""
        return self._run(self._client.list(all_namespaces=all_namespaces))

    def watch(self, name: str) -> Iterator[FleetJob]:
        """Yield a job immediately and after each change, until it has finished."""
        return self._iterate(self._client.watch(name))

    def wait(
        self, name: str, *, timeout_seconds: float | None = None, raise_on_failure: bool = True
    ) -> FleetJob:
        """Wait until a job has finished, and return it; see `AsyncFleetJobClient.wait`."""
        waiting = self._client.wait(name, timeout_seconds=timeout_seconds, raise_on_failure=raise_on_failure)
        return self._run(waiting)

    def logs(
        self,
        name: str,
        *,
        follow: bool = False,
        role: Role | None = None,
        index: int | None = None,
        tail: int | None = None,
        since_seconds: int | None = None,
        container: str | None = None,
    ) -> Iterator[LogLine]:
        """Yield the log lines of a job's replicas; see `AsyncFleetJobClient.logs`."""
        lines = self._client.logs(
            name,
            follow=follow,
            role=role,
            index=index,
            tail=tail,
            since_seconds=since_seconds,
            container=container,
        )
        return self._iterate(lines)

    def scale(self, name: str, trainers: int) -> FleetJob:
        """Change the number of trainers of a job, and return the job."""
        return self._run(self._client.scale(name, trainers))

    def suspend(self, name: str) -> FleetJob:
        """Stop all pods of a job until it is resumed; return the job."""
        return self._run(self._client.suspend(name))

    def resume(self, name: str) -> FleetJob:
        """Resume a suspended job, which then starts again; return the job."""
        return self._run(self._client.resume(name))

    def delete(self, name: str, *, wait_seconds: float | None = None, missing_ok: bool = False) -> None:
        """Delete a job and every object that it owns; see `AsyncFleetJobClient.delete`."""
        self._run(self._client.delete(name, wait_seconds=wait_seconds, missing_ok=missing_ok))

    def _serve(self) -> None:
        async def until_closed() -> None:
            await self._closed.wait()
            await self._client.__aexit__()

        try:
            with self._runner:  # it cancels what is left
                self._runner.run(until_closed())
        finally:
            with self._lock:
                calls, self._calls = self._calls, None
            # A call that came after the last turn of the loop would wait for ever.
            for each in calls or ():
                each.cancel()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the client's thread; cancel it on an exception such as KeyboardInterrupt."""
        future = self._begin(work)
        try:
            return future.result()
        except CancelledError:
            work.close()  # it has never begun if the loop was closing
            raise _ClosedError("this FleetJobClient was closed during the call") from None
        except BaseException:
            future.cancel()
            raise
        finally:
            with self._lock:
                if self._calls is not None:
                    self._calls.discard(future)

    def _begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        # In a forked process there is no copy of the thread, and another thread may have held the lock.
        if self._thread.is_alive():
            with self._lock:
                if self._calls is not None:
                    with contextlib.suppress(RuntimeError):  # the loop has just been closed
                        future = asyncio.run_coroutine_threadsafe(work, self._loop)
                        self._calls.add(future)
                        return future
        work.close()
        raise _ClosedError("this FleetJobClient is closed, or of another process; make a new one")

    def _iterate(self, items: AsyncGenerator[T]) -> Iterator[T]:
        turn = asyncio.Lock()  # a step that is interrupted ends before the generator is closed

        async def step() -> T | None:
            async with turn:
                return await anext(items, None)

        async def close() -> None:
            async with turn:
                await items.aclose()

        try:
            while (item := self._run(step())) is not None:
                yield item
        finally:
            with contextlib.suppress(_ClosedError):  # which has closed the generator
                self._run(close())
