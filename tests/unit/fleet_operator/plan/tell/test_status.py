"""The status: what another writer has recorded stays, and what the API server would refuse is cut."""

from fleet_operator.api import JobState, Role, read_job
from tests.support import jobs
from tests.support.plans import Story, ended, pserver, trainer

ALL = (pserver(0), pserver(1), trainer(0), trainer(1))
WHEN = "2026-11-21T09:00:00Z"


def test_what_a_newer_build_noted_survives_the_writes_of_this_one():
    foreign = {"type": "Evaluated", "status": "True", "reason": "Best", "lastTransitionTime": WHEN}
    story = Story()
    document = jobs.manifest()
    document["metadata"] |= {"uid": story.job.metadata.uid}
    status = {
        "state": "Running",
        "startTime": WHEN,
        "evaluations": 3,
        "conditions": [foreign],
        "roles": [{"role": "trainer", "lastStep": 7}],
    }
    story.job = read_job(document | {"status": status})
    assert "create digits-trainer-1 0.0" not in story.sees(*ALL)
    story.sees(*ALL[:3], ended(trainer(1)), after=1)
    assert story.job.status.state is JobState.RUNNING
    written = story.job.status.to_manifest()
    assert written["conditions"][-1] == foreign | {"message": ""}
    assert [each["type"] for each in written["conditions"]] == ["PodsCreated", "Running", "Evaluated"]
    assert (written["evaluations"], story.job.status.role(Role.TRAINER).extras) == (3, {"lastStep": 7})


def test_a_message_above_the_limit_of_a_condition_is_cut_because_the_whole_status_would_be_refused():
    story = Story()
    story.sees(pserver(0), refused="pods is forbidden: " + "a long rule " * 4000)
    running = story.job.status.condition("Running")
    assert running is not None
    assert (len(running.message), running.message[-1]) == (32_768, "…")
    assert "pods is forbidden: a long rule" in running.message
