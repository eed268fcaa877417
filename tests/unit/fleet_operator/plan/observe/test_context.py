"""Who has completed, though nobody saw its end; and the key that the replicas of one life share."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.api import FleetJobStatus, Role
from fleet_operator.build import ClusterHosts
from fleet_operator.plan import plan
from fleet_operator.plan.model import CreatePod, Observed
from fleet_operator.plan.observe.attempts import Ledger, Replica
from fleet_operator.plan.observe.context import key_of_life
from tests.support import jobs
from tests.support.plans import T0, Story, at, ended, pending, pserver, trainer
from tests.support.pods import env_of, main_of, template

if TYPE_CHECKING:
    from typing import Any

    from fleet_operator.api import FleetJob
    from fleet_operator.plan.model import ObservedPod


OURS, NEW = "aa" * 32, "bb" * 32


def created(job: FleetJob, *pods: ObservedPod, new: str | None = NEW) -> list[CreatePod]:
    """Return the pods that the next step creates."""
    decided = plan(job, Observed(pods=pods, service=True, new_key=new), T0, ClusterHosts(job))
    return [action for action in decided.actions if isinstance(action, CreatePod)]


def keys(actions: list[CreatePod]) -> set[str | None]:
    return {env_of(main_of(dict(action.manifest))).get("FLEET_JOB_KEY") for action in actions}


def test_the_first_pod_of_a_life_brings_the_key_that_all_others_get():
    actions = created(jobs.job(jobs.manifest(startupPolicy={"order": "AnyOrder"})))
    assert [action.brings_key for action in actions] == [True, False, False, False]
    assert keys(actions) == {NEW}


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param([pserver(0, key=OURS)], id="an-operator-that-was-killed-between-two-pods"),
        pytest.param(
            [pserver(0, key=OURS), pserver(1, key=OURS), trainer(1, key=OURS)], id="one-that-is-replaced"
        ),
        pytest.param([ended(pserver(0, key=OURS))], id="all-that-there-are-have-ended"),
    ],
)
def test_every_pod_of_a_life_has_the_key_of_those_that_are_there(pods: list[ObservedPod]):
    actions = created(jobs.job(jobs.manifest(startupPolicy={"order": "AnyOrder"})), *pods)
    assert actions
    assert keys(actions) == {OURS}
    assert not any(action.brings_key for action in actions)


def test_another_life_has_another_key():
    before, now = pserver(0, "0.0", key=OURS), pserver(0, "1.0", key=NEW)
    assert key_of_life([before], 1, NEW) == (NEW, True)
    assert key_of_life([before, now], 1, "cc" * 32) == (NEW, False)


def test_a_pod_of_somebody_else_settles_no_key():
    foreign = replace(trainer(0, key=OURS), owned=False, name="somebody-elses")
    assert keys(created(jobs.job(jobs.manifest(startupPolicy={"order": "AnyOrder"})), foreign)) == {NEW}


@pytest.mark.parametrize("name", ["FLEET_JOB_KEY", "FLEET_JOB_KEY_FILE"])
def test_a_template_that_brings_the_key_is_given_none(name: str):
    source = {"secretKeyRef": {"name": "digits", "key": "key"}}
    environment: dict[str, Any] = {"env": [{"name": name, "valueFrom": source}]}
    [first, *_] = actions = created(
        jobs.job(jobs.manifest(template=template(environment), startupPolicy={"order": "AnyOrder"}))
    )
    assert not first.brings_key
    assert {each["name"]: each for each in main_of(dict(first.manifest))["env"]}[name]["valueFrom"] == source
    assert keys(actions) == {None}


def test_no_message_shows_a_key():
    [first, *_] = created(jobs.job())
    assert NEW not in f"{first!r} {trainer(0, key=NEW)!r} {Observed(new_key=NEW)!r}"


def test_only_the_main_container_has_it():
    own = template({}, {"name": "sidecar"}, initContainers=[{"name": "first", "image": "example.com/tool:1"}])
    [first, *_] = created(jobs.job(jobs.manifest(template=own)))
    spec = first.manifest["spec"]
    having = [each["name"] for each in (*spec["initContainers"], *spec["containers"]) if NEW in str(each)]
    assert having == ["fleet"]


ALL = (pserver(0), pserver(1), trainer(0), trainer(1))


def done(pod: ObservedPod, completed: str = "0-1", **fields: Any) -> ObservedPod:
    """Return a pod that ended well, and said who has completed."""
    return ended(pod, 0, message=json.dumps({"joined": True, "completedTrainers": completed}), **fields)


def running(**spec: Any) -> Story:
    """Return a job whose replicas have all been seen to run."""
    story = Story(runPolicy={"backoffLimit": 0}, **spec)
    story.sees(*ALL)
    return story


@pytest.mark.parametrize(
    "left",
    [
        pytest.param((done(pserver(0)), done(trainer(0), "0")), id="a-server-and-a-trainer"),
        pytest.param((done(pserver(0)),), id="one-server"),
        pytest.param((done(trainer(0)),), id="the-last-trainer"),
        pytest.param((ended(pserver(0)), ended(trainer(0))), id="a-server-that-says-nothing"),
        pytest.param((done(pserver(0), "0-699"),), id="a-server-that-says-too-much"),
        pytest.param((done(pserver(0), deleted_at=at(9)),), id="a-server-that-is-being-deleted"),
    ],
)
def test_a_job_that_ended_while_nobody_looked_has_succeeded(left: tuple[ObservedPod, ...]):
    lines = running().sees(*left, after=600)
    assert lines[0].startswith("Succeeded")
    assert "failures 0" in lines[0]
    assert not [line for line in lines if line.startswith("create")]


@pytest.mark.parametrize(
    "left",
    [
        pytest.param((), id="nobody"),
        pytest.param((ended(trainer(0)),), id="a-trainer-that-says-nothing"),
        pytest.param((done(trainer(0), "0"),), id="a-trainer-that-knows-of-itself"),
        pytest.param((ended(trainer(0), message='{"completedTrainers": "0-1"}'),), id="words-of-no-runtime"),
        pytest.param((ended(pserver(0), 1, message=done(pserver(0)).message),), id="a-server-that-failed"),
        pytest.param((ended(pserver(0), deleted_at=at(9)),), id="a-silent-server-that-was-stopped"),
    ],
)
def test_where_nobody_who_knows_is_left_the_status_says_so(left: tuple[ObservedPod, ...]):
    story = Story()
    story.sees(*ALL)
    lines = story.sees(*left, after=600)
    gone = "digits-trainer-1 is gone, and nobody has seen how it ended"
    assert f"tell Warning PodsVanished: {gone}" in lines
    assert lines[0].startswith("Restarting")


def test_the_condition_of_what_nobody_saw_has_a_reason_of_its_own():
    story = running()
    lines = story.sees(pserver(0), pserver(1), trainer(0), after=600)
    gone = "digits-trainer-1 is gone, and nobody has seen how it ended"
    assert lines[0] == "Restarting pservers 2/2 trainers 1/2 restarts 1 failures 0"
    assert f"Restarting True PodsVanished: {gone}; the replica is restarted" in lines
    failure = story.job.status.last_failure
    assert failure is not None
    assert failure.reason == "PodsVanished"


@pytest.mark.parametrize("words", ["", done(trainer(1)).message], ids=["silent", "with-words"])
def test_a_pod_that_was_deleted_as_it_had_ended_counts(words: str):
    story = running()
    gone = ended(trainer(1), 0, message=words, deleted_at=at(5))
    lines = story.sees(*ALL[:3], departed=(gone,), after=5)
    assert "restarts 0" in lines[0]
    assert story.job.status.role(Role.TRAINER).completed_indexes == "1"
    assert story.sees(*ALL[:2], ended(trainer(0)), after=60)[0].startswith("Succeeded")


def test_a_job_whose_trainers_nobody_ever_saw_has_succeeded_if_its_servers_say_so():
    story = Story()
    story.sees(pserver(0), pserver(1))
    assert story.sees(done(pserver(0)), pserver(1), after=600)[0].startswith("Succeeded")


def test_what_was_seen_of_a_deleted_pod_is_not_outdone_by_what_others_say():
    story = Story()
    story.sees(*ALL)
    failed = ended(trainer(1), 1, deleted_at=at(5))
    lines = story.sees(done(pserver(0)), done(pserver(1)), done(trainer(0)), departed=(failed,), after=5)
    assert lines[0].startswith("Restarting")


def test_a_trainer_that_failed_when_it_was_done_has_failed_whatever_servers_say():
    story = Story()
    story.sees(*ALL)
    failed = ended(trainer(1), 1)
    lines = story.sees(done(pserver(0)), done(pserver(1)), done(trainer(0)), failed, after=5)
    assert lines[0].startswith("Restarting")


def test_a_trainer_that_was_started_again_after_a_failure_has_not_completed_before():
    story = Story()
    story.sees(*ALL)
    story.sees(*ALL[:3], ended(trainer(1), 1), after=5)
    lines = story.sees(done(pserver(0)), done(pserver(1)), done(trainer(0)), after=7)
    assert lines[0].startswith("Restarting")
    assert story.job.status.job_restarts == 1


@pytest.mark.parametrize("again", [(), (pending(trainer(1, "0.1")),), (ended(trainer(1, "0.1"), 91),)])
def test_a_trainer_that_was_started_again_unseen_has_completed_before_if_servers_say_so(
    again: tuple[ObservedPod, ...],
):
    story = running()
    story.sees(*ALL[:3], after=5)
    lines = story.sees(done(pserver(0)), done(pserver(1)), done(trainer(0), "0"), *again, after=8)
    assert lines[0].startswith("Succeeded")


def served(server: ObservedPod, after: dict[str, str]) -> ObservedPod:
    """Return a server's pod that ended well, and said after how many restarts each trainer had completed."""
    words = {"joined": True, "completedTrainers": "0-1", "completedAfter": after}
    return ended(server, 0, message=json.dumps(words))


KNEW_THE_FIRST = served(pserver(0), {"0": "0-1"}), served(pserver(1), {"0": "0-1"})


KNEW_THE_SECOND = served(pserver(0), {"0": "0", "1": "1"}), served(pserver(1), {"0": "0", "1": "1"})


def test_a_trainer_that_runs_again_unseen_and_finds_no_servers_has_completed_before():
    story = running()
    story.sees(*ALL[:3], after=5)
    lines = story.sees(*KNEW_THE_FIRST, done(trainer(0), "0"), trainer(1, "0.1"), after=8)
    assert lines[0].startswith("Succeeded")


def test_a_trainer_that_failed_when_it_was_done_and_finds_no_servers_starts_anew_with_all_at_once():
    story = Story()
    story.sees(*ALL)
    story.sees(*ALL[:3], ended(trainer(1), 137), after=5)
    lines = story.sees(*KNEW_THE_FIRST, done(trainer(0), "0"), trainer(1, "0.1"), after=8)
    assert lines[0] == "Restarting pservers 0/2 trainers 0/2 restarts 2 failures 1"
    said = "digits-trainer-1 must be restarted, but parameter servers have completed; all replicas restart"
    assert f"Restarting True JobRestarting: {said}" in lines


@pytest.mark.parametrize("exit_code", [None, 0, 1])
def test_a_trainer_that_servers_have_known_since_it_was_started_again_is_left_to_its_end(
    exit_code: int | None,
):
    story = Story()
    story.sees(*ALL)
    story.sees(*ALL[:3], ended(trainer(1), 137), after=5)
    again = trainer(1, "0.1") if exit_code is None else ended(trainer(1, "0.1"), exit_code)
    lines = story.sees(*KNEW_THE_SECOND, done(trainer(0), "0"), again, after=8)
    assert story.job.status.job_restarts == (exit_code == 1)
    assert lines[0].startswith("Succeeded") == (exit_code == 0)


def test_a_trainer_that_runs_again_is_left_to_its_end():
    story = running()
    story.sees(*ALL[:3], after=5)
    lines = story.sees(done(pserver(0)), done(pserver(1)), done(trainer(0)), trainer(1, "0.1"), after=8)
    assert lines[0].startswith("R")


def lives_told(story: Story) -> set[str]:
    """Return what the pods that a plan creates are told of the life in which their training began."""
    pods = [each.manifest for each in story.plan.actions if isinstance(each, CreatePod)]
    env = (variable for pod in pods for variable in pod["spec"]["containers"][0]["env"])
    return {variable["value"] for variable in env if variable["name"] == "FLEET_LIFE"}


def test_a_training_is_the_same_until_something_else_than_unseen_ends_begins_it_anew():
    checkpoint = {"mountPath": "/data", "claimName": "data"}
    story = Story(jobs.collective_manifest(checkpoint=checkpoint))
    story.sees()
    assert lives_told(story) == {"0"}
    story.sees(trainer(0), trainer(1))
    story.sees(after=5)
    story.sees(after=60)
    assert (story.job.status.job_restarts, lives_told(story)) == (1, {"0"})
    again = trainer(0, "1.0"), trainer(1, "1.0")
    story.sees(*again, after=70)
    story.sees(again[0], ended(again[1], 1), after=80)
    story.sees(after=300)
    assert (story.job.status.job_restarts, lives_told(story)) == (2, {"2"})


def test_a_trainer_beside_servers_is_told_of_its_training_only_where_its_end_before_was_not_seen():
    """One that was seen to fail in saving its result would find the mark, and end well without the result."""
    story = Story(checkpoint={"mountPath": "/data", "claimName": "data"})
    servers, again = (pserver(0), pserver(1)), trainer(1, "0.1")
    story.sees(*servers)
    assert lives_told(story) == set()
    story.sees(*ALL)
    story.sees(*servers, trainer(0), after=5)
    story.sees(*servers, trainer(0), after=30)
    assert lives_told(story) == {"0"}
    story.sees(*servers, trainer(0), again, after=40)
    story.sees(*servers, trainer(0), ended(again, 1), after=50)
    story.sees(*servers, trainer(0), after=120)
    assert [each for each in story.plan.actions if isinstance(each, CreatePod)]
    assert lives_told(story) == set()


def test_a_replica_that_was_seen_to_fail_after_all_had_vanished_has_not_ended_well_before():
    first, ledger = Replica(Role.TRAINER, 0), Ledger.of(FleetJobStatus()).with_job_restart(at(5), unseen=True)
    assert ledger.may_have_ended(first)
    assert not ledger.with_replica_restart(first, at(9)).may_have_ended(first)
    assert ledger.with_replica_restart(first, at(9), unseen=True).may_have_ended(first)


def test_in_an_elastic_job_a_server_speaks_only_for_whom_it_names():
    story = Story(syncMode="Async", trainer={"replicas": 2, "minReplicas": 1, "maxReplicas": 3})
    story.sees(*ALL)
    silent = story.sees(ended(pserver(0)), pserver(1), trainer(0), after=5)
    assert silent[0].startswith("Restarting")
    assert story.sees(done(pserver(0), "0"), pserver(1), done(trainer(0), "0"), after=9)


def test_a_completion_does_not_wait_to_be_written():
    story = running()
    story.sees(*ALL[:3], done(trainer(1), "1"), after=5)
    assert story.plan.urgent


def test_the_last_words_of_a_deleted_trainer_tell_how_far_the_job_has_come():
    story = running()
    last = replace(
        done(trainer(0)), message=json.dumps({"step": 7, "joined": True, "completedTrainers": "0-1"})
    )
    story.sees(departed=(last,), after=5)
    assert story.job.status.progress is not None
    assert story.job.status.progress.step == 7
