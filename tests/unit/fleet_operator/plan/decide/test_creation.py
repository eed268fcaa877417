"""What is created, and when: startupPolicy, and the objects beside the pods."""

from typing import Any

import pytest

from fleet_operator.api import StartupOrder
from fleet_operator.build import build_extras
from fleet_operator.plan.decide.creation import may_start_trainers
from fleet_operator.plan.model import ObjectRef, ObservedObject
from tests.support import jobs
from tests.support.plans import Story, ended, pserver, trainer


@pytest.mark.parametrize(
    ("policy", "gang", "servers", "up", "expected"),
    [
        pytest.param(StartupOrder.IN_ORDER, False, 2, 1, False, id="in-order-waits-for-the-last-server"),
        pytest.param(StartupOrder.IN_ORDER, False, 2, 2, True, id="in-order-continues-when-all-are-ready"),
        pytest.param(StartupOrder.IN_ORDER, False, 0, 0, True, id="without-servers-no-trainer-waits"),
        pytest.param(StartupOrder.ANY_ORDER, False, 2, 0, True, id="any-order-never-waits"),
        pytest.param(StartupOrder.IN_ORDER, True, 2, 0, True, id="a-gang-is-complete-or-gets-no-place"),
    ],
)
def test_may_start_trainers(policy, gang, servers, up, expected):
    assert may_start_trainers(policy, gang=gang, servers=servers, up=up) is expected


def test_a_server_that_runs_but_is_not_ready_holds_the_trainers_back():
    lines = Story().sees(pserver(0), pserver(1, ready=False))
    assert (
        "PodsCreated False WaitingForParameterServers: trainers are created once all parameter servers are"
        in (lines[1])
    )
    assert not any(line.startswith("create") for line in lines)


def test_any_order_creates_everything_at_once():
    lines = Story(startupPolicy={"order": "AnyOrder"}).sees(service=False)
    assert [line for line in lines if line.startswith("create")] == [
        "create Service digits",
        "create digits-pserver-0 0.0",
        "create digits-pserver-1 0.0",
        "create digits-trainer-0 0.0",
        "create digits-trainer-1 0.0",
    ]


def test_trainers_that_run_are_left_alone_when_a_server_stops_being_ready():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    assert story.sees(pserver(0), pserver(1, ready=False), trainer(0), trainer(1), after=1)[0] == (
        "Running pservers 1/2 trainers 2/2 restarts 0 failures 0"
    )


def test_a_trainer_that_starts_again_waits_for_its_servers_too():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    story.sees(pserver(0), pserver(1, ready=False), trainer(0), ended(trainer(1), 1))
    lines = story.sees(pserver(0), pserver(1, ready=False), trainer(0), after=5)
    assert not any("create " in line for line in lines)
    assert "create digits-trainer-1 0.1" in story.sees(pserver(0), pserver(1), trainer(0), after=6)


CLAIM = {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}


CHECKPOINT = {"volumeClaimTemplate": CLAIM, "scope": "Job"}


CLAIM_REF = ObjectRef("v1", "PersistentVolumeClaim", "digits-checkpoint-11111111")


GANG: dict[str, Any] = {"volcano": {}}


BUDGET = {"replicas": 2, "disruptionBudget": {}}


BUDGET_REF = ObjectRef("policy/v1", "PodDisruptionBudget", "digits-pserver")


POLICY = ObjectRef("networking.k8s.io/v1", "NetworkPolicy", "digits")


MADE: dict[str, Any] = {"unserved": frozenset()}
"""What an operator sees that makes everything."""


ALL = (pserver(0), pserver(1), trainer(0), trainer(1))


def group(life: int) -> ObjectRef:
    return ObjectRef("scheduling.volcano.sh/v1beta1", "PodGroup", f"digits-{life}")


def done(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith(("create ", "ensure ", "delete "))]


def having(*refs: ObjectRef, made_from: str | None = None) -> dict[str, Any]:
    return {"objects": dict.fromkeys(refs, ObservedObject(made_from))}


def test_all_of_it_is_there_before_the_pods_that_need_it():
    story = Story(checkpoint=CHECKPOINT, podGroupPolicy=GANG, pserver=BUDGET)
    assert done(story.sees(service=False))[:4] == [
        "create Service digits",
        "ensure PersistentVolumeClaim digits-checkpoint-11111111",
        "ensure PodDisruptionBudget digits-pserver",
        "ensure PodGroup digits-0",
    ]
    assert done(story.sees(*ALL, **having(CLAIM_REF, BUDGET_REF, group(0)))) == []


def test_a_gang_is_created_whole_although_trainers_start_in_order():
    lines = Story(podGroupPolicy=GANG).sees(**having(group(0)))
    assert sum(line.startswith("create digits") for line in lines) == 4


def test_what_somebody_deleted_comes_back():
    story = Story(pserver=BUDGET)
    story.sees(*ALL, **having(BUDGET_REF))
    assert done(story.sees(*ALL, after=5)) == ["ensure PodDisruptionBudget digits-pserver"]


def test_what_an_operator_with_other_settings_made_is_made_anew():
    story = Story(network={"policy": {"type": "Isolated"}})
    lines = done(story.sees(*ALL, **MADE, **having(POLICY, made_from="something else")))
    assert lines == ["delete NetworkPolicy digits", "ensure NetworkPolicy digits"]
    [wanted] = [extra.made_from for extra in build_extras(story.job, 0)]
    assert wanted is not None
    assert done(story.sees(*ALL, after=1, **MADE, **having(POLICY, made_from=wanted))) == []
    leaving = done(story.sees(*ALL, after=1, **MADE, **having(POLICY)))
    assert leaving == [], "one that is on its way out says nothing"


def test_a_claim_is_never_made_anew():
    story = Story(checkpoint=CHECKPOINT)
    assert done(story.sees(*ALL, **having(CLAIM_REF, made_from=""))) == []


def test_a_new_life_is_a_new_gang():
    story = Story(podGroupPolicy=GANG, failurePolicy={"action": "RestartJob"})
    story.sees(*ALL, **having(group(0)))
    lines = story.sees(*ALL[:3], ended(trainer(1), 1), after=5, **having(group(0)))
    assert "delete PodGroup digits-0" in lines
    assert "ensure PodGroup digits-1" in lines


def test_another_number_of_trainers_is_a_new_gang_although_no_pod_has_been_seen():
    bounds = {"minReplicas": 1, "maxReplicas": 4}
    story = Story(jobs.collective_manifest(trainer={"replicas": 2, **bounds}, podGroupPolicy=GANG))
    story.sees(service=False)
    story.scale(3)
    lines = story.sees(after=5, **having(group(0)))
    assert done(lines) == [
        "delete PodGroup digits-0",
        "ensure PodGroup digits-1",
        *(f"create digits-trainer-{index} 1.0" for index in range(3)),
    ]
    assert lines[0] == "Pending trainers 0/3 restarts 0 failures 0", "nothing ran that could start again"
    assert not any(line.startswith("Restarting") for line in lines)


def test_what_holds_pods_together_goes_with_them_and_what_holds_data_stays():
    spec: dict[str, Any] = {"checkpoint": CHECKPOINT, "podGroupPolicy": GANG, "pserver": BUDGET}
    there = having(CLAIM_REF, BUDGET_REF, group(0))
    story = Story(**spec)
    story.sees(*ALL, **there)
    story.sees(pserver(0), pserver(1), ended(trainer(0)), ended(trainer(1)), after=5, **there)
    assert story.job.status.state == "Succeeded"
    lines = story.sees(ended(pserver(0)), ended(pserver(1)), after=6, **there)
    assert done(lines) == ["delete PodDisruptionBudget digits-pserver", "delete PodGroup digits-0"]
    story = Story(**spec, suspend=True)
    assert done(story.sees(**there)) == done(lines)


def test_what_the_operator_is_not_set_up_to_make_is_told_and_no_pod_waits_without_it():
    unserved = frozenset({("scheduling.volcano.sh/v1beta1", "PodGroup")})
    story = Story(podGroupPolicy=GANG)
    lines = story.sees(service=False, unserved=unserved)
    told = (
        "FeatureDisabled: spec.podGroupPolicy needs a PodGroup.scheduling.volcano.sh, which this operator is"
        " not configured to create; enable it under features in the values of the operator's chart"
    )
    assert f"PodsCreated False {told}" in lines
    assert f"tell Warning {told}" in lines
    assert done(lines) == []
    assert "ensure PodGroup digits-0" in story.sees(service=False, after=5)


def test_an_object_of_somebody_else_is_never_adopted():
    story = Story(pserver=BUDGET)
    lines = story.sees(service=False, foreign=("PodDisruptionBudget/digits-pserver",))
    assert done(lines) == []
    assert story.job.status.conditions[0].reason == "NameTaken"


def test_a_policy_that_nobody_asks_for_is_made_before_the_pods():
    lines = done(Story().sees(service=False, **MADE))
    assert lines[:2] == ["create Service digits", "ensure NetworkPolicy digits"]


def test_a_job_does_without_a_policy_that_it_does_not_ask_for():
    foreign = ("NetworkPolicy/digits",)
    for seen in ({}, {**MADE, "foreign": foreign}):
        lines = done(Story().sees(service=False, **seen))
        assert lines == ["create Service digits", *(f"create digits-pserver-{each} 0.0" for each in (0, 1))]
    asking = Story(network={"policy": {"type": "Isolated"}})
    asking.sees(service=False, **MADE, foreign=foreign)
    assert asking.job.status.conditions[0].reason == "NameTaken"
    asking.sees(service=False)
    assert asking.job.status.conditions[0].reason == "FeatureDisabled"


def test_a_claim_that_another_job_of_this_name_has_left_is_never_removed():
    story = Story()
    assert done(story.sees(*ALL, **having(CLAIM_REF))) == []
    story.sees(*ALL[:2], ended(trainer(0)), ended(trainer(1)), after=5, **having(CLAIM_REF))
    assert done(story.sees(after=60, **having(CLAIM_REF))) == []


# What a checkpoint changes.


def test_a_server_with_a_checkpoint_is_restarted_alone():
    story = Story(checkpoint={"claimName": "state"})
    story.sees(*ALL)
    lines = story.sees(ended(pserver(0), 137), pserver(1), trainer(0), trainer(1), after=5)
    assert done(lines) == ["delete digits-pserver-0 0.0"]


def test_a_job_is_resumed_from_its_checkpoint_whole_because_its_new_servers_wait_for_every_trainer():
    story = Story(checkpoint={"claimName": "state"})
    story.sees(pserver(0), pserver(1), ended(trainer(0)), trainer(1))
    story.edit(suspend=True)
    story.sees(pserver(0), pserver(1), ended(trainer(0)), trainer(1), after=5)
    story.sees(after=6)
    story.edit(suspend=False)
    story.sees(after=7)
    lines = story.sees(pserver(0, "1.0"), pserver(1, "1.0"), after=8)
    assert done(lines) == ["create digits-trainer-0 1.0", "create digits-trainer-1 1.0"]


def test_a_collective_job_is_resumed_whole_because_its_processes_only_start_together():
    story = Story(jobs.collective_manifest(checkpoint={"claimName": "state"}))
    story.sees(ended(trainer(0)), trainer(1))
    story.edit(suspend=True)
    story.sees(ended(trainer(0)), trainer(1), after=5)
    story.edit(suspend=False)
    assert len(done(story.sees(after=7))) == 2
