"""What the operator counts, as Prometheus reads it."""

from __future__ import annotations

from collections import Counter as Tally
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from fleet_operator.api import FleetJob, JobState
from fleet_operator.engine import Observer
from fleet_operator.plan.model import CreatePod, DeletePod

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from fleet_operator.cluster.interface import Key
    from fleet_operator.engine import Result
    from fleet_operator.plan.model import Action

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
DURATIONS = (10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)


class Metrics(Observer):
    """Counts what the engine and the API client tell of."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        by_job = ("namespace", "mode")
        self._created = Counter(
            "fleetjob_jobs_created", "FleetJobs seen for the first time", by_job, registry=registry
        )
        self._restarted = Counter(
            "fleetjob_jobs_restarted", "Restarts of replicas and of whole jobs", by_job, registry=registry
        )
        self._successful = Counter(
            "fleetjob_jobs_successful", "FleetJobs that succeeded", by_job, registry=registry
        )
        self._failed = Counter("fleetjob_jobs_failed", "FleetJobs that failed", by_job, registry=registry)
        self._deleted = Counter(
            "fleetjob_jobs_deleted", "FleetJobs that were deleted", ("namespace",), registry=registry
        )
        self._duration = Histogram(
            "fleetjob_job_execution_duration_seconds",
            "From a FleetJob's start to its end",
            ("namespace", "mode", "result"),
            buckets=DURATIONS,
            registry=registry,
        )
        self._until_pods = Histogram(
            "fleetjob_job_to_pod_creation_latency_seconds",
            "From the creation of a FleetJob to that of each pod of its first attempt",
            buckets=SECONDS,
            registry=registry,
        )
        self._pods_created = Counter("fleetjob_pods_created", "Pods created", registry=registry)
        self._pods_deleted = Counter("fleetjob_pods_deleted", "Pods deleted", registry=registry)
        self._passes = Histogram(
            "fleetjob_reconcile_duration_seconds",
            "Passes over one FleetJob, by how they ended",
            ("result",),
            buckets=SECONDS,
            registry=registry,
        )
        self._queue = Gauge("fleetjob_queue_depth", "FleetJobs that wait for a worker", registry=registry)
        self._requests = Histogram(
            "fleetjob_api_request_duration_seconds",
            "Requests to the API server; code 0 is no answer",
            ("verb", "resource", "code"),
            buckets=SECONDS,
            registry=registry,
        )

    def watch_jobs(self, jobs: Callable[[], Iterable[FleetJob]]) -> None:
        """Also count the jobs there are, by state, whenever somebody reads the metrics."""
        self.registry.register(_Jobs(jobs))

    def requested(self, verb: str, resource: str, status: int, seconds: float) -> None:
        """Note a request to the API server."""
        self._requests.labels(verb, resource, str(status)).observe(seconds)

    def deleted(self, key: Key) -> None:
        """Note that a FleetJob is gone."""
        self._deleted.labels(key.namespace).inc()

    def passed(self, key: Key, result: Result, seconds: float) -> None:  # noqa: ARG002 no series for each job
        """Note that a pass over one job has ended."""
        self._passes.labels(result.value).observe(seconds)

    def status_written(self, before: FleetJob, after: FleetJob) -> None:
        """Count the step that a job has made."""
        labels = (after.metadata.namespace, after.spec.mode.value)
        if before.status.state is None:
            self._created.labels(*labels).inc()
        if (restarts := after.status.restarts - before.status.restarts) > 0:
            self._restarted.labels(*labels).inc(restarts)
        if after.status.finished and not before.status.finished:
            succeeded = after.status.state is JobState.SUCCEEDED
            (self._successful if succeeded else self._failed).labels(*labels).inc()
            if after.status.start_time is not None and after.status.completion_time is not None:
                taken = (after.status.completion_time - after.status.start_time).total_seconds()
                self._duration.labels(*labels, str(after.status.state)).observe(taken)

    def applied(self, job: FleetJob, action: Action) -> None:
        """Count pods."""
        if isinstance(action, DeletePod):
            self._pods_deleted.inc()
        elif isinstance(action, CreatePod):
            self._pods_created.inc()
            created = job.metadata.creation_timestamp
            if created is not None and job.status.restarts == 0:
                self._until_pods.observe(max(0.0, (datetime.now(UTC) - created).total_seconds()))

    def queued(self, depth: int) -> None:
        """Note how many keys wait for a worker now."""
        self._queue.set(depth)


class _Jobs(Collector):
    """The jobs there are, counted when they are asked for."""

    def __init__(self, jobs: Callable[[], Iterable[FleetJob]]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        """Return how many jobs are in each state."""
        tally = Tally(
            (job.metadata.namespace, str(job.status.state or JobState.PENDING)) for job in self._jobs()
        )
        family = GaugeMetricFamily("fleetjob_jobs", "FleetJobs by state", labels=("namespace", "state"))
        for labels, count in tally.items():
            family.add_metric(labels, count)
        yield family

    def describe(self) -> Iterable[Metric]:
        """Return nothing: what there is to count is not known before the jobs are."""
        return ()
