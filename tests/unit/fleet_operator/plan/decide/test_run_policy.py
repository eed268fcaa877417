"""successPolicy, deadlines, and what a finished job leaves behind."""

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from fleet_operator.api import CleanPodPolicy, FleetJobStatus, JobState, SuccessPolicyType
from fleet_operator.plan.decide.run_policy import (
    cleanup_at,
    deadline,
    expiry,
    is_satisfied,
    pending_deadline,
    pending_since,
    success_sentence,
    to_clean,
)
from fleet_operator.plan.model import ObservedPod
from tests.support import jobs
from tests.support.plans import T0, Story, at, ended, pending, pserver, trainer


@pytest.mark.parametrize(
    ("policy", "succeeded", "expected"),
    [
        pytest.param(SuccessPolicyType.ALL, {0, 1}, False, id="all-waits-for-the-last-trainer"),
        pytest.param(SuccessPolicyType.ALL, {0, 1, 2}, True, id="all-is-all"),
        pytest.param(SuccessPolicyType.ANY, set(), False, id="any-needs-one"),
        pytest.param(SuccessPolicyType.ANY, {2}, True, id="any-takes-whichever-is-first"),
        pytest.param(SuccessPolicyType.RANK_ZERO, {1, 2}, False, id="rank-zero-ignores-the-others"),
        pytest.param(SuccessPolicyType.RANK_ZERO, {0}, True, id="rank-zero-is-enough"),
    ],
)
def test_is_satisfied(policy, succeeded, expected):
    assert is_satisfied(policy, replicas=3, succeeded=succeeded) is expected


@pytest.mark.parametrize(
    ("policy", "replicas", "expected"),
    [
        pytest.param(SuccessPolicyType.ALL, 3, "all 3 trainers have completed", id="all"),
        pytest.param(SuccessPolicyType.ALL, 1, "the trainer has completed", id="one"),
        pytest.param(
            SuccessPolicyType.ANY, 3, "trainer 1 has completed, as successPolicy Any requires", id="any"
        ),
        pytest.param(
            SuccessPolicyType.RANK_ZERO,
            3,
            "trainer 0 has completed, as successPolicy RankZero requires",
            id="rank-zero",
        ),
    ],
)
def test_success_sentence(policy, replicas, expected):
    assert success_sentence(policy, replicas=replicas, succeeded={1, 2}) == expected


def test_parameter_servers_have_no_vote():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    story.sees(ended(pserver(0), 1), ended(pserver(1)), ended(trainer(0)), ended(trainer(1)))
    assert story.job.status.state == "Succeeded"


def test_enough_success_outweighs_a_failure_of_the_same_moment():
    story = Story(successPolicy={"type": "RankZero"}, failurePolicy={"action": "FailJob"})
    story.sees(pserver(0), pserver(1), ended(trainer(0)), ended(trainer(1), 1))
    assert story.job.status.state == "Succeeded"


@pytest.mark.parametrize(
    ("start", "seconds", "expected"),
    [
        pytest.param(T0, 60, at(60), id="counts-from-the-start"),
        pytest.param(T0, None, None, id="none-is-all-the-time"),
        pytest.param(None, 60, None, id="not-before-the-start"),
    ],
)
def test_deadline(start, seconds, expected):
    assert deadline(start, seconds) == expected


def test_a_job_that_takes_too_long_fails_and_its_pods_go():
    story = Story(runPolicy={"activeDeadlineSeconds": 100})
    pods = (pserver(0), pserver(1), trainer(0), ended(trainer(1)))
    assert story.sees(*pods)[-1] == "look again after 100 s"
    sentence = "the job has not finished within runPolicy.activeDeadlineSeconds, 100 s"
    assert story.sees(*pods, after=100) == [
        "Failed pservers 2/2 trainers 2/2 restarts 0 failures 0",
        "PodsCreated True PodsCreated: the pods of all replicas exist",
        f"Running False DeadlineExceeded: {sentence}",
        f"Failed True DeadlineExceeded: {sentence}; raise it, and create the job again",
        "delete digits-pserver-0 0.0",
        "delete digits-pserver-1 0.0",
        "delete digits-trainer-0 0.0",
        f"tell Warning Failed: {sentence}; raise it, and create the job again",
    ]


def test_a_job_that_completes_at_the_last_moment_has_succeeded():
    story = Story(runPolicy={"activeDeadlineSeconds": 100})
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    story.sees(pserver(0), pserver(1), ended(trainer(0)), ended(trainer(1)), after=100)
    assert story.job.status.state == "Succeeded"


def test_time_in_suspension_does_not_count():
    story = Story(runPolicy={"activeDeadlineSeconds": 100})
    story.sees()
    story.edit(suspend=True)
    assert not any("look again" in line for line in story.sees(after=50))
    story.edit(suspend=False)
    assert story.sees(after=1000)[-1] == "look again after 100 s"


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
    said = (
        "digits-trainer-1 is waiting, Unschedulable: 0/4 nodes are available: 4 Insufficient nvidia.com/gpu"
    )
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


def test_time_in_suspension_does_not_count_as_pending():
    story = Story(runPolicy=LIMIT, suspend=True)
    story.sees()
    story.edit(suspend=False)
    story.sees(after=600)
    assert story.sees(after=610)[-1] == "look again after 50 s"


QUEUED = {"podGroupPolicy": {"kueue": {"queueName": "research"}}}
RUNNING = (pserver(0), pserver(1), trainer(0), trainer(1))
GATED = tuple(replace(pending(each), gates=("kueue.x-k8s.io/admission",)) for each in RUNNING)


def test_no_deadline_runs_while_kueue_holds_the_job_back():
    limits = {"activeDeadlineSeconds": 100, "pendingDeadlineSeconds": 60}
    story = Story(**QUEUED, runPolicy=limits)
    story.sees()
    assert not any("look" in line for line in story.sees(*GATED, after=10))
    story.sees(*GATED, after=5000)
    admitted = tuple(pending(each) for each in RUNNING)
    assert story.sees(*admitted, after=5010)[-1] == "look again after 60 s"
    story.sees(*RUNNING, after=5040)
    assert story.job.status.start_time == at(5000), "without the 5,000 s in the queue"
    story.sees(*RUNNING, after=5099)
    assert story.job.status.state == "Running"
    story.sees(*RUNNING, after=5100)
    assert story.job.status.state == "Failed"


def test_pods_that_kueue_has_admitted_must_run_in_time():
    story = Story(**QUEUED, runPolicy=LIMIT)
    story.sees(*GATED)
    story.sees(*(pending(each) for each in RUNNING), after=600)
    story.sees(*(pending(each) for each in RUNNING), after=661)
    assert story.job.status.state == "Failed"


@pytest.mark.parametrize(
    ("message", "holds"),
    [
        ("The workload is deactivated", True),
        ("The workload is deactivated due to exceeding the maximum number of re-queuing retries", True),
        ("Preempted to accommodate a workload", False),
    ],
)
def test_a_job_that_kueue_has_deactivated_makes_no_group_until_it_was_suspended(message: str, holds: bool):
    story = Story(**QUEUED, runPolicy=LIMIT)
    story.sees(*RUNNING)
    stopped = replace(
        ended(RUNNING[3], 143), disruption="WorkloadEvicted", disruption_message=message, deleted_at=at(40)
    )
    story.sees(*RUNNING[:3], stopped, after=10)
    assert story.job.status.failures == 0
    assert story.job.status.last_failure is not None
    assert f"(WorkloadEvicted: {message})" in story.job.status.last_failure.message
    lines = story.sees(after=5000 if holds else 30)
    assert any(line.startswith("create digits-") for line in lines) is not holds
    assert ("Running False Deactivated" in str(lines)) is holds
    if holds:
        story.edit(suspend=True)
        story.sees(after=5010)
        story.edit(suspend=False)
        lines = story.sees(after=5020)
        assert any(line.startswith("create digits-") for line in lines)


def test_a_job_that_is_never_ready_in_time_for_kueue_ends_by_its_own_limit():
    story = Story(**QUEUED, failurePolicy={"disruptionLimit": 0})
    story.sees(*(pending(each) for each in RUNNING))
    late: dict[str, Any] = {
        "disruption": "WorkloadEvicted",
        "disruption_message": "Exceeded the PodsReady timeout",
        "deleted_at": at(40),
    }
    story.sees(*(replace(ended(each, 143), **late) for each in RUNNING), after=10)
    assert story.job.status.state == "Failed"
    assert "exceeds failurePolicy.disruptionLimit, 0" in str(story.job.status.conditions)


def test_a_job_whose_deactivation_nobody_saw_holds_as_its_workload_says():
    story = Story(**QUEUED, runPolicy=LIMIT)
    story.sees(*RUNNING)
    lines = story.sees(after=86410, deactivated=True)  # the operator did not run until the next day
    assert any(f"was deactivated in Kueue at {at(86410):%Y-%m-%d %H:%M:%S} UTC" in line for line in lines)
    assert story.job.status.failures == 0
    assert not any(line.startswith("create digits-") for line in story.sees(after=90000))


def test_the_gate_of_another_controller_does_not_stop_the_clock():
    story = Story(**QUEUED, runPolicy=LIMIT)
    story.sees(*(replace(each, gates=("example.com/wait",)) for each in GATED))
    story.sees(*(replace(each, gates=("example.com/wait",)) for each in GATED), after=61)
    assert story.job.status.state == "Failed"


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
    story = Story(startupPolicy={"order": "AnyOrder"}, failurePolicy={"action": "FailJob"})
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


RUNS, DONE, FAILED = pserver(0), ended(trainer(0)), ended(trainer(1), 1)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param(CleanPodPolicy.RUNNING, (RUNS,), id="running-leaves-ended-pods-for-their-logs"),
        pytest.param(CleanPodPolicy.ALL, (RUNS, DONE, FAILED), id="all-leaves-none"),
        pytest.param(CleanPodPolicy.NONE, (), id="none-leaves-all"),
    ],
)
def test_to_clean(policy, expected):
    assert to_clean(policy, (RUNS, DONE, FAILED)) == expected


@pytest.mark.parametrize(
    ("state", "any_active", "expected"),
    [
        pytest.param(JobState.SUCCEEDED, True, at(30), id="after-a-success-servers-get-time-to-exit"),
        pytest.param(JobState.SUCCEEDED, False, T0, id="unless-all-have-exited"),
        pytest.param(JobState.FAILED, True, T0, id="after-a-failure-nobody-has-anything-left-to-do"),
    ],
)
def test_cleanup_at(state, any_active, expected):
    assert cleanup_at(state, T0, any_active=any_active) == expected


def finish(policy: str) -> Story:
    story = Story(runPolicy={"cleanPodPolicy": policy})
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    story.sees(pserver(0), pserver(1), ended(trainer(0)), ended(trainer(1)), after=60)
    return story


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param("Running", ["delete digits-pserver-0 0.0"], id="servers-never-burn-resources"),
        pytest.param(
            "All",
            [
                "delete digits-pserver-0 0.0",
                "delete digits-pserver-1 0.0",
                "delete digits-trainer-0 0.0",
                "delete digits-trainer-1 0.0",
                "delete Service digits",
            ],
            id="all-takes-the-service-too",
        ),
        pytest.param("None", [], id="none-keeps-even-what-runs"),
    ],
)
def test_a_server_that_does_not_exit_by_itself(policy, expected):
    story = finish(policy)
    pods = (pserver(0), ended(pserver(1)), ended(trainer(0)), ended(trainer(1)))
    early = story.sees(*pods, after=89)
    assert "look again after 1 s" in early
    assert not any(line.startswith("delete") for line in early)
    assert [line for line in story.sees(*pods, after=90) if line.startswith("delete")] == expected


def test_a_server_that_is_stopped_after_the_success_has_not_failed():
    story = finish("Running")
    pods = (ended(pserver(0), 143), ended(pserver(1), 143), ended(trainer(0)), ended(trainer(1)))
    assert story.sees(*pods, after=95)[0] == "Succeeded pservers 0/2 trainers 2/2 restarts 0 failures 0"


def test_a_pod_of_an_older_attempt_goes_whatever_the_policy():
    story = Story(runPolicy={"cleanPodPolicy": "None"}, successPolicy={"type": "RankZero"})
    story.sees(pserver(0), pserver(1), trainer(0), ended(trainer(1), 1))
    lines = story.sees(pserver(0), pserver(1), ended(trainer(0)), ended(trainer(1), 1), after=1)
    assert [line for line in lines if line.startswith("delete")] == ["delete digits-trainer-1 0.0"]


def test_a_pod_that_runs_is_cleaned_up_only_as_it_was_seen_for_it_may_end_by_itself_meanwhile():
    story = Story()
    done = (ended(pserver(0)), ended(trainer(0)), ended(trainer(1)))
    story.sees(*done, pserver(1, version="7"))
    lines = story.sees(*done, pserver(1, version="8"), after=30)
    assert "delete digits-pserver-1 0.0 at version 8" in lines
    older = trainer(0, "0.0", version="9")
    restarted = Story()
    restarted.sees(pserver(0), pserver(1), ended(older, 1), trainer(1))
    assert "delete digits-trainer-0 0.0" in restarted.sees(
        pserver(0), pserver(1), ended(older, 1), trainer(1)
    )


@pytest.mark.parametrize(
    ("completion", "seconds", "expected"),
    [
        pytest.param(T0, 60, at(60), id="counts-from-the-end"),
        pytest.param(T0, 0, T0, id="zero-is-at-once"),
        pytest.param(T0, None, None, id="none-keeps-the-job"),
        pytest.param(None, 60, None, id="not-before-the-end"),
    ],
)
def test_expiry(completion, seconds, expected):
    assert expiry(completion, seconds) == expected


def test_the_job_is_deleted_when_its_time_is_over():
    story = Story(runPolicy={"ttlSecondsAfterFinished": 100})
    done = (ended(pserver(0)), ended(pserver(1)), ended(trainer(0)), ended(trainer(1)))
    assert story.sees(*done)[-1] == "look again after 100 s"
    assert story.sees(*done, after=99.5)[-1] == "look again after 0.5 s"
    assert story.sees(*done, after=100)[-1] == "delete the job"


def test_a_time_set_after_the_end_counts_from_the_end():
    story = Story()
    done = (ended(pserver(0)), ended(pserver(1)), ended(trainer(0)), ended(trainer(1)))
    story.sees(*done)
    story.edit(ttl_seconds_after_finished=10)
    assert story.sees(*done, after=50)[-1] == "delete the job"
