"""trainer.replicas while a job is there: all start anew with the new number, or trainers come and go."""

from typing import Any

import pytest

from fleet_operator.plan.observe.context import is_resized, trainers_to_have
from fleet_operator.plan.tell.events import joined_sentence, noted_sentence, scaled_sentence
from tests.support import jobs
from tests.support.plans import Story, at, ended, pending, pserver, trainer

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
    said = "trainer.replicas has changed from 2 to 4: all replicas restart with the new number"
    assert scaled_sentence(before=2, wanted=4) == said


def test_noted_sentence():
    said = "trainer.replicas has changed from 2 to 4: the job starts with the new number"
    assert noted_sentence(before=2, wanted=4) == said


@pytest.mark.parametrize(
    ("before", "wanted", "who"),
    [
        pytest.param(2, 3, "trainer 2 joins", id="one-more"),
        pytest.param(1, 4, "trainers 1-3 join", id="several-more"),
        pytest.param(3, 2, "trainer 2 leaves", id="one-fewer"),
        pytest.param(4, 1, "trainers 1-3 leave", id="several-fewer"),
    ],
)
def test_joined_sentence(before, wanted, who):
    said = f"trainer.replicas has changed from {before} to {wanted}: {who} while the others continue"
    assert joined_sentence(before=before, wanted=wanted) == said


@pytest.mark.parametrize(
    ("asked", "before", "any_completed", "expected"),
    [
        pytest.param(2, 0, False, 2, id="a-new-job"),
        pytest.param(4, 2, False, 4, id="more-while-all-train"),
        pytest.param(1, 2, False, 1, id="fewer-while-all-train"),
        pytest.param(4, 2, True, 2, id="no-more-once-one-has-completed"),
        pytest.param(1, 2, True, 1, id="fewer-once-one-has-completed"),
    ],
)
def test_trainers_to_have(asked, before, any_completed, expected):
    assert trainers_to_have(asked=asked, before=before, any_completed=any_completed) == expected


def test_a_collective_job_starts_anew_with_the_new_number_uncounted():
    story = Story(jobs.collective_manifest(trainer={"replicas": 2, **BOUNDS}))
    story.sees(trainer(0), trainer(1))
    story.scale(3)
    lines = story.sees(trainer(0), trainer(1), after=5)
    sentence = "trainer.replicas has changed from 2 to 3: all replicas restart with the new number"
    assert lines[0] == "Restarting trainers 0/3 restarts 0 failures 0"
    assert f"Restarting True Scaled: {sentence}" in lines
    assert created(lines) == [
        "delete digits-trainer-0 0.0",
        "delete digits-trainer-1 0.0",
        "create digits-trainer-2 1.0",
    ]
    assert lines[-1] == f"tell Normal Scaled: {sentence}"
    assert created(story.sees(after=6)) == [f"create digits-trainer-{index} 1.0" for index in range(3)]


def test_a_collective_job_that_shrinks_has_no_trainer_left_over():
    story = Story(jobs.collective_manifest(trainer={"replicas": 3, **BOUNDS}))
    story.sees(*(trainer(index) for index in range(3)))
    story.scale(2)
    story.sees(*(trainer(index) for index in range(3)), after=5)
    story.sees(after=6)
    story.sees(trainer(0, "1.0"), trainer(1, "1.0"), after=7)
    assert (story.job.status.state, story.job.status.columns.trainers) == ("Running", "2/2")
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
    story = Story(jobs.collective_manifest(trainer={"replicas": 3, **BOUNDS}, successPolicy={"type": policy}))
    pods = [trainer(index) for index in range(3)]
    story.sees(*pods)
    story.scale(2)
    story.sees(*(ended(pod) if pod.index in ends else pod for pod in pods), after=5)
    assert (story.job.status.state, story.job.status.columns.trainers) == ("Restarting", "0/2")
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
    noted = f"trainer.replicas has changed from 2 to {wanted}: the job starts with the new number"
    assert f"tell Normal Scaled: {noted}" in story.sees(after=6), "nothing runs that could go on"
    story.edit(suspend=False)
    story.sees(after=7)
    lines = story.sees(pserver(0, "1.0"), pserver(1, "1.0"), after=8)
    assert created(lines) == [f"create digits-trainer-{index} 1.0" for index in range(wanted)]


@pytest.mark.parametrize("mode", ["Sync", "Async"])
def test_a_job_none_of_whose_pods_is_there_yet_is_scaled_without_a_restart(mode):
    story = Story(syncMode=mode, trainer={"replicas": 2, **BOUNDS})
    story.sees(service=False)
    story.scale(3)
    noted = "trainer.replicas has changed from 2 to 3: the job starts with the new number"
    assert f"tell Normal Scaled: {noted}" in story.sees(after=5)


def test_servers_never_meet_trainers_that_were_told_another_number():
    story = Story(syncMode="Sync", trainer={"replicas": 2, **BOUNDS})
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


def elastic(trainers: int, mode: str = "Async", **spec: Any) -> Story:
    """Return the story of an elastic job of which everything runs."""
    story = Story(syncMode=mode, trainer={"replicas": trainers, **BOUNDS}, **spec)
    story.sees(*SERVERS, *(trainer(index) for index in range(trainers)))
    return story


@pytest.mark.parametrize("mode", ["Async", "HalfAsync"])
def test_a_trainer_joins_an_elastic_job_and_nothing_starts_anew(mode):
    story = elastic(2, mode)
    story.scale(3)
    lines = story.sees(*SERVERS, trainer(0), trainer(1), after=5)
    assert lines[0] == "Running pservers 2/2 trainers 2/3 restarts 0 failures 0"
    assert created(lines) == ["create digits-trainer-2 0.0"]
    sentence = "trainer.replicas has changed from 2 to 3: trainer 2 joins while the others continue"
    assert lines[-1] == f"tell Normal Scaled: {sentence}"
    lines = story.sees(*SERVERS, *(trainer(index) for index in range(3)), after=6)
    assert lines[0] == "Running pservers 2/2 trainers 3/3 restarts 0 failures 0"
    assert created(lines) == []


def test_surplus_trainers_of_an_elastic_job_are_deleted_and_are_no_failures():
    story = elastic(3)
    story.scale(1)
    three = tuple(trainer(index) for index in range(3))
    lines = story.sees(*SERVERS, *three, after=5)
    assert created(lines) == ["delete digits-trainer-1 0.0", "delete digits-trainer-2 0.0"]
    assert lines[-1].endswith("trainers 1-2 leave while the others continue")
    leaving = [ended(each, 143, deleted_at=at(35)) for each in three[1:]]
    for pods in ((three[0], *leaving), (three[0],)):
        lines = story.sees(*SERVERS, *pods, after=6)
        assert lines[0] == "Running pservers 2/2 trainers 1/1 restarts 0 failures 0"
        assert created(lines) == []
    story.sees(*SERVERS, ended(three[0]), after=7)
    assert story.job.status.state == "Succeeded"


def test_a_trainer_that_comes_back_is_of_a_later_attempt_than_the_one_that_left():
    story = elastic(2)
    story.scale(1)
    story.sees(*SERVERS, trainer(0), trainer(1), after=5)
    story.scale(2)
    leaving = ended(trainer(1), 143, deleted_at=at(35))
    assert created(story.sees(*SERVERS, trainer(0), leaving, after=6)) == []  # its name is taken
    assert created(story.sees(*SERVERS, trainer(0), after=7)) == ["create digits-trainer-1 0.1"]
    lines = story.sees(*SERVERS, trainer(0), trainer(1, "0.1"), after=8)
    assert lines[0] == "Running pservers 2/2 trainers 2/2 restarts 0 failures 0"


def test_trainers_that_were_scaled_away_and_back_have_not_failed():
    story = elastic(2)
    for times in range(4):
        story.scale(1)
        story.sees(*SERVERS, trainer(0), trainer(1, f"0.{times}"), after=times)
        story.scale(2)
        story.sees(*SERVERS, trainer(0), trainer(1, f"0.{times + 1}"), after=times)
    story.sees(*SERVERS, trainer(0), ended(trainer(1, "0.4"), 1), after=50)
    assert story.sees(*SERVERS, trainer(0), after=50)[-1] == "look again after 1 s"
    assert created(story.sees(*SERVERS, trainer(0), after=51)) == ["create digits-trainer-1 0.5"]
    story.sees(*SERVERS, trainer(0), ended(trainer(1, "0.5"), 1), after=60)
    assert story.sees(*SERVERS, trainer(0), after=60)[-1] == "look again after 2 s"


@pytest.mark.parametrize(
    "next_one",
    [
        pytest.param({"pods": (pending(trainer(1, "0.1"), "Unschedulable"),)}, id="finds-no-node"),
        pytest.param({"refused": "exceeded quota"}, id="is-not-let-in"),
    ],
)
def test_a_restart_in_an_elastic_job_that_has_enough_is_over_once_the_next_one_may_come(next_one):
    story = elastic(2)
    lines = story.sees(*SERVERS, trainer(0), ended(trainer(1), 1), after=5)
    assert lines[0] == "Restarting pservers 2/2 trainers 1/2 restarts 1 failures 1"
    lines = story.sees(*SERVERS, trainer(0), after=5.5)
    assert lines[0] == "Restarting pservers 2/2 trainers 1/2 restarts 1 failures 1", "it pauses"
    pods, refused = next_one.get("pods", ()), next_one.get("refused")
    lines = story.sees(*SERVERS, trainer(0), *pods, refused=refused, after=10)
    assert lines[0] == "Running pservers 2/2 trainers 1/2 restarts 1 failures 1"
    [told] = [line for line in lines if line.startswith("Restarting ")]
    assert told.startswith("Restarting False Restarted: the servers and at least trainer.minReplicas")
    lines = story.sees(*SERVERS, trainer(0), trainer(1, "0.1"), after=20)
    assert lines[0] == "Running pservers 2/2 trainers 2/2 restarts 1 failures 1"


def test_a_trainer_that_finds_no_node_does_not_end_an_elastic_job_that_has_enough():
    story = elastic(2, runPolicy={"pendingDeadlineSeconds": 60})
    story.scale(3)
    stuck = pending(trainer(2), "Unschedulable", "0/3 nodes are available")
    for seconds in (5, 500):
        lines = story.sees(*SERVERS, trainer(0), trainer(1), stuck, after=seconds)
        assert lines[0] == "Running pservers 2/2 trainers 2/3 restarts 0 failures 0"
    assert "digits-trainer-2 is waiting, Unschedulable: 0/3 nodes are available" in lines[2]
    assert not any(line.startswith("look again") for line in lines)


def test_an_elastic_job_that_has_too_few_trainers_does_not_run():
    story = Story(
        syncMode="Async",
        trainer={"replicas": 3, "minReplicas": 2, "maxReplicas": 4},
        runPolicy={"pendingDeadlineSeconds": 60},
    )
    story.sees(*SERVERS, trainer(0), pending(trainer(1)), pending(trainer(2)))
    assert story.job.status.state == "Pending"
    story.sees(*SERVERS, trainer(0), pending(trainer(1)), pending(trainer(2)), after=60)
    assert story.job.status.state == "Failed"


def test_no_trainer_is_added_once_one_has_completed():
    story = elastic(2)
    one_done = (*SERVERS, ended(trainer(0)), trainer(1))
    story.sees(*one_done, after=5)
    story.scale(3)
    lines = story.sees(*one_done, after=6)
    assert lines[0] == "Running pservers 2/2 trainers 2/2 restarts 0 failures 0"
    assert created(lines) == []
    assert "trainer.replicas is 3, but no trainer is added after a trainer has completed" in lines[2]
    story.sees(*SERVERS, ended(trainer(0)), ended(trainer(1)), after=7)
    assert story.job.status.state == "Succeeded"


def test_an_elastic_job_that_is_scaled_down_to_those_that_have_completed_succeeds():
    story = elastic(2)
    pods = (*SERVERS, ended(trainer(0)), trainer(1))
    story.sees(*pods, after=5)
    story.scale(1)
    lines = story.sees(*pods, after=6)
    assert story.job.status.state == "Succeeded"
    assert created(lines) == ["delete digits-trainer-1 0.0"]


DONE = (ended(SERVERS[0]), ended(SERVERS[1]), ended(trainer(0)), ended(trainer(1)))


@pytest.mark.parametrize(
    ("late", "state"),
    [
        pytest.param(pending(trainer(2), "ContainerCreating"), "Succeeded", id="still-starting"),
        pytest.param(ended(trainer(2), 91), "Succeeded", id="found-no-server"),
        pytest.param(None, "Succeeded", id="not-created"),
        pytest.param(trainer(2), "Running", id="may-be-at-work-on-its-results"),
        pytest.param(ended(trainer(2), 1), "Restarting", id="has-failed"),
    ],
)
def test_a_trainer_that_comes_when_the_others_are_done_is_not_waited_for(late, state):
    story = elastic(2)
    story.scale(3)
    story.sees(*SERVERS, trainer(0), trainer(1), pending(trainer(2)), after=5)
    story.sees(*DONE, *([late] if late else []), after=6)
    assert story.job.status.state == state
    if state == "Succeeded":
        ending = story.job.status.explanation
        assert ending is not None
        assert ending.message.startswith("all 2 trainers have completed; trainer 2 started too late")


EVERY_POD = [f"delete digits-{name} 0.0" for name in ("pserver-0", "pserver-1", "trainer-0", "trainer-1")]
LATE = "delete digits-trainer-2 0.0"


@pytest.mark.parametrize(
    ("policy", "late", "expected"),
    [
        pytest.param("Running", ended(trainer(2), 91), [], id="running-leaves-its-log"),
        pytest.param("None", ended(trainer(2), 91), [], id="none-leaves-it"),
        pytest.param(
            "All", ended(trainer(2), 91), [*EVERY_POD, LATE, "delete Service digits"], id="all-takes-it-too"
        ),
        pytest.param("None", pending(trainer(2)), [LATE], id="it-has-not-begun-and-would-find-nobody"),
    ],
)
def test_a_trainer_that_came_too_late_is_cleaned_up_as_the_others(policy, late, expected):
    story = elastic(2, runPolicy={"cleanPodPolicy": policy})
    story.scale(3)
    story.sees(*SERVERS, trainer(0), trainer(1), pending(trainer(2)), after=5)
    at_work = story.sees(*DONE[:3], trainer(1), ended(trainer(2), 91), after=6)
    assert (story.job.status.state, created(at_work)) == ("Running", []), "another one still works"
    assert created(story.sees(*DONE, late, after=7)) == expected
    assert story.job.status.state == "Succeeded"
    assert created(story.sees(*DONE, late, after=90)) == expected, "later as well"


@pytest.mark.parametrize(
    ("mode", "other", "state"),
    [
        pytest.param("Async", ended(trainer(1)), "Succeeded", id="nobody-is-left"),
        pytest.param("Async", trainer(1), "Failed", id="the-servers-stay-for-another"),
        pytest.param("Sync", ended(trainer(1)), "Failed", id="each-is-needed"),
    ],
)
def test_a_trainer_that_finds_servers_about_to_end_is_no_failure(mode, other, state):
    story = elastic(3, mode, failurePolicy={"action": "FailJob"})
    story.sees(*SERVERS, ended(trainer(0)), other, ended(trainer(2), 91), after=5)
    assert story.job.status.state == state


@pytest.mark.parametrize("mode", ["Async", "Sync"])
def test_a_server_that_ends_while_trainer_zero_is_needed_has_failed(mode):
    story = Story(syncMode=mode, trainer={"replicas": 2, **BOUNDS})
    story.sees(*SERVERS, pending(trainer(0)), trainer(1))
    story.sees(ended(SERVERS[0]), ended(SERVERS[1]), pending(trainer(0)), ended(trainer(1)), after=5)
    assert story.job.status.state == "Restarting"
