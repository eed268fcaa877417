"""A manifest in, a job or all that is wrong with it out."""

import copy
from datetime import UTC, datetime
from typing import Any

import pytest

from fleet_operator.api import FailureAction, Role, parse_job, read_job
from fleet_operator.errors import InvalidJob, Problem
from tests.support import jobs
from tests.support.manifests import at


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


def test_what_is_missing_is_told_in_a_sentence():
    document = jobs.manifest()
    del document["spec"]["trainer"]
    [problem] = [each for each in problems_of(document) if each.path == "spec.trainer"]
    assert problem.expected == "how many trainers there are and what they run"


def test_tells_all_problems_at_once_in_whole_sentences():
    document = jobs.manifest(syncMode="Eager", trainer={"replicas": 0, "ports": 1})
    with pytest.raises(InvalidJob) as caught:
        parse_job(document)
    assert caught.value.problems == (
        Problem("spec.trainer.replicas", "0", "at least 1"),
        Problem(
            "spec.trainer.ports",
            "an unknown field",
            "one of replicas, minReplicas, maxReplicas, port, template, nprocPerNode, devices, sharedMemory"
            " (did you mean port?)",
        ),
        Problem("spec.syncMode", "'Eager'", "one of 'Sync', 'Async', 'HalfAsync', 'Geo'"),
    )
    assert str(caught.value) == (
        "FleetJob digits is not valid:\n"
        "  spec.trainer.replicas: found 0, expected at least 1\n"
        "  spec.trainer.ports: found an unknown field,"
        " expected one of replicas, minReplicas, maxReplicas, port, template, nprocPerNode, devices,"
        " sharedMemory (did you mean port?)\n"
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
        pytest.param(jobs.manifest(trainer={"devices": {"count": 4}}), 1, id="one-process-with-servers"),
        pytest.param(jobs.collective_manifest(), 1, id="one-by-default"),
        pytest.param(jobs.collective_manifest(trainer={"devices": {"count": 4}}), 4, id="one-per-gpu"),
        pytest.param(
            jobs.collective_manifest(trainer={"nprocPerNode": 2, "devices": {"count": 4}}),
            2,
            id="as-asked",
        ),
    ],
)
def test_nproc_per_node(document, expected):
    assert parse_job(document).nproc_per_node == expected


def test_a_jobs_roles_in_their_order():
    assert parse_job(jobs.manifest()).roles == (Role.PSERVER, Role.TRAINER)
    assert parse_job(jobs.collective_manifest()).roles == (Role.TRAINER,)


def test_a_role_that_a_job_has_not_is_a_clear_error():
    job = parse_job(jobs.collective_manifest())
    assert job.replicas(Role.PSERVER) == 0
    with pytest.raises(LookupError, match="FleetJob digits has no pserver: its mode is Collective"):
        job.port(Role.PSERVER)


CONDITION = {"status": "True", "reason": "Said", "lastTransitionTime": "2026-11-22T12:00:00Z"}


def stored(*, uid: str = "u", generation: int = 1, servers: int = 2, **status: object) -> dict[str, Any]:
    document = jobs.manifest(pserver={"replicas": servers}) | {"status": status}
    document["metadata"] |= {"uid": uid, "generation": generation, "managedFields": [{"manager": "kubectl"}]}
    return document


def test_the_spec_is_read_once_for_each_generation():
    known = read_job(stored(state="Pending"))
    again = read_job(stored(state="Running", servers=3), known)
    assert again.spec is known.spec
    assert again == known.with_status(again.status)
    assert again.status.state == "Running"
    for changed in (stored(generation=2, servers=3), stored(uid="another", servers=3)):
        assert read_job(changed, known).replicas(Role.PSERVER) == 3


def test_a_valid_job_is_read_as_it_is_parsed():
    for document in jobs.VALID.values():
        assert read_job(document) == parse_job(document)


def test_fields_of_a_newer_definition_are_left_out():
    document = jobs.manifest(runPolicy={"backoffLimit": 3, "mood": "calm"})
    document["spec"] |= {"colour": "red", "trainer": {"replicas": 2, "shape": {"round": True}}}
    before = copy.deepcopy(document)
    job = read_job(document)
    assert (job.spec.run_policy.backoff_limit, job.spec.trainer.replicas) == (3, 2)
    assert document == before
    known = jobs.manifest(runPolicy={"backoffLimit": 3}, trainer={"replicas": 2})
    assert job == read_job(known)
    assert (
        job.template(Role.TRAINER).spec.to_manifest()
        == parse_job(known).template(Role.TRAINER).spec.to_manifest()
    )


@pytest.mark.parametrize(
    ("document", "path"),
    [
        pytest.param(at("spec.trainer", 5), "spec.trainer", id="another-shape"),
        pytest.param(at("spec.mode", ...), "spec.mode", id="a-field-that-is-missing"),
        pytest.param(jobs.manifest() | {"status": {"restarts": "some"}}, "status.restarts", id="a-memory"),
        pytest.param(jobs.manifest() | {"status": "running"}, "status", id="a-status-that-is-text"),
    ],
)
def test_what_has_not_the_shape_of_a_job_is_told(document, path):
    document["spec"]["colour"] = "red"
    with pytest.raises(InvalidJob) as caught:
        read_job(document)
    assert [problem.path for problem in caught.value.problems] == [path]


def test_what_a_newer_build_noted_in_a_status_is_written_back():
    status: dict[str, Any] = {
        "state": "Running",
        "conditions": [CONDITION | {"type": "Evaluated", "score": "0.9"}, CONDITION | {"type": "Running"}],
        "evaluations": [{"step": 5}],
        "roles": [{"role": "trainer", "replicas": 2, "paused": "0-1"}],
    }
    job = read_job(jobs.manifest() | {"status": status})
    written = job.status.to_manifest()
    assert written["evaluations"] == status["evaluations"]
    assert written["conditions"] == [condition | {"message": ""} for condition in status["conditions"]]
    assert {name: written["roles"][0][name] for name in status["roles"][0]} == status["roles"][0]
    assert read_job(jobs.manifest() | {"status": written}) == job
