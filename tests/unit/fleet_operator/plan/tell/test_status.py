"""Jobs of another version: what is not understood stays, and what is not accepted is told."""

from typing import Any

import pytest

from fleet_operator.api import JobState, Role, read_job
from tests.support import jobs
from tests.support.plans import Story, ended, pserver, trainer

ALL = (pserver(0), pserver(1), trainer(0), trainer(1))
ALL_RUN = "Running True ReplicasRunning: all 4 replicas run or have completed"
WHEN = "2026-11-21T09:00:00Z"


def story_of(document: dict[str, Any], **status: Any) -> Story:
    """Return a story of a job as the API server holds it."""
    story = Story()
    metadata = document["metadata"] | {"uid": story.job.metadata.uid}
    story.job = read_job(document | {"metadata": metadata, "status": status})
    return story


def accepted(story: Story) -> str:
    told = story.job.status.condition("Accepted")
    return "" if told is None else f"{told.status} {told.reason} {told.message}"


def test_what_another_version_said_survives_the_writes_of_this_one():
    foreign = {"type": "Evaluated", "status": "True", "reason": "Best", "lastTransitionTime": WHEN}
    story = story_of(
        jobs.manifest(),
        state="Evaluating",
        startTime=WHEN,
        evaluations=3,
        conditions=[foreign],
        roles=[{"role": "trainer", "lastStep": 7}, {"role": "evaluator", "active": 1}],
    )
    assert "create digits-trainer-1 0.0" not in story.sees(*ALL)
    story.sees(*ALL[:3], ended(trainer(1)), after=1)
    status = story.job.status
    assert status.state is JobState.RUNNING
    written = status.to_manifest()
    assert written["conditions"][-1] == foreign | {"message": ""}
    assert [each["type"] for each in written["conditions"]] == ["PodsCreated", "Running", "Evaluated"]
    assert (written["evaluations"], status.role(Role.TRAINER).extras) == (3, {"lastStep": 7})
    assert written["roles"][-1]["role"] == "evaluator"
    assert accepted(story) == ""


def test_a_job_that_ended_in_another_versions_state_does_not_run_again():
    story = story_of(jobs.manifest(), state="Cancelled", completionTime=WHEN, startTime=WHEN)
    lines = story.sees(service=False, after=60)
    assert not [line for line in lines if line.startswith("create")]
    assert str(story.job.status.state) == "Cancelled"


def test_a_job_that_has_begun_runs_on_and_its_owner_is_told_once():
    document = jobs.manifest(runPolicy={"backoffLimit": -1})
    story = story_of(document, state="Running", startTime=WHEN)
    lines = story.sees(*ALL)
    assert ALL_RUN in lines
    [event] = [line for line in lines if "AcceptedBefore" in line and line.startswith("tell")]
    assert "spec.runPolicy.backoffLimit: found -1, expected at least 0" in event
    assert accepted(story).startswith("True AcceptedBefore the job runs on, though this version")
    assert not [line for line in story.sees(*ALL, after=1) if line.startswith("tell")]


def test_what_a_job_that_has_begun_cannot_run_with_is_told():
    document = jobs.manifest()
    del document["spec"]["template"]
    story = story_of(document, state="Running", startTime=WHEN)
    story.sees(*ALL[:3])
    assert accepted(story).startswith("False NotAccepted spec.template: found nothing, expected a template")
    assert "with which it cannot run" in accepted(story)
    assert story.job.status.state is JobState.RUNNING


@pytest.mark.parametrize("pods", [pytest.param(ALL, id="running"), pytest.param(ALL[:2], id="some-gone")])
def test_a_job_that_is_not_understood_is_left_as_it_is_and_says_so(pods):
    document = jobs.manifest(syncMode="Gossip")
    story = story_of(document, state="Running", startTime=WHEN)
    lines = story.sees(*pods)
    assert [line.split()[0] for line in lines[1:]] == ["Accepted", "tell"]
    assert accepted(story).startswith(
        "False NotAccepted spec.syncMode: found 'Gossip', expected one of 'Sync', 'Async', 'HalfAsync',"
        " 'Geo'; this version of the operator leaves the job and its pods as they are"
    )
    assert story.job.status.state is JobState.RUNNING
    assert story.job.status.explanation == story.job.status.condition("Accepted")
    # Once it is understood, by another version or another spec, the job goes on.
    understood = read_job(jobs.manifest() | {"status": story.job.status.to_manifest()})
    story.job = story.job.with_problems((), held_back=False).model_copy(update={"spec": understood.spec})
    assert ALL_RUN in story.sees(*ALL, after=1)
    assert accepted(story).startswith("True Accepted")


def test_a_new_job_that_breaks_a_rule_of_this_version_waits_and_says_why():
    story = story_of(jobs.manifest(trainer={"replicas": 1001}))
    lines = story.sees(service=False)
    assert not [line for line in lines if line.startswith(("create", "delete"))]
    status = story.job.status
    assert (status.state, status.start_time, status.is_strict) == (JobState.PENDING, None, True)
    assert {each.reason for each in status.conditions} == {"NotAccepted"}
    again = read_job(jobs.manifest(trainer={"replicas": 1001}) | {"status": status.to_manifest()})
    assert again.is_held_back
