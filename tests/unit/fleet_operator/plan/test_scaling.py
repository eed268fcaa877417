"""trainer.replicas while a job is there: all replicas start anew with the new number."""

import pytest

from fleet_operator.plan.scaling import is_resized, scaled_sentence
from tests.support import jobs
from tests.support.plans import Story, ended, pending, pserver, trainer

BOUNDS = {"minReplicas": 1, "maxReplicas": 4}
SERVERS = (pserver(0), pserver(1))


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


def test_scaled_sentence():
    said = "trainer.replicas was 2 and is 4: all replicas start anew with that number"
    assert scaled_sentence(before=2, wanted=4) == said


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


def test_a_collective_job_that_shrinks_has_no_trainer_left_over():
    story = Story(jobs.collective_manifest(trainer={"replicas": 3, **BOUNDS}))
    story.sees(*(trainer(index) for index in range(3)))
    story.scale(2)
    story.sees(*(trainer(index) for index in range(3)), after=5)
    story.sees(after=6)
    story.sees(trainer(0, "1.0"), trainer(1, "1.0"), after=7)
    assert (story.job.status.state, story.job.status.trainers) == ("Running", "2/2")
    story.sees(ended(trainer(0, "1.0")), ended(trainer(1, "1.0")), after=8)
    assert story.job.status.state == "Succeeded"


@pytest.mark.parametrize(
    ("policy", "ends"),
    [
        pytest.param("All", (0, 1), id="all-that-are-left"),
        pytest.param("Any", (0,), id="any"),
        pytest.param("RankZero", (0,), id="rank-zero"),
    ],
)
def test_what_completed_with_another_number_is_no_success(policy, ends):
    story = Story(jobs.collective_manifest(trainer={"replicas": 3, **BOUNDS}, successPolicy=policy))
    pods = [trainer(index) for index in range(3)]
    story.sees(*pods)
    story.scale(2)
    story.sees(*(ended(pod) if pod.index in ends else pod for pod in pods), after=5)
    assert (story.job.status.state, story.job.status.trainers) == ("Restarting", "0/2")
    assert created(story.sees(after=6)) == ["create digits-trainer-0 1.0", "create digits-trainer-1 1.0"]


def test_a_collective_job_waits_for_its_places_as_long_as_at_first():
    story = Story(
        jobs.collective_manifest(trainer={"replicas": 2, **BOUNDS}, runPolicy={"pendingDeadlineSeconds": 60})
    )
    story.sees(trainer(0), trainer(1), after=600)
    story.scale(3)
    story.sees(trainer(0), trainer(1), after=605)
    three = (trainer(0, "1.0"), trainer(1, "1.0"), pending(trainer(2, "1.0"), "Unschedulable"))
    assert story.sees(*three, after=610)[-1] == "look again after 55 s"


@pytest.mark.parametrize("mode", ["Sync", "Async", "HalfAsync", "Geo"])
@pytest.mark.parametrize("wanted", [1, 3])
def test_a_job_that_was_resized_while_suspended_resumes_with_the_new_number(mode, wanted):
    story = Story(syncMode=mode, trainer={"replicas": 2, **BOUNDS})
    story.sees(*SERVERS, trainer(0), trainer(1))
    story.edit(suspend=True)
    story.sees(*SERVERS, trainer(0), trainer(1), after=5)
    story.scale(wanted)
    story.sees(after=6)
    story.edit(suspend=False)
    story.sees(after=7)
    lines = story.sees(pserver(0, "1.0"), pserver(1, "1.0"), after=8)
    assert created(lines) == [f"create digits-trainer-{index} 1.0" for index in range(wanted)]


def test_servers_never_meet_trainers_that_were_told_another_number():
    story = Story(syncMode="Async", trainer={"replicas": 2, **BOUNDS})
    story.sees(*SERVERS, trainer(0), trainer(1))
    story.scale(3)  # suspended and resumed while nobody looked
    lines = story.sees(*SERVERS, trainer(0), trainer(1), after=5)
    assert lines[0] == "Restarting pservers 0/2 trainers 0/3 restarts 0 failures 0"
    assert "delete digits-pserver-0 0.0" in lines


def test_what_autoscalers_read():
    story = Story(trainer={"replicas": 2, **BOUNDS})
    story.sees(*SERVERS, trainer(0))
    status = story.job.status.to_manifest()
    assert status["trainerReplicas"] == 1
    assert status["selector"] == "fleetjob.dev/job-name=digits,fleetjob.dev/role=trainer"
