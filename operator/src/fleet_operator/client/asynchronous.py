"""The asyncio client for FleetJobs, which returns the models of `fleet_operator.api`."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from fleet_operator.api import FleetJob, JobState, read_job
from fleet_operator.client.logs import Logs, Wanted
from fleet_operator.client.session import (
    ClusterRefusal,
    JobNotFoundError,
    Where,
    open_session,
)
from fleet_operator.errors import InvalidJob, OperatorError
from fleet_operator.manifests.manifest import check_document, check_manifest, load_manifest

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from fleet_operator.api import FleetJobStatus, Role
    from fleet_operator.client.logs import LogLine
    from fleet_operator.client.session import Session

logger = logging.getLogger(__name__)

SUBMITTED_METADATA = ("name", "namespace", "labels", "annotations")
"""The metadata of a `FleetJob` that a person sets; the API server sets the rest."""


class JobFailedError(OperatorError):
    """The job that a client was waiting for has failed.

    Attributes
    ----------
    job : FleetJob
        The job; ``job.status.last_failure`` and its conditions have the details.
    """

    def __init__(self, message: str, job: FleetJob) -> None:
        super().__init__(message)
        self.job = job


class AsyncFleetJobClient:
    """An asyncio client for the FleetJobs in one namespace of a cluster.

    Use it as ``async with AsyncFleetJobClient() as client``. Requests may run at the same time.

    Parameters
    ----------
    namespace : str, optional
        The namespace of the jobs. Default: that of the context, or of the pod in which this runs.
    context : str, optional
        The context of the kubeconfig. Default: the current one.
    kubeconfig : path, optional
        The kubeconfig. Default: as for kubectl, ``KUBECONFIG`` or ``~/.kube/config``, or else the service
        account of the pod in which this runs.
    """

    def __init__(
        self,
        *,
        namespace: str | None = None,
        context: str | None = None,
        kubeconfig: str | Path | None = None,
    ) -> None:
        file = None if kubeconfig is None else Path(kubeconfig)
        self._where = Where(file, context, namespace)
        self._opened: Session | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        """Log in to the cluster.

        Raises
        ------
        ConnectionSettingsError
            There is no kubeconfig and no service account, or it is not usable.
        """
        self._opened = await self._stack.enter_async_context(open_session(self._where))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._opened = None
        await self._stack.aclose()

    @property
    def namespace(self) -> str:
        """The namespace in which the client looks for jobs."""
        return self._session.namespace

    async def submit(
        self,
        job: str | Path | Mapping[str, Any] | FleetJob,
        *,
        force: bool = False,
        allow_unknown_fields: bool = False,
    ) -> FleetJob:
        """Create a job, or update it to match its manifest, like ``fleetjob submit``.

        Parameters
        ----------
        job : path, mapping or FleetJob
            A manifest: a YAML or JSON file, its content as a mapping, or a model.
        force : bool
            Whether to take over fields that others, such as kubectl, have set.
        allow_unknown_fields : bool
            Whether to accept fields of a pod's template that this version does not know.

        Returns
        -------
        FleetJob
            The job as the API server has stored it.

        Raises
        ------
        ManifestError, InvalidJob
            The file cannot be read, or the manifest is not valid; the error lists every problem. Nothing was
            sent.
        ClusterRefusal
            The API server refused it, for instance a change of a field that cannot change.
        """
        if isinstance(job, str | Path):
            manifest = await asyncio.to_thread(load_manifest, Path(job))
            check_manifest(manifest, allow_unknown_fields=allow_unknown_fields, warn=logger.warning)
            document: Mapping[str, Any] = manifest.document
        else:
            document = _document(job) if isinstance(job, FleetJob) else job
            check_document(document, allow_unknown_fields=allow_unknown_fields, warn=logger.warning)
        _, stored = await self._session.submit(document, force=force)
        return _parsed(stored)

    async def get(self, name: str) -> FleetJob:
        """Return the job with the given name.

        Raises
        ------
        JobNotFoundError
            There is no job of this name in the namespace.
        """
        return _parsed(await self._session.job(name))

    async def status(self, name: str) -> FleetJobStatus:
        """Return the status of a job; ``status.explanation.message`` explains its state."""
        return (await self.get(name)).status

    async def list(self, *, all_namespaces: bool = False) -> list[FleetJob]:
        """Return the jobs in the namespace, or in all namespaces."""
        return [_parsed(job) for job in await self._session.jobs(everywhere=all_namespaces)]

    async def watch(self, name: str) -> AsyncGenerator[FleetJob]:
        """Yield a job immediately and after each change, until it has finished.

        Interrupted connections are resumed. A slow caller gets only the newest version.

        Raises
        ------
        JobNotFoundError
            There is no job of this name, or it was deleted before it had finished.
        """
        async with aclosing(self._session.changes(name)) as changes:
            async for job in changes:
                yield _parsed(job)

    async def wait(
        self, name: str, *, timeout_seconds: float | None = None, raise_on_failure: bool = True
    ) -> FleetJob:
        """Wait until a job has finished, and return it.

        Parameters
        ----------
        name : str
            The job.
        timeout_seconds : float, optional
            The maximum time to wait. Default: as long as the job takes.
        raise_on_failure : bool
            Whether a failed job raises an error; if not, it is returned too.

        Raises
        ------
        JobFailedError
            The job has failed.
        NotInTimeError
            The job has not finished in time, and continues. It is also a ``TimeoutError``.
        JobNotFoundError
            There is no job of this name, or it was deleted before it had finished.
        """
        summary = await self._session.wait(name, timeout_seconds=timeout_seconds)
        job = _parsed(summary.raw)
        if raise_on_failure and job.status.state is JobState.FAILED:
            raise JobFailedError(
                f"FleetJob {name} has failed: {summary.sentence}; `fleetjob logs {name}` shows its logs", job
            )
        return job

    async def logs(
        self,
        name: str,
        *,
        follow: bool = False,
        role: Role | None = None,
        index: int | None = None,
        tail: int | None = None,
        since_seconds: int | None = None,
        container: str | None = None,
    ) -> AsyncGenerator[LogLine]:
        """Yield the log lines of a job's replicas.

        Parameters
        ----------
        name : str
            The job.
        follow : bool
            Whether to yield new lines too, through all restarts until the job has finished.
        role, index : optional
            Only the replicas of this role, and only the one with this index.
        tail : int, optional
            Only this many of the last lines of each replica.
        since_seconds : int, optional
            Only the lines of the last `since_seconds` seconds.
        container : str, optional
            The container. Default: the main one.

        Raises
        ------
        ClusterRefusal
            No log could be read; the message gives the reason. Remarks about single replicas, such as their
            restarts, are logged by ``logging`` with level INFO.
        """
        notes = ["no replica has a log"]

        def note(sentence: str) -> None:
            notes.append(sentence)
            logger.info("%s: %s", name, sentence)

        logs = Logs(self._session, name, Wanted(role, index, tail, since_seconds, container), note=note)
        async with aclosing(logs.follow() if follow else logs.existing()) as lines:
            async for line in lines:
                yield line
        if logs.failed:
            raise ClusterRefusal(f"no log of FleetJob {name} could be read: {notes[-1]}")

    async def scale(self, name: str, trainers: int) -> FleetJob:
        """Change the number of trainers of a job, and return the job.

        Raises
        ------
        ClusterRefusal
            The API server refused it: the number must be from ``minReplicas`` to ``maxReplicas``.
        """
        await self._session.scale(name, trainers)
        return await self.get(name)

    async def suspend(self, name: str) -> FleetJob:
        """Stop all pods of a job until it is resumed; return the job. Suspending twice is harmless."""
        return _parsed((await self._session.suspend(name, suspended=True))[1])

    async def resume(self, name: str) -> FleetJob:
        """Resume a suspended job, which then starts again; return the job."""
        return _parsed((await self._session.suspend(name, suspended=False))[1])

    async def delete(self, name: str, *, wait_seconds: float | None = None, missing_ok: bool = False) -> None:
        """Delete a job and every object that it owns.

        Parameters
        ----------
        name : str
            The job.
        wait_seconds : float, optional
            Return once all of its pods are gone, after at most this time. Default: return at once.
        missing_ok : bool
            Whether to do nothing, instead of raising an error, if there is no such job.

        Raises
        ------
        JobNotFoundError
            There is no job of this name.
        NotInTimeError
            Pods still exist after `wait_seconds`.
        """
        try:
            await self._session.delete(name, wait_seconds=wait_seconds)
        except JobNotFoundError:
            if not missing_ok:
                raise

    @property
    def _session(self) -> Session:
        if self._opened is None:
            raise RuntimeError("the client is not open; use `async with AsyncFleetJobClient() as client`")
        return self._opened


def _document(job: FleetJob) -> dict[str, Any]:
    """Return a job's manifest with only the fields that users set."""
    document = job.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"status"})
    metadata = {key: document["metadata"][key] for key in SUBMITTED_METADATA if key in document["metadata"]}
    return {**document, "apiVersion": job.api_version, "kind": job.kind, "metadata": metadata}


def _parsed(stored: Mapping[str, Any]) -> FleetJob:
    try:
        return read_job(stored)
    except InvalidJob as error:
        raise ClusterRefusal(
            f"this version of fleet-operator cannot read a job of the cluster; install the cluster's: {error}"
        ) from error
