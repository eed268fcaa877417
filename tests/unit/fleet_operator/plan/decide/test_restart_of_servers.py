"""Failure policy: what becomes of a job whose servers end, or whose trainers find that they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.plans import Story, at, ended, pending, pserver, trainer

if TYPE_CHECKING:
    from fleet_operator.plan.model import ObservedPod

ELASTIC: dict[str, Any] = {
    "syncMode": "Async",
    "trainer": {"replicas": 2, "minReplicas": 1, "maxReplicas": 4},
}
SERVERS = (pserver(0), pserver(1))
STOPPED = tuple(ended(server, finished_at=at(5)) for server in SERVERS)


@pytest.mark.parametrize("spec", [pytest.param({}, id="fixed"), pytest.param(ELASTIC, id="elastic")])
@pytest.mark.parametrize("crashed", [0, 1])
@pytest.mark.parametrize("first", ["the-servers", "the-trainer"])
def test_a_trainer_that_fails_when_all_are_done_is_one_failure_and_starts_the_job_anew(spec, crashed, first):
    story = Story(runPolicy={"backoffLimit": 1}, **spec)
    story.sees(*SERVERS, trainer(0), trainer(1))
    done, failed = ended(trainer(1 - crashed)), ended(trainer(crashed), 1)
    if first == "the-servers":
        story.sees(*STOPPED, done, trainer(crashed), after=5)
        lines = story.sees(*STOPPED, done, failed, after=5.5)
    else:
        story.sees(*SERVERS, done, failed, after=5)
        lines = story.sees(*STOPPED, done, after=5.5)
    assert lines[0].startswith("Restarting pservers 0/2 trainers 0/2")
    assert lines[0].endswith("failures 1")
    assert any(line.startswith("Restarting True JobRestarting: ") for line in lines)
    status = story.job.status.to_manifest()
    assert status["lastFailure"]["message"] == f"digits-trainer-{crashed} failed with exit code 1"
    assert status["jobRestarts"] == 1
    lines = story.sees(after=8)
    assert next(line for line in lines if "create " in line).startswith("create digits-pserver-0 1.")


def came_again(again: ObservedPod) -> tuple[Story, list[str]]:
    """Tell of a trainer that fails when all are done and is there again when the servers are seen to end."""
    story = Story()
    story.sees(*SERVERS, trainer(0), trainer(1))
    story.sees(*SERVERS, ended(trainer(0)), ended(trainer(1), 1), after=5)
    story.sees(*SERVERS, ended(trainer(0)), pending(trainer(1, "0.1")), after=7)
    return story, story.sees(*STOPPED, ended(trainer(0)), again, after=9)


@pytest.mark.parametrize(
    "again",
    [
        pytest.param(pending(trainer(1, "0.1")), id="still-starting"),
        pytest.param(ended(trainer(1, "0.1"), 91), id="found-nobody"),
    ],
)
def test_a_trainer_that_comes_again_when_all_are_done_starts_the_job_anew_uncounted(again):
    story, lines = came_again(again)
    reason = "digits-trainer-1 must be restarted, but parameter servers have completed; all replicas restart"
    assert f"Restarting True JobRestarting: {reason}" in lines
    assert [line for line in lines if line.startswith("tell ")] == [f"tell Warning JobRestarting: {reason}"]
    status = story.job.status.to_manifest()
    assert (status["jobRestarts"], status["failures"], status["lastFailure"]["exitCode"]) == (1, 1, 1)


@pytest.mark.parametrize(("exit_code", "state"), [(0, "Succeeded"), (91, "Restarting"), (1, "Restarting")])
def test_a_trainer_that_came_again_and_runs_may_have_trained_and_is_awaited(exit_code, state):
    story, lines = came_again(trainer(1, "0.1"))
    assert lines[0] == "Running pservers 2/2 trainers 2/2 restarts 1 failures 1"
    story.sees(*STOPPED, ended(trainer(0)), ended(trainer(1, "0.1"), exit_code), after=20)
    assert (story.job.status.state, story.job.status.failures) == (state, 2 if exit_code == 1 else 1)


def test_a_trainer_that_an_elastic_jobs_servers_have_given_up_is_not_waited_for():
    story = Story(**ELASTIC)
    story.sees(*SERVERS, trainer(0), trainer(1))
    story.sees(*SERVERS, trainer(0), ended(trainer(1), 1), after=5)
    pods = (ended(trainer(0)), pending(trainer(1, "0.1"), "Unschedulable"))
    story.sees(*SERVERS, *pods, after=10)
    story.sees(*(ended(server, finished_at=at(190)) for server in SERVERS), *pods, after=191)
    assert (story.job.status.state, story.job.status.job_restarts) == ("Succeeded", 0)


def test_a_server_that_ends_before_the_trainers_began_has_failed():
    story = Story()
    lines = story.sees(ended(pserver(0)), pserver(1), pending(trainer(0)), pending(trainer(1)))
    assert lines[0] == "Restarting pservers 1/2 trainers 0/2 restarts 1 failures 1"
    sentence = (
        "digits-pserver-0 ended with exit code 0 before every trainer had started;"
        " a parameter server must serve until all trainers have completed"
    )
    assert f"tell Warning ReplicaFailed: {sentence}" in lines


@pytest.mark.parametrize(
    ("asked", "state", "failures"), [({}, "Failed", 1), ({"deleted_at": at(30)}, "Restarting", 0)]
)
def test_a_server_that_ends_by_sigterm_has_failed_unless_somebody_stopped_it(asked, state, failures):
    story = Story(runPolicy={"backoffLimit": 0})
    stopped = ended(pserver(1), 143, **asked)
    lines = story.sees(pserver(0), stopped, pending(trainer(0)), pending(trainer(1)))
    assert lines[0].split()[0] == state
    assert lines[0].endswith(f"failures {failures}")


@pytest.mark.parametrize(
    ("end", "failures"),
    [
        pytest.param({"exit_code": 137}, 1, id="killed"),
        pytest.param({"exit_code": 137, "disruption": "EvictionByEvictionAPI"}, 0, id="evicted"),
    ],
)
def test_a_server_lost_while_trainers_work_restarts_the_whole_job_and_counts_at_most_once(end, failures):
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    lines = story.sees(ended(pserver(0), **end), pserver(1), trainer(0), trainer(1), after=5)
    assert lines[0] == f"Restarting pservers 0/2 trainers 0/2 restarts 1 failures {failures}"
    why = "its parameters are lost, so all replicas restart"
    assert any(line.startswith("Restarting True JobRestarting") and line.endswith(why) for line in lines)
    late = (ended(trainer(0), 90), ended(trainer(1), 91))
    assert story.sees(pserver(1), *late, after=5.5)[0].endswith(f"restarts 1 failures {failures}")


def test_a_trainer_that_met_the_servers_next_life_does_not_count_it_again():
    story = Story()
    story.sees(ended(pserver(0), 1), pserver(1), pending(trainer(0)), pending(trainer(1)))
    assert story.job.status.failures == 1
    next_life = pserver(0, "0.1", created_at=at(60))
    old = [trainer(index, created_at=at(0)) for index in (0, 1)]
    story.sees(next_life, pserver(1), *old, after=61)
    story.sees(next_life, pserver(1), ended(old[0], 90), old[1], after=62)
    assert (story.job.status.job_restarts, story.job.status.failures) == (1, 1)


def test_lost_state_without_a_server_that_was_replaced_counts():
    story = Story()
    story.sees(pserver(0, created_at=at(0)), pserver(1), ended(trainer(0, created_at=at(1)), 90), trainer(1))
    assert (story.job.status.job_restarts, story.job.status.failures) == (1, 1)


def test_a_server_replaced_in_an_earlier_life_of_the_job_excuses_nothing_in_this_one():
    story = Story()
    story.sees(ended(pserver(0), 1), pserver(1), pending(trainer(0)), pending(trainer(1)))
    story.edit(suspend=True)
    story.sees(after=60)
    story.edit(suspend=False)
    # Created out of order, so that the server is the younger one though it is the first of its life.
    servers = (pserver(0, "1.1", created_at=at(103)), pserver(1, "1.0", created_at=at(100)))
    trainers = [trainer(index, "1.0", created_at=at(101)) for index in (0, 1)]
    story.sees(*servers, *trainers, after=110)
    story.sees(*servers, ended(trainers[0], 90), trainers[1], after=120)
    assert story.job.status.failures == 2
