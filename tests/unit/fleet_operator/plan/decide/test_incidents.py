"""What counts as one failure or disruption, and when a job has reached its limit of them."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.api import FleetJobStatus, Role
from fleet_operator.plan.model import PodPhase
from fleet_operator.plan.observe.attempts import Ledger, Replica
from tests.support import jobs
from tests.support.plans import Story, at, ended, pserver, trainer

if TYPE_CHECKING:
    from fleet_operator.plan.model import ObservedPod


def test_what_ends_with_an_evicted_peer_does_not_count():
    story = Story(jobs.collective_manifest(runPolicy={"backoffLimit": 0}))
    evicted = trainer(0, disruption="PreemptionByScheduler", deleted_at=at(30))
    lines = story.sees(evicted, ended(trainer(1), 1, message="connection reset by peer"))
    assert lines[0] == "Restarting trainers 0/2 restarts 1 failures 0"
    assert any(line.startswith("tell Warning ReplicaFailed: digits-trainer-1") for line in lines)


def test_replicas_of_a_starved_host_that_give_each_other_up_in_turn_are_one_failure():
    story = Story(checkpoint={"mountPath": "/data", "claimName": "data"})
    servers = [pserver(index, created_at=at(0)) for index in range(2)]
    trainers = [trainer(index, created_at=at(0)) for index in range(2)]
    story.sees(*servers, *trainers)

    def gone(pod: ObservedPod, after: float) -> ObservedPod:
        return ended(pod, 91, finished_at=at(after))

    story.sees(gone(servers[0], 300), servers[1], *trainers, after=300)
    again = pserver(0, "0.1", created_at=at(302))
    story.sees(again, servers[1], gone(trainers[0], 303), trainers[1], after=303)
    back = trainer(0, "0.1", created_at=at(305))
    story.sees(again, gone(servers[1], 310), back, gone(trainers[1], 311), after=311)
    assert story.job.status.failures == 1
    others = pserver(1, "0.1", created_at=at(313)), trainer(1, "0.1", created_at=at(313))
    story.sees(again, others[0], gone(back, 320), others[1], after=320)
    assert story.job.status.failures == 2, "it was started after the others had given up"


@pytest.mark.parametrize("ahead", [-30, -1, 0, 1, 30])
def test_who_was_there_at_a_failure_does_not_depend_on_the_clock_of_a_node(ahead: float):
    story = Story(checkpoint={"mountPath": "/data", "claimName": "data"})
    servers = [pserver(index, created_at=at(0)) for index in range(2)]
    trainers = [trainer(index, created_at=at(0)) for index in range(2)]
    story.sees(*servers, *trainers)
    failed = ended(trainers[0], 1, finished_at=at(1 + ahead))
    story.sees(*servers, failed, trainers[1], after=1)
    gave_up = ended(trainers[1], 91, finished_at=at(2 + ahead))
    story.sees(*servers, gave_up, after=2)
    assert story.job.status.failures == 1, "it gave up the one that had failed"
    again = trainer(0, "0.1", created_at=at(3))
    late = ended(trainer(1, "0.1", created_at=at(4)), 91, finished_at=at(9 + ahead))
    story.sees(*servers, again, late, after=9)
    assert story.job.status.failures == 2, "it was created when the one that had failed was there again"


def test_replicas_that_give_each_other_up_for_ever_are_not_one_incident():
    story = Story(checkpoint={"mountPath": "/data", "claimName": "data"}, runPolicy={"backoffLimit": 3})
    rest = (pserver(0), pserver(1))
    pods = [trainer(index, created_at=at(0)) for index in range(2)]
    story.sees(*rest, *pods)
    for turn in range(2, 16):  # each ends 45 s after the other
        failing = turn % 2
        now = 45 * turn
        pods[failing] = ended(pods[failing], 91, finished_at=at(now))
        lines = story.sees(*rest, *pods, after=now)
        if lines[0].startswith("Failed"):
            return
        pods[failing] = trainer(failing, f"0.{turn // 2}", created_at=at(now + 1))
    pytest.fail(f"the limit of failures is never reached: {lines[0]}")


def fleet_of(trainers: int, **spec: Any) -> tuple[Story, list[ObservedPod]]:
    """Return the story of one server with so many trainers, all of which run, and their pods."""
    story = Story(pserver={"replicas": 1}, trainer={"replicas": trainers}, **spec)
    pods = [trainer(index) for index in range(trainers)]
    story.sees(pserver(0), *pods)
    return story, pods


def fail(story: Story, pods: list[ObservedPod], *indexes: int, after: float) -> None:
    """Let trainers fail by themselves at once, and each be there again in its next life.

    Another operator then goes on, which knows only what is written in the status.
    """
    failed = [ended(pod, 1) if index in indexes else pod for index, pod in enumerate(pods)]
    story.sees(pserver(0), *failed, after=after)
    for index in indexes:
        pods[index] = trainer(index, f"0.{pods[index].attempt.replica + 1}")
    story.job = story.job.with_status(FleetJobStatus.model_validate(story.job.status.to_manifest()))


@pytest.mark.parametrize("trainers", [10, 100])
@pytest.mark.parametrize(
    "apart", [pytest.param(0.0, id="at-once"), pytest.param(0.1, id="one-after-the-other-within-seconds")]
)
def test_a_blip_costs_one_failure_whatever_the_number_of_replicas(trainers, apart):
    story, pods = fleet_of(trainers, runPolicy={"backoffLimit": 1})
    if apart:
        for index in range(trainers):
            fail(story, pods, index, after=apart * index)
    else:
        fail(story, pods, *range(trainers), after=0)
    status = story.job.status
    assert (status.state, status.failures, status.restarts) == ("Restarting", 1, trainers)
    written = status.to_manifest()
    assert written["ledger"]["incidentStart"] == "2026-11-21T10:00:00Z"
    assert written["ledger"]["roles"]["trainer"]["failed"] == f"0-{trainers - 1}"


def test_an_incident_lasts_a_minute_from_its_first_failure_and_not_from_its_last():
    story, pods = fleet_of(5)
    counts = []
    for index, after in enumerate((0, 30, 60, 61, 90)):
        fail(story, pods, index, after=after)
        counts.append(story.job.status.failures)
    assert counts == [1, 1, 1, 2, 2]


def test_failures_61_s_apart_are_two():
    story, pods = fleet_of(2)
    fail(story, pods, 0, after=0)
    fail(story, pods, 1, after=61)
    assert story.job.status.failures == 2


def test_a_replica_that_fails_again_within_the_incident_counts_again():
    story, pods = fleet_of(3)
    fail(story, pods, 0, after=0)
    fail(story, pods, 1, after=5)
    fail(story, pods, 0, after=10)
    assert story.job.status.failures == 2
    fail(story, pods, 1, after=15)  # of the second incident, as its first failure in it
    fail(story, pods, 2, after=69)
    assert story.job.status.failures == 2
    fail(story, pods, 1, after=70)
    assert story.job.status.failures == 3


@pytest.mark.parametrize(
    "looping", [pytest.param((3,), id="one-trainer"), pytest.param(tuple(range(8)), id="all-trainers")]
)
@pytest.mark.parametrize("together", [True, False])
def test_a_crash_loop_runs_out_of_the_limit(looping, together):
    story, pods = fleet_of(8, runPolicy={"backoffLimit": 6})
    for life in range(7):
        assert story.job.status.state != "Failed", f"it has failed {life} times"
        if together:
            fail(story, pods, *looping, after=10 * life)
        else:
            for place, index in enumerate(looping):
                fail(story, pods, index, after=10 * life + 0.1 * place)
    assert (story.job.status.state, story.job.status.failures) == ("Failed", 7)


def test_failures_in_different_lives_of_a_job_count_separately():
    story = Story(failurePolicy={"action": "RestartJob"}, runPolicy={"backoffLimit": 2})
    for life in range(3):
        pods = [pserver(0, f"{life}.0"), pserver(1, f"{life}.0")]
        trainers = [trainer(index, f"{life}.0") for index in (0, 1)]
        trainers[life % 2] = ended(trainers[life % 2], 1)
        story.sees(*pods, *trainers, after=10 * life)
        assert story.job.status.failures == life + 1
    assert story.job.status.state == "Failed"


@pytest.mark.parametrize(
    "skew",
    [
        pytest.param(0, id="clocks-that-agree"),
        pytest.param(-5, id="a-node-whose-clock-is-behind"),
        pytest.param(5, id="a-node-whose-clock-is-ahead"),
    ],
)
def test_who_gives_up_an_evicted_peer_is_not_counted_though_clocks_differ(skew):
    story = Story(checkpoint={"mountPath": "/data", "claimName": "data"})
    servers = [pserver(index, created_at=at(0)) for index in range(2)]
    young = trainer(0, created_at=at(98))  # by the API server's clock, shortly before the other is evicted
    story.sees(*servers, young, trainer(1, created_at=at(0)))
    evicted = trainer(1, disruption="EvictionByEvictionAPI", created_at=at(0))
    story.sees(*servers, young, ended(evicted, 143, finished_at=at(100 + skew)), after=100)
    gave_up = ended(young, 91, finished_at=at(120 + skew))
    story.sees(*servers, gave_up, trainer(1, "0.1", created_at=at(102)), after=120)
    assert (story.job.status.restarts, story.job.status.failures) == (2, 0)


def test_a_pod_that_is_evicted_for_its_own_limit_uses_up_the_limit_of_failures():
    story = Story(runPolicy={"backoffLimit": 2})
    others = (pserver(0), pserver(1), trainer(0))
    for life in range(3):
        assert story.job.status.state != "Failed"
        full = 'Usage of EmptyDir volume "scratch" exceeds the limit "1Gi".'
        story.sees(*others, ended(trainer(1, f"0.{life}"), 137, reason="Evicted", message=full), after=life)
    assert (story.job.status.state, story.job.status.failures) == ("Failed", 3)


@pytest.mark.parametrize("policy", ["RestartReplica", "RestartJob"])
def test_a_pod_that_its_node_refuses_again_and_again_uses_up_the_limit_of_failures(policy):
    story = Story(failurePolicy={"action": policy}, runPolicy={"backoffLimit": 1})

    def is_refused(after: float) -> None:
        ledger = Ledger.of(story.job.status)
        pods = [
            each(index, str(ledger.attempt(Replica(role, index))))
            for role, each in ((Role.PSERVER, pserver), (Role.TRAINER, trainer))
            for index in (0, 1)
        ]
        story.sees(*pods[:3], ended(pods[3], None, reason="UnexpectedAdmissionError"), after=after)

    is_refused(0)
    assert story.job.status.failures == 0, "the first may be a device that was lost that moment"
    is_refused(100)
    assert story.job.status.failures == 1
    assert story.job.status.last_failure is not None
    assert story.job.status.last_failure.message.startswith(
        "digits-trainer-1 could not run (UnexpectedAdmissionError)"
    )
    is_refused(200)
    assert (story.job.status.state, story.job.status.failures) == ("Failed", 2)


def test_a_pod_that_its_node_refuses_after_one_that_ran_is_no_failure():
    story = Story(runPolicy={"backoffLimit": 0})
    others = (pserver(0), pserver(1), trainer(0))

    def refused(attempt: str) -> ObservedPod:
        return ended(trainer(1, attempt), None, reason="UnexpectedAdmissionError")

    story.sees(*others, refused("0.0"))
    story.sees(*others, trainer(1, "0.1"), after=10)
    story.sees(*others, ended(trainer(1, "0.1"), 143, disruption="PreemptionByScheduler"), after=1000)
    story.sees(*others, refused("0.2"), after=1010)
    assert (story.job.status.state, story.job.status.failures) == ("Restarting", 0)


def calls_of_a_pass_with_peers_lost(trainers: int) -> int:
    """Return how many calls it takes to plan what follows from one failure, and from that of all others."""
    story = Story(trainer={"replicas": trainers})
    servers = [pserver(0), pserver(1)]
    pods = [trainer(index, created_at=at(0)) for index in range(trainers)]
    story.sees(*servers, *pods)
    story.sees(*servers, *pods[:-1], ended(pods[-1], 1, finished_at=at(10)), after=10)
    last = trainer(trainers - 1, "0.1", created_at=at(15))
    story.sees(*servers, *pods[:-1], last, after=15)
    calls = 0

    def count(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        lost = [ended(pod, 91, finished_at=at(20)) for pod in pods[:-1]]
        story.sees(*servers, *lost, last, after=20)
    finally:
        sys.setprofile(None)
    assert (story.job.status.restarts, story.job.status.failures) == (trainers, 1)
    return calls


def test_the_work_for_many_lost_peers_grows_as_their_number_does():
    few, many = calls_of_a_pass_with_peers_lost(20), calls_of_a_pass_with_peers_lost(200)
    assert many < 15 * few  # 10 times as many replicas; 60 times as many calls where each looks at all others


def evict(story: Story, *, after: float, reason: str = "EvictionByEvictionAPI") -> list[str]:
    """Let trainer 1 be evicted, and its successor run."""
    attempt = f"0.{story.job.status.restarts}"
    others = (pserver(0), pserver(1), trainer(0))
    lines = story.sees(
        *others, trainer(1, attempt, disruption=reason, exit_code=143, phase=PodPhase.FAILED), after=after
    )
    story.sees(*others, trainer(1, f"0.{story.job.status.restarts}"), after=after + 5)
    return lines


def test_disruptions_are_replaced_up_to_their_limit():
    story = Story(failurePolicy={"disruptionLimit": 1})
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    evict(story, after=10)
    evict(story, after=60)
    assert (story.job.status.state, story.job.status.disruptions) == ("Running", 1), "one within a minute"
    lines = evict(story, after=300)
    assert (story.job.status.state, story.job.status.disruptions) == ("Failed", 2)
    assert story.job.status.failures == 0
    [said] = [line for line in lines if line.startswith("Failed True DisruptionLimitExceeded")]
    assert "disruption 2 of the job exceeds failurePolicy.disruptionLimit, 1" in said


def test_disruptions_without_a_limit_and_those_that_a_rule_ignores_are_replaced_for_ever():
    ignored = {"name": "spot", "onReasons": ["Spot"], "action": "Ignore"}
    stories = (Story(), Story(failurePolicy={"disruptionLimit": 0, "rules": [ignored]}))
    for story, counted in zip(stories, (3, 0), strict=True):
        story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
        for number in range(3):
            evict(story, after=100 * (number + 1), reason="Spot")
        assert (story.job.status.state, story.job.status.disruptions) == ("Running", counted)
