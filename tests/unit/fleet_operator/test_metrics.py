from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.api import Condition, ConditionStatus, ConditionType, FleetJobStatus, JobState
from fleet_operator.cluster import Key
from fleet_operator.engine import Result
from fleet_operator.metrics import Metrics
from fleet_operator.plan.model import CreatePod, CreateService, DeletePod
from tests.support.jobs import job, manifest

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob

LABELS = {"job_namespace": "default", "mode": "ParameterServer"}
START = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def step(metrics: Metrics, before: FleetJobStatus, after: FleetJobStatus) -> None:
    one = job()
    metrics.status_written(
        one.model_copy(update={"status": before}), one.model_copy(update={"status": after})
    )


def value(metrics: Metrics, name: str, labels: dict[str, str] | None = None) -> float | None:
    return metrics.registry.get_sample_value(name, labels or {})


def test_a_jobs_life_is_counted(metrics: Metrics):
    pending = FleetJobStatus(state=JobState.PENDING, start_time=START)
    running = pending.model_copy(update={"state": JobState.RUNNING})
    again = running.model_copy(update={"state": JobState.RESTARTING, "restarts": 2})
    end = {"state": JobState.SUCCEEDED, "completion_time": START + timedelta(seconds=90)}
    succeeded = again.model_copy(update=end)
    history = [FleetJobStatus(), pending, running, again, succeeded, succeeded]
    for before, after in pairwise(history):
        step(metrics, before, after)
    metrics.deleted(Key("default", "digits"))
    assert value(metrics, "fleet_operator_jobs_created_total", LABELS) == 1
    assert value(metrics, "fleet_operator_jobs_restarted_total", LABELS) == 2
    assert value(metrics, "fleet_operator_jobs_successful_total", LABELS) == 1
    assert value(metrics, "fleet_operator_jobs_failed_total", LABELS) is None
    assert value(metrics, "fleet_operator_jobs_deleted_total", {"job_namespace": "default"}) == 1
    duration = "fleet_operator_job_execution_duration_seconds"
    assert value(metrics, f"{duration}_sum", {**LABELS, "result": "Succeeded"}) == 90


def test_a_clock_that_is_set_back_does_not_make_the_sum_of_durations_fall(metrics: Metrics):
    running = FleetJobStatus(state=JobState.RUNNING, start_time=START)
    end = {"state": JobState.SUCCEEDED, "completion_time": START - timedelta(hours=1)}
    step(metrics, running, running.model_copy(update=end))
    duration, labels = "fleet_operator_job_execution_duration_seconds", {**LABELS, "result": "Succeeded"}
    assert value(metrics, f"{duration}_count", labels) == 1
    assert value(metrics, f"{duration}_sum", labels) == 0


def test_a_failed_job_is_counted(metrics: Metrics):
    told = Condition(
        type=ConditionType.FAILED,
        status=ConditionStatus.TRUE,
        reason="BackoffLimitExceeded",
        last_transition_time=START,
    )
    running = FleetJobStatus(state=JobState.RUNNING)
    step(metrics, running, FleetJobStatus(state=JobState.FAILED, conditions=(told,)))
    labels = {**LABELS, "reason": "BackoffLimitExceeded"}
    assert value(metrics, "fleet_operator_jobs_failed_total", labels) == 1


def test_the_wait_for_all_replicas_is_measured_once(metrics: Metrics):
    created = job(creationTimestamp="2026-01-01T00:00:00Z")
    pending, running = FleetJobStatus(state=JobState.PENDING), FleetJobStatus(state=JobState.RUNNING)
    again = FleetJobStatus(state=JobState.RUNNING, restarts=1)
    for before, after in ((pending, running), (running, running), (pending, again)):
        metrics.status_written(created.with_status(before), created.with_status(after))
    assert value(metrics, "fleet_operator_job_to_running_latency_seconds_count") == 1


def test_pods_are_counted_and_the_wait_for_the_first_ones(metrics: Metrics):
    created = job(creationTimestamp="2026-01-01T00:00:00Z")
    metrics.applied(created, CreatePod(dict))
    metrics.applied(created.model_copy(update={"status": FleetJobStatus(restarts=1)}), CreatePod(dict))
    metrics.applied(created, DeletePod("p", "u"))
    metrics.applied(created, CreateService({}))
    assert value(metrics, "fleet_operator_pods_created_total") == 2
    assert value(metrics, "fleet_operator_pods_deleted_total") == 1
    assert value(metrics, "fleet_operator_job_to_pod_creation_latency_seconds_count") == 1


@pytest.mark.parametrize(
    "later",
    [
        pytest.param({"restarts": 1}, id="after-a-failure"),
        pytest.param({"job_restarts": 1}, id="after-another-number-of-trainers"),
        pytest.param(
            {
                "conditions": (
                    Condition(
                        type=ConditionType.SUSPENDED,
                        status=ConditionStatus.FALSE,
                        reason="Resumed",
                        last_transition_time=START,
                    ),
                )
            },
            id="after-a-suspension",
        ),
    ],
)
def test_a_jobs_age_is_no_wait_when_it_starts_later(metrics: Metrics, later):
    created = job(creationTimestamp="2026-01-01T00:00:00Z")
    pending = FleetJobStatus(state=JobState.PENDING, **later)
    metrics.applied(created.with_status(pending), CreatePod(dict))
    running = pending.model_copy(update={"state": JobState.RUNNING})
    metrics.status_written(created.with_status(pending), created.with_status(running))
    assert value(metrics, "fleet_operator_job_to_pod_creation_latency_seconds_count") == 0
    assert value(metrics, "fleet_operator_job_to_running_latency_seconds_count") == 0


@pytest.mark.parametrize("how", ["a-new-job", "a-job-that-was-there"])
def test_what_may_happen_to_a_namespaces_jobs_is_counted_from_zero_on(metrics: Metrics, how):
    if how == "a-new-job":
        step(metrics, FleetJobStatus(), FleetJobStatus(state=JobState.PENDING))
    else:
        metrics.seen(job())
    for reason in ("BackoffLimitExceeded", "BadConfiguration", "DeadlineExceeded", "PodRejected"):
        labels = {**LABELS, "reason": reason}
        assert value(metrics, "fleet_operator_jobs_failed_total", labels) == 0
    assert value(metrics, "fleet_operator_jobs_successful_total", LABELS) == 0
    assert value(metrics, "fleet_operator_jobs_restarted_total", LABELS) == 0


def test_the_longest_wait_is_that_of_one_job_and_of_our_own_alone(metrics: Metrics):
    now, name = datetime.now(UTC), "fleet_operator_job_longest_wait_seconds"

    def created(seconds_ago: float, state: JobState | None, **spec: Any) -> FleetJob:
        moment = (now - timedelta(seconds=seconds_ago)).isoformat()
        return job(manifest(**spec), creationTimestamp=moment).with_status(FleetJobStatus(state=state))

    jobs = [
        created(60, JobState.PENDING),
        created(600, None),
        created(3600, JobState.RUNNING),
        created(7200, None, managedBy="example.com/other"),
    ]
    metrics.watch_jobs(lambda: jobs)
    assert value(metrics, name, {"job_namespace": "default"}) == pytest.approx(600, abs=30)
    assert value(metrics, "fleet_operator_jobs", {"job_namespace": "default", "state": "Pending"}) == 2
    jobs[:2] = []
    assert value(metrics, name, {"job_namespace": "default"}) == 0


def test_passes_requests_and_the_queue_are_measured(metrics: Metrics):
    metrics.passed(Key("default", "digits"), Result.CONFLICT, 0.02)
    metrics.requested("POST", "pods", 201, 0.01)
    metrics.queued(7)
    metrics.waited(0.2)
    metrics.progress_read(answered=False)
    metrics.leading(holds=True)
    assert value(metrics, "fleet_operator_reconcile_duration_seconds_count", {"result": "conflict"}) == 1
    request = {"verb": "POST", "resource": "pods", "code": "201"}
    assert value(metrics, "fleet_operator_api_request_duration_seconds_sum", request) == 0.01
    assert value(metrics, "fleet_operator_queue_depth") == 7
    assert value(metrics, "fleet_operator_queue_latency_seconds_sum") == 0.2
    assert value(metrics, "fleet_operator_reconcile_errors_total", {"result": "conflict"}) == 1
    assert value(metrics, "fleet_operator_progress_reads_total", {"result": "silent"}) == 1
    assert value(metrics, "fleet_operator_leader") == 1


def test_what_is_not_seen_is_told_of_when_it_is_asked_for(metrics: Metrics):
    name, failing = "fleet_operator_watch_failing_seconds", [("pods", None, 90.0), ("services", "team", 0.0)]
    metrics.watch_watches(lambda: failing)
    assert value(metrics, name, {"resource": "pods", "job_namespace": ""}) == 90
    assert value(metrics, name, {"resource": "services", "job_namespace": "team"}) == 0
    failing.clear()  # the term has ended
    assert value(metrics, name, {"resource": "pods", "job_namespace": ""}) is None


def test_jobs_are_counted_by_state_when_they_are_asked_for(metrics: Metrics):
    running = job().model_copy(update={"status": FleetJobStatus(state=JobState.RUNNING)})
    jobs = [job(), running, running]
    metrics.watch_jobs(lambda: jobs)
    assert value(metrics, "fleet_operator_jobs", {"job_namespace": "default", "state": "Running"}) == 2
    assert value(metrics, "fleet_operator_jobs", {"job_namespace": "default", "state": "Pending"}) == 1
    jobs.clear()
    assert value(metrics, "fleet_operator_jobs", {"job_namespace": "default", "state": "Running"}) is None
