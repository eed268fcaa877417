"""What the API server holds is read, whatever version of the operator or of the definition let it in."""

import copy
from typing import Any

import pytest

from fleet_operator.api import Gang, JobState, Mode, Role, parse_job, read_job
from fleet_operator.api.names import METRICS_PORT
from fleet_operator.api.status import Condition
from fleet_operator.errors import InvalidJob
from tests.support import jobs
from tests.support.manifests import at

BEGUN: dict[str, Any] = {"state": "Running", "startTime": "2026-11-22T12:00:00Z"}
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
    assert (job.problems, document) == ((), before)
    known = jobs.manifest(runPolicy={"backoffLimit": 3}, trainer={"replicas": 2})
    assert job == read_job(known)
    assert (
        job.template(Role.TRAINER).spec.to_manifest()
        == parse_job(known).template(Role.TRAINER).spec.to_manifest()
    )


@pytest.mark.parametrize(
    ("document", "path"),
    [
        pytest.param(at("spec.trainer.replicas", 1001), "spec.trainer.replicas", id="a-bound"),
        pytest.param(at("spec.pserver.port", METRICS_PORT), "spec.pserver.port", id="a-rule-across-fields"),
        pytest.param(
            at("spec.template.metadata.labels", {"team": "computer vision"}),
            "spec.template.metadata.labels.team",
            id="a-pattern",
        ),
        pytest.param(jobs.manifest("9digits"), "metadata.name", id="a-name"),
    ],
)
def test_a_job_that_has_begun_runs_on_though_the_rules_are_stricter_now(document, path):
    begun = read_job(document | {"status": BEGUN})
    assert ([problem.path for problem in begun.problems], begun.is_held_back) == ([path], False)
    assert begun.to_manifest()["spec"] == document["spec"]
    new = read_job(document)
    assert ([problem.path for problem in new.problems], new.is_held_back) == ([path], True)
    # What was never accepted is not accepted because that was told.
    refused = {"state": "Pending", "conditions": [CONDITION | {"type": "Accepted", "status": "False"}]}
    assert read_job(document | {"status": refused}).is_held_back


def test_a_choice_of_a_newer_definition_holds_a_job_back_whether_it_has_begun_or_not():
    document = jobs.manifest(mode="Gossip", scheduling={"gang": "Slurm"}, colour="red")
    document["spec"]["trainer"]["replicas"] = 1001
    for status in ({}, BEGUN):
        job = read_job(document | {"status": status})
        assert job.is_held_back
        assert [str(problem) for problem in job.problems] == [
            "spec.mode: found 'Gossip', expected one of 'ParameterServer', 'Collective'",
            "spec.trainer.replicas: found 1001, expected at most 1000",
            "spec.scheduling.gang: found 'Slurm', expected one of 'None', 'Volcano', 'Coscheduling', 'Kueue'",
        ]
        assert (job.spec.mode, job.gang, job.replicas(Role.TRAINER)) == ("Gossip", "Slurm", 1001)
    assert read_job(jobs.manifest(scheduling={"gang": "Volcano"})).gang is Gang.VOLCANO
    assert read_job(at("spec.trainer.replicas", 1001)).spec.mode is Mode.PARAMETER_SERVER


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


def test_a_status_of_another_version_is_written_back_with_what_was_not_understood():
    status: dict[str, Any] = {
        "state": "Evaluating",
        "conditions": [CONDITION | {"type": "Evaluated", "score": "0.9"}, CONDITION | {"type": "Running"}],
        "evaluations": [{"step": 5}],
        "roles": [{"role": "trainer", "replicas": 2, "paused": "0-1"}, {"role": "evaluator", "replicas": 1}],
    }
    job = read_job(jobs.manifest() | {"status": status})
    written = job.status.to_manifest()
    for name in ("state", "evaluations"):
        assert written[name] == status[name]
    assert written["conditions"] == [condition | {"message": ""} for condition in status["conditions"]]
    assert [
        {name: role[name] for name in told}
        for role, told in zip(written["roles"], status["roles"], strict=True)
    ] == status["roles"]
    assert read_job(jobs.manifest() | {"status": written}) == job
    assert (job.status.finished, job.status.state in tuple(JobState)) == (False, False)


def test_a_job_that_ended_in_a_state_of_another_version_has_ended():
    status = {"state": "Cancelled", "completionTime": "2026-11-22T12:00:00Z"}
    assert read_job(jobs.manifest() | {"status": status}).status.finished


def test_what_a_status_says_to_people_only_and_cannot_be_read_is_left_out():
    status = BEGUN | {
        "conditions": [{"type": "Odd"}, CONDITION | {"type": "Running"}],
        "progress": {"percentage": 3},
        "lastFailure": "none",
        "restarts": 2,
    }
    job = read_job(jobs.manifest() | {"status": status})
    assert [each.type for each in job.status.conditions] == ["Running"]
    assert isinstance(job.status.conditions[0], Condition)
    assert (job.status.progress, job.status.last_failure, job.status.restarts) == (None, None, 2)
    assert read_job(jobs.manifest() | {"status": BEGUN | {"conditions": 5}}).status.conditions == ()
