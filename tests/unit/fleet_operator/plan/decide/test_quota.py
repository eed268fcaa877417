"""A quota that refuses some pods of a job: what the job gives back, when, and when it asks again."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, time
from itertools import combinations
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.api import JobState, QuotaBackOff, Role
from fleet_operator.build import ClusterHosts
from fleet_operator.plan import plan
from fleet_operator.plan.decide import quota
from fleet_operator.plan.model import (
    Attempt,
    CreatePod,
    CreateService,
    DeletePod,
    Observed,
    ObservedPod,
    PodPhase,
)
from tests.support import jobs
from tests.support.plans import T0, Story, at, ended, pending, pserver, trainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleet_operator.api import FleetJob

REFUSED: dict[str, Any] = {
    "refused": 'pods "digits-trainer-1" is forbidden: exceeded quota: few, requested: pods=1, used: pods=4',
    "over_quota": True,
}
SERVERS = (pserver(0), pserver(1))
SECONDS = quota.PATIENCE.total_seconds()


def held_until(story: Story) -> float:
    """Return after how many seconds from the beginning of its story the job gives its pods back."""
    assert story.plan.requeue_after == quota.AGAIN
    told = story.job.status.condition("PodsCreated")
    assert told is not None
    assert told.reason == "CreationRefused"
    (said,) = re.findall(r"at (\d\d:\d\d:\d\d) UTC the job releases the pods that it has", told.message)
    moment = datetime.combine(T0.date(), time.fromisoformat(said), UTC)
    return (moment - T0).total_seconds()


def test_what_a_job_holds_while_a_quota_refuses_the_rest_is_given_back_and_asked_for_again():
    story = Story()
    pods = (*SERVERS, trainer(0))
    story.sees(*pods, **REFUSED)
    due = held_until(story)
    assert SECONDS - 1 <= due <= 2 * SECONDS
    assert not any(
        line.startswith(("delete", "tell")) for line in story.sees(*pods, after=due - 1, **REFUSED)
    )
    lines = story.sees(*pods, after=due + 1, **REFUSED)
    assert lines[0] == "Pending pservers 0/2 trainers 0/2 restarts 0 failures 0"
    assert [line for line in lines if line.startswith("delete")] == [
        "delete digits-pserver-0 0.0",
        "delete digits-pserver-1 0.0",
        "delete digits-trainer-0 0.0",
    ]
    again = story.job.status.ledger.quota_back_off
    assert again is not None
    assert again.not_before is not None
    (told,) = [line for line in lines if line.startswith("tell")]
    assert told.startswith("tell Warning QuotaBackOff: digits-pserver-0 (and 2 more): the job has")
    for line in [told, *(line for line in lines if line.startswith(("PodsCreated False", "Running False")))]:
        assert "because a quota does not admit all of them: pods" in line
        assert f"it requests all of them again at {again.not_before:%H:%M:%S} UTC" in line

    pause = (again.not_before - at(due + 1)).total_seconds()
    assert SECONDS - 1 <= pause <= 2 * SECONDS
    lines = story.sees(after=due + pause, **REFUSED)  # what was refused before is all that is known
    assert not any(line.startswith("create digits") for line in lines)
    assert "look again after 1 s" in lines
    lines = story.sees(after=due + 1 + pause, **REFUSED)
    assert "create digits-pserver-0 1.0" in lines
    up = [pserver(0, "1.0"), pserver(1, "1.0"), trainer(0, "1.0"), trainer(1, "1.0")]
    lines = story.sees(*up, after=due + pause + 5)
    assert lines[0] == "Running pservers 2/2 trainers 2/2 restarts 0 failures 0"
    assert story.job.status.ledger.quota_back_off is None


def pauses(uid: str, lives: int) -> list[float]:
    """Return how many seconds a job that never gets all of its pods pauses after each of its first lives."""
    story, now = Story(), 0.0
    story.job = jobs.job(jobs.manifest(), uid=uid)
    found = []
    for life in range(lives):
        held = pserver(0, f"{life}.0")
        story.sees(held, after=now, **REFUSED)
        now = held_until(story) + 1
        story.sees(held, after=now, **REFUSED)
        known = story.job.status.ledger.quota_back_off
        assert known is not None
        assert known.not_before is not None
        assert known.times == life + 1
        found.append((known.not_before - at(now)).total_seconds())
        now = (known.not_before - T0).total_seconds()
    return found


def test_each_time_the_pause_is_longer_up_to_a_bound():
    for number, pause in enumerate(pauses("one", 9)):
        least = min(SECONDS * 2**number, quota.LONGEST.total_seconds() / 2)
        assert least - 1 <= pause <= 2 * least


def test_two_jobs_that_pause_equally_long_in_one_life_do_not_in_the_next_ones():
    lives = [pauses(f"job-{number}", 4) for number in range(60)]
    equal = [(one, other) for one, other in combinations(lives, 2) if abs(one[0] - other[0]) < 0.5]
    assert len(equal) > 50
    assert not [pair for pair in equal if all(abs(one - other) < 2 for one, other in zip(*pair, strict=True))]


@pytest.mark.parametrize(
    ("spec", "pods"),
    [
        pytest.param({}, (*SERVERS, trainer(0), ended(trainer(1), 1)), id="it-has-trained"),
        pytest.param({"podGroupPolicy": {"volcano": {}}}, (*SERVERS, trainer(0)), id="a-gang"),
        pytest.param({"syncMode": "Async"}, (*SERVERS, trainer(0)), id="a-trainer-that-waits-for-nobody"),
        pytest.param(
            {"syncMode": "Async", "trainer": {"replicas": 3, "minReplicas": 1, "maxReplicas": 3}},
            (*SERVERS, trainer(0)),
            id="enough-trainers-of-an-elastic-job",
        ),
        pytest.param({}, (*SERVERS, ended(trainer(0), 0)), id="a-trainer-that-has-completed"),
        pytest.param({}, (), id="it-holds-none"),
    ],
)
def test_a_job_keeps_pods_that_do_something_or_that_are_not_its_own_to_give(
    spec: dict[str, Any], pods: tuple[ObservedPod, ...]
):
    story = Story(jobs.manifest(**spec))
    left = tuple(pod for pod in pods if pod.exit_code in (None, 0))
    for after in (0, 5, 60, 600):
        lines = story.sees(*(pods if after == 0 else left), after=after, **REFUSED)
        assert not any("QuotaBackOff" in line or line.startswith("delete digits-pserver") for line in lines)


def test_trainers_that_wait_for_nobody_keep_nothing_before_one_of_them_runs():
    story = Story(jobs.manifest(syncMode="Async", startupPolicy={"order": "AnyOrder"}))
    pods = (*SERVERS, pending(trainer(0)))
    story.sees(*pods, **REFUSED)
    assert "QuotaBackOff" in "\n".join(story.sees(*pods, after=2 * SECONDS, **REFUSED))


def test_a_refusal_that_is_over_or_of_another_kind_gives_nothing_back():
    story = Story()
    pods = (*SERVERS, trainer(0))
    story.sees(*pods, **REFUSED)
    story.sees(*pods, after=10)
    story.sees(*pods, after=15, **REFUSED)
    lines = story.sees(*pods, after=15 + SECONDS - 1, **REFUSED)
    assert not any(line.startswith("delete") for line in lines)
    lines = story.sees(*pods, after=600, refused="pods is forbidden: no right to it")
    assert not any(line.startswith("delete") for line in lines)


def test_the_time_that_a_job_may_be_pending_goes_on_while_it_waits_for_a_quota():
    story = Story(runPolicy={"pendingDeadlineSeconds": 100})

    def state(after: int) -> str:
        life = story.job.status.job_restarts
        paused = story.job.status.ledger.quota_back_off or QuotaBackOff()
        waits = paused.not_before is not None and at(after) < paused.not_before
        pods = () if waits else (pserver(0, f"{life}.0"),)
        return story.sees(*pods, after=after, **REFUSED)[0].split()[0]

    assert {state(after) for after in range(0, 99, 3)} == {"Pending"}
    assert story.job.status.job_restarts > 0
    assert state(100) == "Failed"


def test_a_training_that_began_before_pods_vanished_is_still_the_same():
    story = Story(jobs.collective_manifest(checkpoint={"mountPath": "/data", "claimName": "data"}))
    story.sees(trainer(0), trainer(1))
    story.sees(after=10)  # everybody is gone, and nobody has seen how
    assert (story.job.status.job_restarts, story.job.status.ledger.unseen_restarts) == (1, 1)
    story.sees(trainer(0, "1.0"), after=20, **REFUSED)
    story.sees(trainer(0, "1.0"), after=20 + 2 * SECONDS, **REFUSED)
    assert (story.job.status.job_restarts, story.job.status.ledger.unseen_restarts) == (2, 2)


class Shared:
    """Two jobs in a namespace that has room for one of them, second by second.

    Each pod takes four seconds to start and two to end; trainers train for half a minute.
    """

    def __init__(self, *uids: str, **spec: Any) -> None:
        self.now = 0
        self.jobs = [jobs.job(jobs.manifest(**spec), uid=uid) for uid in uids]
        self.pods: list[dict[str, ObservedPod]] = [{} for _ in uids]
        self.services = [False for _ in uids]
        self.refused = [False for _ in uids]
        self.room = 4

    def used(self) -> int:
        return sum(pod.exit_code is None for pods in self.pods for pod in pods.values())

    def tick(self) -> None:
        self.now += 1
        for pods in self.pods:
            for name, pod in list(pods.items()):
                if pod.deleted_at is not None and pod.deleted_at <= at(self.now):
                    del pods[name]
                elif pod.phase is PodPhase.PENDING and (pod.created_at or T0) <= at(self.now - 4):
                    pods[name] = replace(pod, phase=PodPhase.RUNNING, ready=True, started_at=at(self.now))
            trains = sum(pod.phase is PodPhase.RUNNING for pod in pods.values()) == 4
            done = sum(pod.exit_code == 0 for pod in pods.values() if pod.role is Role.TRAINER) == 2
            for name, pod in list(pods.items()):
                long = pod.started_at is not None and pod.started_at <= at(self.now - 30)
                if pod.exit_code is None and (done if pod.role is Role.PSERVER else trains and long):
                    pods[name] = ended(pod, finished_at=at(self.now))
        for number, job in enumerate(self.jobs):
            self.operate(number, job)

    def operate(self, number: int, job: FleetJob) -> None:
        pods = self.pods[number]
        told = {**REFUSED} if self.refused[number] else {}
        seen = Observed(tuple(pods.values()), self.services[number], **told)
        decided = plan(job, seen, at(self.now), ClusterHosts(job))
        self.jobs[number] = job.with_status(decided.status)
        for action in decided.actions:
            match action:
                case CreateService():
                    self.services[number] = True
                case DeletePod(name):
                    pods[name] = replace(pods[name], deleted_at=at(self.now + 2))
                case CreatePod(manifest=manifest) if self.used() < self.room:
                    name, labels = manifest["metadata"]["name"], manifest["metadata"]["labels"]
                    self.refused[number] = False
                    pods[name] = ObservedPod(
                        name,
                        f"{name}@{self.now}",
                        Role(labels["fleetjob.dev/role"]),
                        int(labels["fleetjob.dev/index"]),
                        Attempt.parse(labels["fleetjob.dev/attempt"]),
                        PodPhase.PENDING,
                        container="fleet",
                        created_at=at(self.now),
                    )
                case CreatePod():
                    self.refused[number] = True
                    return

    def states(self) -> Iterator[JobState | None]:
        return (job.status.state for job in self.jobs)


@pytest.mark.parametrize("startup", ["InOrder", "AnyOrder"])
@pytest.mark.parametrize("number", range(8))
def test_two_jobs_that_share_a_quota_for_one_both_succeed(number: int, startup: str):
    shared = Shared(f"one-{number}", f"other-{number}", startupPolicy={"order": startup})
    while set(shared.states()) != {JobState.SUCCEEDED}:
        shared.tick()
        assert shared.now < 1800, [job.status.to_manifest() for job in shared.jobs]
    assert all(job.status.restarts == job.status.failures == 0 for job in shared.jobs)
