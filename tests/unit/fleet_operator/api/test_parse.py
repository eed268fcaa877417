"""A manifest in, a job or all that is wrong with it out."""

import copy
from datetime import UTC, datetime
from typing import Any

import pytest

from fleet_operator.api import FailureAction, Role, parse_job
from fleet_operator.errors import InvalidJob, Problem
from tests.support import jobs


def problems_of(document: Any) -> tuple[Problem, ...]:
    with pytest.raises(InvalidJob) as caught:
        parse_job(document)
    return caught.value.problems


@pytest.mark.parametrize("case", jobs.INVALID, ids=lambda case: case.id)
def test_refuses(case):
    told = [str(problem) for problem in problems_of(case.manifest) if problem.path == case.path]
    assert told, f"nothing points at {case.path}"
    assert all(any(word in line for line in told) for word in case.expected), told


@pytest.mark.parametrize("document", jobs.VALID.values(), ids=jobs.VALID.keys())
def test_accepts(document):
    assert parse_job(document).name == document["metadata"]["name"]


def test_tells_all_problems_at_once_in_whole_sentences():
    document = jobs.manifest(syncMode="Eager", trainer={"replicas": 0, "ports": 1})
    with pytest.raises(InvalidJob) as caught:
        parse_job(document)
    assert caught.value.problems == (
        Problem("spec.trainer.replicas", "0", "at least 1"),
        Problem(
            "spec.trainer.ports",
            "an unknown field",
            "one of replicas, minReplicas, maxReplicas, port, template, slotsPerPod (did you mean port?)",
        ),
        Problem("spec.syncMode", "'Eager'", "one of 'Sync', 'Async', 'HalfAsync', 'Geo'"),
    )
    assert str(caught.value) == (
        "FleetJob digits is not valid:\n"
        "  spec.trainer.replicas: found 0, expected at least 1\n"
        "  spec.trainer.ports: found an unknown field,"
        " expected one of replicas, minReplicas, maxReplicas, port, template, slotsPerPod"
        " (did you mean port?)\n"
        "  spec.syncMode: found 'Eager', expected one of 'Sync', 'Async', 'HalfAsync', 'Geo'"
    )


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        pytest.param("apiVersion", ..., "found nothing, expected 'fleetjob.dev/v1alpha1'", id="no-version"),
        pytest.param(
            "apiVersion", "v1", "found 'v1', expected 'fleetjob.dev/v1alpha1'", id="another-version"
        ),
        pytest.param("kind", ..., "found nothing, expected 'FleetJob'", id="no-kind"),
        pytest.param("kind", "Job", "found 'Job', expected 'FleetJob'", id="another-kind"),
        pytest.param("metadata", ..., "found nothing, expected a value", id="no-metadata"),
    ],
)
def test_refuses_what_is_no_fleetjob(field, value, expected):
    document = jobs.manifest()
    if value is ...:
        del document[field]
    else:
        document[field] = value
    assert f"{field}: {expected}" in [str(problem) for problem in problems_of(document)]


@pytest.mark.parametrize(
    ("document", "found"),
    [
        pytest.param(None, "nothing", id="an-empty-file"),
        pytest.param([jobs.manifest()], "list", id="a-list"),
        pytest.param("spec", "str 'spec'", id="text"),
    ],
)
def test_refuses_what_is_no_map(document, found):
    [problem] = problems_of(document)
    assert problem.path == "the manifest"
    assert problem.found.startswith(found)


def test_a_field_left_empty_has_its_default():
    job = parse_job(jobs.VALID["fields-left-empty"])
    assert (job.spec.run_policy.backoff_limit, job.replicas(Role.PSERVER)) == (6, 1)


def test_reads_what_the_api_server_returns():
    document = jobs.manifest()
    document["metadata"] |= {
        "uid": "abc",
        "resourceVersion": "7",
        "generation": 3,
        "creationTimestamp": "2026-11-21T10:00:00Z",
        "deletionTimestamp": "2026-11-21T11:00:00Z",
        "managedFields": [{"manager": "kubectl"}],
    }
    document["status"] = {"state": "Running", "addedByALaterVersion": {}}
    job = parse_job(document)
    assert (job.metadata.uid, job.metadata.resource_version, job.metadata.generation) == ("abc", "7", 3)
    assert job.metadata.creation_timestamp == datetime(2026, 11, 21, 10, tzinfo=UTC)
    assert job.metadata.deletion_timestamp == datetime(2026, 11, 21, 11, tzinfo=UTC)
    assert job.status.state == "Running"


def test_leaves_the_manifest_as_it_was():
    document = jobs.manifest(syncMode=None)
    before = copy.deepcopy(document)
    parse_job(document)
    assert document == before


def test_writes_back_what_it_read():
    for document in jobs.VALID.values():
        job = parse_job(document)
        assert parse_job(job.to_manifest()) == job


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        pytest.param(jobs.manifest(), FailureAction.RESTART_REPLICA, id="servers-let-a-replica-come-back"),
        pytest.param(
            jobs.collective_manifest(), FailureAction.RESTART_JOB, id="a-collective-restarts-together"
        ),
        pytest.param(
            jobs.manifest(failurePolicy={"action": "FailJob"}), FailureAction.FAIL_JOB, id="as-asked"
        ),
    ],
)
def test_default_of_the_failure_policy(document, expected):
    assert parse_job(document).failure_action is expected


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        pytest.param(jobs.manifest(nodePool={"gpusPerTrainer": 4}), 1, id="one-process-with-servers"),
        pytest.param(jobs.collective_manifest(), 1, id="one-by-default"),
        pytest.param(jobs.collective_manifest(nodePool={"gpusPerTrainer": 4}), 4, id="one-per-gpu"),
        pytest.param(
            jobs.collective_manifest(trainer={"slotsPerPod": 2}, nodePool={"gpusPerTrainer": 4}),
            2,
            id="as-asked",
        ),
    ],
)
def test_slots_per_pod(document, expected):
    assert parse_job(document).slots_per_pod == expected


def test_a_jobs_roles_in_their_order():
    assert parse_job(jobs.manifest()).roles == (Role.PSERVER, Role.TRAINER)
    assert parse_job(jobs.collective_manifest()).roles == (Role.TRAINER,)


def test_a_role_that_a_job_has_not_is_a_clear_error():
    job = parse_job(jobs.collective_manifest())
    assert job.replicas(Role.PSERVER) == 0
    with pytest.raises(LookupError, match="FleetJob digits has no pserver: its mode is Collective"):
        job.port(Role.PSERVER)
