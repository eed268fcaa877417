"""The key of a life of a job: settled by the first pod, the same for all others, and found in them again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from fleet_operator.build import ClusterHosts
from fleet_operator.plan import plan
from fleet_operator.plan.key import key_of_life
from fleet_operator.plan.model import CreatePod, Observed
from tests.support import jobs
from tests.support.plans import T0, ended, pserver, trainer
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
    actions = created(jobs.job(jobs.manifest(startupPolicy="AnyOrder")))
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
    actions = created(jobs.job(jobs.manifest(startupPolicy="AnyOrder")), *pods)
    assert actions
    assert keys(actions) == {OURS}
    assert not any(action.brings_key for action in actions)


def test_a_job_that_was_started_without_a_key_goes_on_without():
    actions = created(jobs.job(jobs.manifest(startupPolicy="AnyOrder")), pserver(0), pserver(1), trainer(1))
    assert keys(actions) == {None}
    assert not actions[0].brings_key


def test_another_life_has_another_key():
    before, now = pserver(0, "0.0", key=OURS), pserver(0, "1.0", key=NEW)
    assert key_of_life([before], 1, NEW) == (NEW, True)
    assert key_of_life([before, now], 1, "cc" * 32) == (NEW, False)


def test_a_pod_of_somebody_else_settles_no_key():
    foreign = replace(trainer(0, key=OURS), owned=False, name="somebody-elses")
    assert keys(created(jobs.job(jobs.manifest(startupPolicy="AnyOrder")), foreign)) == {NEW}


@pytest.mark.parametrize("name", ["FLEET_JOB_KEY", "FLEET_JOB_KEY_FILE"])
def test_a_template_that_brings_the_key_is_given_none(name: str):
    source = {"secretKeyRef": {"name": "digits", "key": "key"}}
    environment: dict[str, Any] = {"env": [{"name": name, "valueFrom": source}]}
    [first, *_] = actions = created(
        jobs.job(jobs.manifest(template=template(environment), startupPolicy="AnyOrder"))
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
