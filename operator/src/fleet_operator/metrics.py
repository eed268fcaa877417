"""The operator's Prometheus metrics."""

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

from fleet_operator.api import ConditionType, FleetJob, JobState
from fleet_operator.engine import Observer, Result
from fleet_operator.plan.decide.failure_policy import FailReason
from fleet_operator.plan.decide.run_policy import pending_since
from fleet_operator.plan.model import CreatePod, DeletePod

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from prometheus_client.metrics_core import Metric

    from fleet_operator.cluster import Key
    from fleet_operator.plan.model import Action

PREFIX = "fleet_operator"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
DURATIONS = (10, 30, 60, 300, 900, 3600, 4 * 3600, 24 * 3600, 7 * 24 * 3600)


class Metrics(Observer):
    """Records what the engine and the API client do, as Prometheus metrics."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self._count_jobs()
        self._count_work()
        self._count_what_is_outside()

    def _count_jobs(self) -> None:
        by_job = ("job_namespace", "mode")
        self._created = self._counter("jobs_created", "FleetJobs seen for the first time", *by_job)
        self._restarted = self._counter("jobs_restarted", "Restarts of replicas and of whole jobs", *by_job)
        self._successful = self._counter("jobs_successful", "FleetJobs that succeeded", *by_job)
        self._failed = self._counter("jobs_failed", "FleetJobs that failed", *by_job, "reason")
        self._deleted = self._counter("jobs_deleted", "FleetJobs that were deleted", "job_namespace")
        self._duration = self._histogram(
            "job_execution_duration_seconds",
            "Time from a FleetJob's start to its end",
            *by_job,
            "result",
            buckets=DURATIONS,
        )
        self._until_pods = self._histogram(
            "job_to_pod_creation_latency_seconds",
            "Time from the creation of a FleetJob to the creation of each pod of its first attempt",
        )
        self._until_running = self._histogram(
            "job_to_running_latency_seconds",
            "Time from the creation of a FleetJob until all of its replicas ran for the first time",
            buckets=(*SECONDS, 60, 300, 900, 3600),
        )
        self._pods_created = self._counter("pods_created", "Pods created")
        self._pods_deleted = self._counter("pods_deleted", "Pods deleted")

    def _count_work(self) -> None:
        self._leading = Gauge(
            f"{PREFIX}_leader", "1 while this operator is the leader", registry=self.registry
        )
        self._passes = self._histogram(
            "reconcile_duration_seconds", "Duration of passes over one FleetJob, by result", "result"
        )
        self._errors = self._counter(
            "reconcile_errors",
            "Passes that are retried, because they failed or were based on stale state",
            "result",
        )
        self._queue = Gauge(f"{PREFIX}_queue_depth", "FleetJobs waiting for a worker", registry=self.registry)
        self._waited = self._histogram(
            "queue_latency_seconds", "Time from the first event of a FleetJob to the pass that processes it"
        )

    def _count_what_is_outside(self) -> None:
        self._requests = self._histogram(
            "api_request_duration_seconds",
            "Duration of requests to the API server; code 0 means no response",
            "verb",
            "resource",
            "code",
        )
        self._reads = self._counter(
            "progress_reads", "Requests for the progress of trainers, by result", "result"
        )

    def _counter(self, name: str, meaning: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", meaning, labels, registry=self.registry)

    def _histogram(
        self, name: str, meaning: str, *labels: str, buckets: tuple[float, ...] = SECONDS
    ) -> Histogram:
        return Histogram(f"{PREFIX}_{name}", meaning, labels, buckets=buckets, registry=self.registry)

    def watch_jobs(self, jobs: Callable[[], Iterable[FleetJob]]) -> None:
        """Register a collector that counts jobs by state on each scrape."""
        self.registry.register(_Jobs(jobs))

    def watch_watches(self, failing: Callable[[], Iterable[tuple[str, str | None, float]]]) -> None:
        """Register a collector that reports failing watches on each scrape.

        Parameters
        ----------
        failing : callable
            Returns the seconds for each kind of object in each namespace (None: all of them).
        """
        self.registry.register(_Watches(failing))

    def seen(self, job: FleetJob) -> None:
        """Initialize the series of a job's namespace to 0, so that Prometheus sees their first increase."""
        labels = (job.metadata.namespace, str(job.spec.mode))
        self._successful.labels(*labels)
        self._restarted.labels(*labels)
        for reason in FailReason:
            self._failed.labels(*labels, reason.value)

    def requested(self, verb: str, resource: str, status: int, seconds: float) -> None:
        """Record the duration of a request to the API server."""
        self._requests.labels(verb, resource, str(status)).observe(seconds)

    def deleted(self, key: Key) -> None:
        """Count a deleted FleetJob."""
        self._deleted.labels(key.namespace).inc()

    def passed(self, key: Key, result: Result, seconds: float) -> None:  # noqa: ARG002 no series for each job
        """Record the duration and the result of a pass over a job."""
        self._passes.labels(result.value).observe(seconds)
        if result in (Result.FAILED, Result.CONFLICT):
            self._errors.labels(result.value).inc()

    def waited(self, seconds: float) -> None:
        """Record how long a job waited for a worker."""
        self._waited.observe(seconds)

    def leading(self, *, holds: bool) -> None:
        """Set whether this operator is the leader."""
        self._leading.set(holds)

    def progress_read(self, *, answered: bool) -> None:
        """Count an attempt to read a trainer's progress."""
        self._reads.labels("answered" if answered else "silent").inc()

    def status_written(self, before: FleetJob, after: FleetJob) -> None:
        """Update the metrics about jobs after a write of a job's status."""
        labels = (after.metadata.namespace, str(after.spec.mode))
        if before.status.state is None:
            self.seen(after)
            self._created.labels(*labels).inc()
        if (restarts := after.status.restarts - before.status.restarts) > 0:
            self._restarted.labels(*labels).inc(restarts)
        running = JobState.RUNNING
        if after.status.state is running and before.status.state is not running and _is_first_life(after):
            self._observe_age(self._until_running, after)
        if after.status.finished and not before.status.finished:
            self._ended(after)

    def _ended(self, job: FleetJob) -> None:
        status, labels = job.status, (job.metadata.namespace, str(job.spec.mode))
        if status.state is JobState.SUCCEEDED:
            self._successful.labels(*labels).inc()
        else:
            failed = status.condition(ConditionType.FAILED)
            self._failed.labels(*labels, failed.reason if failed is not None else "").inc()
        if status.start_time is not None and status.completion_time is not None:
            taken = (status.completion_time - status.start_time).total_seconds()
            # Negative if the clock was set back. A sum that falls would look like a restart of the operator.
            self._duration.labels(*labels, str(status.state)).observe(max(0.0, taken))

    def applied(self, job: FleetJob, action: Action) -> None:
        """Count a created or deleted pod, and record how long a new job waited for its pod."""
        if isinstance(action, DeletePod):
            self._pods_deleted.inc()
        elif isinstance(action, CreatePod):
            self._pods_created.inc()
            if _is_first_life(job):
                self._observe_age(self._until_pods, job)

    def _observe_age(self, histogram: Histogram, job: FleetJob) -> None:
        created = job.metadata.creation_timestamp
        if created is not None:
            histogram.observe(max(0.0, (datetime.now(UTC) - created).total_seconds()))

    def queued(self, depth: int) -> None:
        """Set the number of jobs that are waiting for a worker."""
        self._queue.set(depth)


def _is_first_life(job: FleetJob) -> bool:
    """Return whether a job was never suspended, and neither the job nor a replica was restarted."""
    status = job.status
    restarted = status.restarts or status.job_restarts
    return not restarted and status.condition(ConditionType.SUSPENDED) is None


def _waits_seconds(job: FleetJob, now: datetime) -> float:
    if job.status.state not in (None, JobState.PENDING):
        return 0.0
    since = pending_since(job.status) or job.metadata.creation_timestamp
    return 0.0 if since is None else max(0.0, (now - since).total_seconds())


class _Jobs(Collector):
    """A collector of the number of jobs, computed on each scrape."""

    def __init__(self, jobs: Callable[[], Iterable[FleetJob]]) -> None:
        self._jobs = jobs

    def collect(self) -> Iterator[Metric]:
        """Yield the number of jobs by state, and the longest wait, for each namespace."""
        jobs = [job for job in self._jobs() if not job.managed_elsewhere]
        tally = Tally((job.metadata.namespace, str(job.status.state or JobState.PENDING)) for job in jobs)
        family = GaugeMetricFamily(f"{PREFIX}_jobs", "FleetJobs by state", labels=("job_namespace", "state"))
        for labels, count in tally.items():
            family.add_metric(labels, count)
        yield family
        now, longest = datetime.now(UTC), dict[str, float]()
        for job in jobs:
            namespace = job.metadata.namespace
            longest[namespace] = max(longest.get(namespace, 0.0), _waits_seconds(job, now))
        waits = GaugeMetricFamily(
            f"{PREFIX}_job_longest_wait_seconds",
            "For how long the Pending FleetJob that waits longest has not run; 0 without one",
            labels=("job_namespace",),
        )
        for namespace, seconds in longest.items():
            waits.add_metric((namespace,), seconds)
        yield waits

    def describe(self) -> Iterable[Metric]:
        """Return no descriptions, because the series depend on the jobs."""
        return ()


class _Watches(Collector):
    """A collector of the time for which each watch has been failing, computed on each scrape."""

    def __init__(self, failing: Callable[[], Iterable[tuple[str, str | None, float]]]) -> None:
        self._failing = failing

    def collect(self) -> Iterator[Metric]:
        """Yield the number of seconds that each kind's watch in each namespace has been failing."""
        family = GaugeMetricFamily(
            f"{PREFIX}_watch_failing_seconds",
            "For how long a kind of object could not be listed and watched; 0 while it is. The namespace is"
            " empty where all are watched at once",
            labels=("resource", "job_namespace"),
        )
        for resource, namespace, seconds in self._failing():
            family.add_metric((resource, namespace or ""), seconds)
        yield family

    def describe(self) -> Iterable[Metric]:
        """Return no descriptions, because the watches change with each term as leader."""
        return ()
