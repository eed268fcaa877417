"""trainer.replicas while a job is there: added, removed, or all started anew."""

from typing import Any

import pytest

from fleet_operator.api import Role
from fleet_operator.plan.scaling import is_resized, scaled_sentence
from tests.support import jobs
from tests.support.plans import Story, ended, pserver, trainer

BOUNDS = {"minReplicas": 1, "maxReplicas": 4}
SERVERS = (pserver(0), pserver(1))


def elastic(trainers: int = 2, mode: str = "Async") -> Story:
    return Story(syncMode=mode, trainer={"replicas": trainers, **BOUNDS})


def created(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(("create ", "delete "))]


@pytest.mark.parametrize(
    ("before", "wanted", "expected"),
    [
        pytest.param(0, 2, False, id="a-new-job"),
        pytest.param(2, 2, False, id="the-same"),
        pytest.param(2, 3, True, id="more"),
        pytest.param(3, 1, True, id="fewer"),
    ],
)
def test_is_resized(before, wanted, expected):
    assert is_resized(before=before, wanted=wanted) is expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param({"before": 2, "wanted": 4, "elastic": True}, "trainers 2 to 3 are added", id="added"),
        pytest.param(
            {"before": 4, "wanted": 1, "elastic": True}, "trainers 1 to 3 are removed", id="removed"
        ),
        pytest.param({"before": 2, "wanted": 4, "elastic": False}, "start anew with that number", id="anew"),
    ],
)
def test_scaled_sentence(change: dict[str, Any], expected):
    assert expected in scaled_sentence(**change)


@pytest.mark.parametrize("mode", ["Async", "HalfAsync", "Geo"])
def test_a_trainer_is_added_while_the_others_go_on(mode):
    story = elastic(mode=mode)
    story.sees(*SERVERS, trainer(0), trainer(1))
    story.scale(3)
    lines = story.sees(*SERVERS, trainer(0), trainer(1), after=5)
    assert created(lines) == ["create digits-trainer-2 0.0"]
    assert lines[-1] == (
        "tell Normal Scaled: trainer.replicas was 2 and is 3: trainers 2 to 2 are added, the others go on"
    )
    assert (story.job.status.job_restarts, story.job.status.restarts) == (0, 0)
    story.sees(*SERVERS, trainer(0), trainer(1), trainer(2), after=6)
    assert (story.job.status.state, story.job.status.trainers) == ("Running", "3/3")
    assert story.job.status.trainer_replicas == 3


def test_the_highest_trainers_are_removed_and_come_back_as_new_lives():
    story = elastic(3)
    three = (trainer(0), trainer(1), trainer(2))
    story.sees(*SERVERS, *three)
    story.scale(2)
    assert created(story.sees(*SERVERS, *three, after=5)) == ["delete digits-trainer-2 0.0"]
    assert story.sees(*SERVERS, *three[:2], after=6)[0] == (
        "Running pservers 2/2 trainers 2/2 restarts 0 failures 0"
    )
    story.scale(3)
    assert created(story.sees(*SERVERS, *three[:2], after=7)) == ["create digits-trainer-2 0.1"]


def test_a_trainer_that_had_completed_is_not_run_again_after_a_detour():
    story = elastic(3)
    story.sees(*SERVERS, trainer(0), trainer(1), ended(trainer(2)))
    story.scale(2)
    story.sees(*SERVERS, trainer(0), trainer(1), ended(trainer(2)), after=5)
    story.scale(3)
    assert created(story.sees(*SERVERS, trainer(0), trainer(1), after=6)) == []


def test_only_the_trainers_that_are_wanted_have_a_vote():
    story = elastic(3)
    story.sees(*SERVERS, trainer(0), ended(trainer(1)), ended(trainer(2)))
    story.scale(2)
    story.sees(*SERVERS, trainer(0), ended(trainer(1)), ended(trainer(2)), after=5)
    assert story.job.status.state == "Running"
    assert story.job.status.role(Role.TRAINER).succeeded == 1
    story.sees(*SERVERS, ended(trainer(0)), ended(trainer(1)), after=6)
    assert story.job.status.state == "Succeeded"


def test_a_failure_at_the_same_moment_is_answered_too():
    story = elastic()
    story.sees(*SERVERS, trainer(0), trainer(1))
    story.scale(3)
    lines = story.sees(*SERVERS, trainer(0), ended(trainer(1), 1), after=5)
    assert created(lines) == ["delete digits-trainer-1 0.0", "create digits-trainer-2 0.0"]
    assert story.job.status.failures == 1


def test_a_collective_job_starts_anew_with_the_new_number_uncounted():
    story = Story(jobs.collective_manifest(trainer={"replicas": 2, **BOUNDS}))
    story.sees(trainer(0), trainer(1))
    story.scale(3)
    lines = story.sees(trainer(0), trainer(1), after=5)
    told = "trainer.replicas was 2 and is 3: all replicas start anew with that number"
    assert lines[0] == "Restarting trainers 0/3 restarts 0 failures 0"
    assert f"Restarting True Scaled: {told}" in lines
    assert created(lines) == [
        "delete digits-trainer-0 0.0",
        "delete digits-trainer-1 0.0",
        "create digits-trainer-2 1.0",
    ]
    assert lines[-1] == f"tell Normal Scaled: {told}"
    assert created(story.sees(after=6)) == [f"create digits-trainer-{index} 1.0" for index in range(3)]


def test_a_synchronous_job_that_was_resized_while_suspended_resumes_with_the_new_number():
    story = Story(trainer={"replicas": 2, **BOUNDS})
    story.sees(*SERVERS, trainer(0), trainer(1))
    story.edit(suspend=True)
    story.sees(*SERVERS, trainer(0), trainer(1), after=5)
    story.scale(3)
    story.sees(after=6)
    story.edit(suspend=False)
    story.sees(after=7)
    lines = story.sees(pserver(0, "1.0"), pserver(1, "1.0"), after=8)
    assert created(lines) == [f"create digits-trainer-{index} 1.0" for index in range(3)]


def test_what_autoscalers_read():
    story = elastic()
    story.sees(*SERVERS, trainer(0))
    status = story.job.status.to_manifest()
    assert status["trainerReplicas"] == 1
    assert status["selector"] == "fleetjob.dev/job-name=digits,fleetjob.dev/role=trainer"
