"""Back-off: how long a restart waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.api import Role
from fleet_operator.plan.decide.failure_policy import backoff
from fleet_operator.plan.observe.attempts import Ledger, Replica
from tests.support import jobs
from tests.support.plans import Story, at, ended, pserver, trainer

if TYPE_CHECKING:
    from fleet_operator.plan.model import ObservedPod


@pytest.mark.parametrize(
    ("restarts", "seconds"),
    [(1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (100_000, 60)],
    ids=lambda value: f"{value}",
)
def test_backoff_doubles_up_to_a_minute(restarts, seconds):
    assert backoff(restarts).total_seconds() == seconds


def test_each_restart_of_a_replica_waits_longer():
    story, others = Story(), (pserver(0), pserver(1), trainer(0))
    for restart, pause in enumerate((1, 2, 4, 8)):
        moment = 100 * restart
        story.sees(*others, ended(trainer(1, f"0.{restart}"), 1), after=moment)
        assert story.sees(*others, after=moment)[-1] == f"look again after {pause} s"
        assert f"create digits-trainer-1 0.{restart + 1}" in story.sees(*others, after=moment + pause)


def pause_after(story: Story, after: float, exit_code: int | None = 1, **end: Any) -> float:
    """Let trainer 1 end so, and return for how many seconds its next life, or all next lives, are put off."""
    ledger = Ledger.of(story.job.status)

    def present(role: Role, index: int) -> ObservedPod:
        build = pserver if role is Role.PSERVER else trainer
        return build(index, str(ledger.attempt(Replica(role, index))))

    last = Replica(Role.TRAINER, 1)
    others = (
        present(role, index) for role in story.job.roles for index in (0, 1) if Replica(role, index) != last
    )
    story.sees(*others, ended(present(last.role, last.index), exit_code, **end), after=after)
    not_before = Ledger.of(story.job.status).not_before_of(last)
    assert not_before is not None
    return (not_before - at(after)).total_seconds()


PREEMPTED: dict[str, Any] = {"exit_code": 143, "disruption": "PreemptionByScheduler"}
ALONE: dict[str, Any] = jobs.manifest(runPolicy={"backoffLimit": 100})
TOGETHER: dict[str, Any] = jobs.collective_manifest(runPolicy={"backoffLimit": 100})
either = pytest.mark.parametrize(
    "document", [pytest.param(ALONE, id="one-replica"), pytest.param(TOGETHER, id="the-whole-job")]
)


@either
def test_disruptions_neither_prolong_the_pause_nor_wait_for_long(document):
    story = Story(document)
    assert [pause_after(story, 100 * each, **PREEMPTED) for each in range(8)] == [1] * 8
    assert [pause_after(story, 1000 + 100 * each) for each in range(3)] == [1, 2, 4]
    assert pause_after(story, 1300, **PREEMPTED) == 1
    assert pause_after(story, 1400) == 8, "a disruption in between is no healthy time"


@either
@pytest.mark.parametrize(("ran", "pause"), [(599, 8), (600, 1)])
def test_ten_minutes_without_a_failure_make_the_pause_short_again(document, ran, pause):
    story = Story(document)
    assert [pause_after(story, 100 * each) for each in range(3)] == [1, 2, 4]
    lasted: dict[str, Any] = {"started_at": at(300), "finished_at": at(300 + ran)}
    assert pause_after(story, 300 + ran, **lasted) == pause
    assert pause_after(story, 1000 + ran) == 2 * pause


@either
def test_a_healthy_time_that_a_disruption_ends_counts_as_well(document):
    story = Story(document)
    assert [pause_after(story, 100 * each) for each in range(3)] == [1, 2, 4]
    lasted: dict[str, Any] = {"started_at": at(300), "finished_at": at(1000)}
    assert pause_after(story, 1000, **PREEMPTED, **lasted) == 1
    assert pause_after(story, 1100) == 1


def test_a_failure_that_is_ignored_prolongs_the_pause_though_it_does_not_count():
    rules = [{"name": "codes-ignore", "onExitCodes": {"operator": "In", "values": [75]}, "action": "Ignore"}]
    story = Story(failurePolicy={"rules": rules})
    assert [pause_after(story, 100 * each, 75) for each in range(3)] == [1, 2, 4]
    assert story.job.status.failures == 0


@pytest.mark.parametrize("reason", ["OutOfcpu", "UnexpectedAdmissionError"])
def test_a_pod_that_its_node_refuses_is_not_made_again_every_second(reason):
    story = Story(ALONE)
    assert [pause_after(story, 100 * each, None, reason=reason) for each in range(3)] == [1, 2, 4]


def test_a_replica_that_gives_up_an_evicted_peer_is_back_at_once():
    story, servers = Story(ALONE), (pserver(0), pserver(1))
    for life in range(3):
        evicted = trainer(0, f"0.{life}", disruption="EvictionByEvictionAPI", deleted_at=at(30))
        story.sees(*servers, evicted, ended(trainer(1, f"0.{life}"), 91), after=100 * life)
        ledger = Ledger.of(story.job.status)
        assert ledger.not_before_of(Replica(Role.TRAINER, 1)) == at(100 * life + 1)
        if life < 2:
            story.sees(*servers, trainer(1, f"0.{life + 1}"), departed=(evicted,), after=100 * life + 40)
