"""runPolicy.pendingDeadlineSeconds: how long not all replicas may run, and what is told then."""

from datetime import datetime
from typing import Any

import pytest

from fleet_operator.api import FleetJobStatus
from fleet_operator.plan.model import ObservedPod
from fleet_operator.plan.pending import pending_deadline, pending_since
from tests.support import jobs
from tests.support.plans import Story, at, ended, pending, pserver, trainer

SCHEDULER = "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."
LIMIT = {"pendingDeadlineSeconds": 60}


def status(**told: tuple[str, datetime]) -> FleetJobStatus:
    conditions: list[dict[str, Any]] = [
        {"type": kind, "status": status, "reason": "X", "last_transition_time": moment}
        for kind, (status, moment) in told.items()
    ]
    return FleetJobStatus.model_validate({"conditions": conditions})


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param({}, None, id="a-new-job-has-not-waited-yet"),
        pytest.param({"Running": ("False", at(5))}, at(5), id="since-not-all-run"),
        pytest.param({"Running": ("True", at(5))}, None, id="not-while-all-run"),
        pytest.param(
            {"Running": ("False", at(5)), "Suspended": ("True", at(5))}, None, id="not-while-suspended"
        ),
        pytest.param(
            {"Running": ("False", at(5)), "Suspended": ("False", at(90))}, at(90), id="from-resumption-on"
        ),
        pytest.param(
            {"Running": ("False", at(99)), "Suspended": ("False", at(90))},
            at(99),
            id="from-a-later-restart-on",
        ),
    ],
)
def test_pending_since(told, expected):
    assert pending_since(status(**told)) == expected


@pytest.mark.parametrize(
    ("since", "seconds", "expected"),
    [
        pytest.param(at(5), 60, at(65), id="so-long-after"),
        pytest.param(at(5), None, None, id="no-limit"),
        pytest.param(None, 60, None, id="nothing-to-wait-for"),
    ],
)
def test_pending_deadline(since, seconds, expected):
    assert pending_deadline(since, seconds) == expected


def test_the_schedulers_own_reason_is_in_the_status_and_then_in_the_failure():
    story = Story(runPolicy=LIMIT)
    waits = pending(trainer(1), "Unschedulable", SCHEDULER)
    pods = (pserver(0), pserver(1), trainer(0), waits)
    lines = story.sees(*pods)
    said = "digits-trainer-1 waits, Unschedulable: 0/4 nodes are available: 4 Insufficient nvidia.com/gpu"
    assert any(line.startswith(f"Running False Unschedulable: {said}") for line in lines)
    assert lines[-1] == "look again after 60 s"
    lines = story.sees(*pods, after=60)
    assert lines[0].startswith("Failed ")
    [told] = [line for line in lines if line.startswith("Failed True")]
    assert told.startswith(
        "Failed True PendingDeadlineExceeded: not all replicas ran within"
        f" runPolicy.pendingDeadlineSeconds, 60 s: {said}"
    )
    failure = story.job.status.last_failure
    assert failure is not None
    assert (failure.pod, failure.reason) == ("digits-trainer-1", "Unschedulable")
    assert SCHEDULER.rstrip(".") in failure.message


def test_a_replica_that_finds_no_node_after_a_restart_is_waited_for_as_long_again():
    story = Story(runPolicy=LIMIT)
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1), after=30)
    story.sees(pserver(0), pserver(1), trainer(0), ended(trainer(1), 1), after=100)
    again = (pserver(0), pserver(1), trainer(0), pending(trainer(1, "0.1"), "Unschedulable", SCHEDULER))
    assert story.sees(*again, after=160)[-1] == "look again after 1 s"  # there was a pause of 1 s
    story.sees(*again, after=161)
    assert story.job.status.state == "Failed"


@pytest.mark.parametrize("action", ["RestartReplica", "RestartJob"])
def test_the_operators_own_pause_is_no_time_in_which_the_job_waits(action):
    story = Story(
        runPolicy={"pendingDeadlineSeconds": 10, "backoffLimit": 9}, failurePolicy={"action": action}
    )
    pods = (pserver(0), pserver(1), trainer(0))
    story.sees(*pods, trainer(1))
    now = 100.0
    for life in range(5):  # the last pause is of 16 s
        attempt = f"0.{life}" if action == "RestartReplica" else f"{life}.0"
        of_job = attempt if action == "RestartJob" else "0.0"
        pods = (pserver(0, of_job), pserver(1, of_job), trainer(0, of_job))
        story.sees(*pods, trainer(1, attempt), after=now)
        story.sees(*pods, ended(trainer(1, attempt), 1), after=now + 1)
        now += 60
    left = pods if action == "RestartReplica" else ()
    story.sees(*left, after=now - 60 + 1 + 15.5)
    assert story.job.status.state == "Restarting"
    story.sees(*left, after=now - 60 + 1 + 16 + 10)
    assert story.job.status.state == "Failed"


def test_a_job_that_runs_in_time_has_no_deadline_left():
    story = Story(runPolicy=LIMIT)
    story.sees(pserver(0), pserver(1))
    assert not any(
        "look" in line for line in story.sees(pserver(0), pserver(1), trainer(0), trainer(1), after=59)
    )
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1), after=600)
    assert story.job.status.state == "Running"


def test_an_elastic_job_that_came_to_run_while_nobody_looked_is_not_failed():
    trainers = {"replicas": 2, "minReplicas": 1, "maxReplicas": 4}
    story = Story(syncMode="Async", trainer=trainers, runPolicy=LIMIT)
    story.sees(*(pending(each) for each in (pserver(0), pserver(1), trainer(0), trainer(1))))
    lines = story.sees(pserver(0), pserver(1), trainer(0), pending(trainer(1), "Unschedulable"), after=90)
    assert lines[0] == "Running pservers 2/2 trainers 1/2 restarts 0 failures 0"


def test_time_in_suspension_does_not_count():
    story = Story(runPolicy={**LIMIT, "suspend": True})
    story.sees()
    story.edit(suspend=False)
    story.sees(after=600)
    assert story.sees(after=610)[-1] == "look again after 50 s"


def waits_for_an_image(**run_policy: int) -> tuple[Story, ObservedPod]:
    """Return a collective job of which one trainer runs, and the other pulls its image still."""
    story = Story(mode="Collective", pserver=None, runPolicy={"backoffLimit": 0, **run_policy})
    pulling = pending(trainer(1))
    story.sees(trainer(0), pulling)
    return story, pulling


def test_a_replica_that_gave_up_waiting_for_one_that_pulls_its_image_is_started_again_alone_and_not_counted():
    story, pulling = waits_for_an_image()
    lines = story.sees(ended(trainer(0), 91), pulling, after=180)
    assert lines[0] == "Restarting trainers 0/2 restarts 1 failures 0"
    assert [line for line in lines if line.startswith("delete")] == ["delete digits-trainer-0 0.0"]
    again = story.sees(ended(trainer(0, "0.1"), 91), pulling, after=400)
    assert again[0] == "Restarting trainers 0/2 restarts 2 failures 0"


def test_it_is_a_failure_like_any_other_once_the_deadline_is_over_or_everybody_runs():
    story, pulling = waits_for_an_image()
    assert story.sees(ended(trainer(0), 91), pulling, after=3599)[0].endswith("failures 0")
    assert story.sees(ended(trainer(0, "0.1"), 91), pulling, after=3600)[0].startswith("Failed")
    story, pulling = waits_for_an_image(pendingDeadlineSeconds=600)
    assert story.sees(ended(trainer(0), 91), pulling, after=601)[0].startswith("Failed")
    story, _ = waits_for_an_image()
    assert story.sees(ended(trainer(0), 91), trainer(1), after=100)[0].startswith("Failed")


def test_a_trainer_of_servers_that_are_not_there_yet_counts_as_little():
    story = Story(startupPolicy="AnyOrder", failurePolicy={"action": "FailJob"})
    pods = (pserver(0), pending(pserver(1)), trainer(1))
    story.sees(*pods, trainer(0))
    lines = story.sees(*pods, ended(trainer(0), 91), after=180)
    assert lines[0] == "Restarting pservers 1/2 trainers 1/2 restarts 1 failures 0"


def test_a_collective_trainer_that_is_200_s_late_counts_no_failure():
    story = Story(jobs.collective_manifest(trainer={"replicas": 2}))
    story.sees(trainer(0), pending(trainer(1)))
    for after in (60, 199, 200):
        lines = story.sees(trainer(0), pending(trainer(1), "Unschedulable", SCHEDULER), after=after)
        assert not any(line.startswith(("delete", "create", "Restarting", "Failed")) for line in lines), lines
    assert story.sees(trainer(0), trainer(1), after=201)[0] == "Running trainers 2/2 restarts 0 failures 0"
    assert story.job.status.last_failure is None
