"""Whole plans: what a job's status says and what is done, from its first step to its end."""

from dataclasses import replace

import pytest

from fleet_operator.api import ConditionType, Role
from fleet_operator.api.names import CONTROLLER
from fleet_operator.plan.model import CreatePod
from tests.support import jobs
from tests.support.plans import Story, ended, pending, pserver, trainer
from tests.support.pods import template

WAITING_FOR_BOTH = (
    "WaitingForParameterServers: trainers are created once all parameter servers are ready:"
    " digits-pserver-0 (and 1 more) does not exist yet"
)


ALL_THERE = "PodsCreated True PodsCreated: the pods of all replicas exist"


ALL_RUN = "Running True ReplicasRunning: all 4 replicas run or have completed"


def test_first_creates_the_service_whose_names_the_environments_hold_then_the_servers():
    assert Story().sees(service=False) == [
        "Pending pservers 0/2 trainers 0/2 restarts 0 failures 0",
        f"PodsCreated False {WAITING_FOR_BOTH}",
        f"Running False {WAITING_FOR_BOTH}",
        "create Service digits",
        "create digits-pserver-0 0.0",
        "create digits-pserver-1 0.0",
    ]


def test_a_variable_that_is_set_in_vain_is_told_once():
    document = jobs.manifest()
    [container] = document["spec"]["template"]["spec"]["containers"]
    container["env"] = [{"name": "PADDLE_TRAINER_ID", "value": "3"}]
    story = Story(document)
    told = "tell Warning VariablesOverwritten: spec.template.spec.containers[0].env[0] (PADDLE_TRAINER_ID): "
    assert [line.startswith(told) for line in story.sees() if line.startswith("tell")] == [True]
    assert not [line for line in story.sees(pserver(0)) if line.startswith("tell")]


def test_slots_without_a_launcher_are_told_once():
    story = Story(jobs.collective_manifest(trainer={"nprocPerNode": 2}))
    [told] = [line for line in story.sees() if line.startswith("tell")]
    assert told.startswith("tell Warning NoLauncher: spec.template.spec.containers[0].command: python starts")
    assert not [line for line in story.sees(trainer(0)) if line.startswith("tell Warning")]


def test_a_launcher_of_one_machine_in_several_pods_is_told_once():
    story = Story(
        jobs.collective_manifest(template=template({"command": ["torchrun", "--standalone", "x.py"]}))
    )
    [told] = [line for line in story.sees() if line.startswith("tell")]
    assert told.startswith(
        "tell Warning LaunchedAlone: spec.template.spec.containers[0].command: --standalone"
    )
    assert not [line for line in story.sees(trainer(0)) if line.startswith("tell Warning")]


def test_creates_the_trainers_once_all_servers_are_ready():
    assert Story().sees(pserver(0), pserver(1)) == [
        "Pending pservers 2/2 trainers 0/2 restarts 0 failures 0",
        "PodsCreated False Creating: pods are being created",
        "Running False Creating: pods are being created",
        "create digits-trainer-0 0.0",
        "create digits-trainer-1 0.0",
    ]


def test_a_collective_job_creates_all_of_its_pods_at_once():
    assert Story(jobs.collective_manifest()).sees(service=False) == [
        "Pending trainers 0/2 restarts 0 failures 0",
        "PodsCreated False Creating: pods are being created",
        "Running False Creating: pods are being created",
        "create Service digits",
        "create digits-trainer-0 0.0",
        "create digits-trainer-1 0.0",
    ]


def test_runs_when_every_replica_does():
    assert Story().sees(pserver(0), pserver(1), trainer(0), trainer(1)) == [
        "Running pservers 2/2 trainers 2/2 restarts 0 failures 0",
        ALL_THERE,
        ALL_RUN,
        "tell Normal Started: all 4 replicas run or have completed",
    ]


def test_creates_a_service_that_was_deleted_again():
    lines = Story().sees(pserver(0), pserver(1), trainer(0), trainer(1), service=False)
    assert "create Service digits" in lines


def test_an_operator_that_starts_anew_goes_on_where_the_status_is():
    """A crash after the status and before the actions: the next plan asks for the same actions."""
    story = Story()
    before = story.sees(pserver(0), pserver(1), trainer(0), ended(trainer(1), 1))
    after = story.sees(pserver(0), pserver(1), trainer(0), ended(trainer(1), 1))
    assert [line for line in before if line.startswith("delete")] == ["delete digits-trainer-1 0.0"]
    assert [line for line in after if line.startswith("delete")] == ["delete digits-trainer-1 0.0"]
    assert story.job.status.restarts == 1


@pytest.mark.parametrize(
    "attempts",
    [
        pytest.param(("0.0", "0.0", "0.0", "0.1"), id="after-a-replica-was-restarted"),
        pytest.param(("1.0", "1.0", "1.0", "1.0"), id="after-the-job-was-restarted"),
        pytest.param(("2.0", "2.0", "2.1", "2.3"), id="after-both"),
    ],
)
def test_a_status_that_was_set_back_costs_no_pod(attempts: tuple[str, ...]):
    roles = zip((pserver, pserver, trainer, trainer), (0, 1, 0, 1), attempts, strict=True)
    pods = [role(index, attempt) for role, index, attempt in roles]
    assert Story().sees(*pods)[1:] == [
        ALL_THERE,
        ALL_RUN,
        "tell Normal Started: all 4 replicas run or have completed",
    ]


def test_what_a_status_that_was_set_back_calls_completed_was_so_in_an_older_life():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), ended(trainer(1)))
    pods = (pserver(0, "1.0"), pserver(1, "1.0"), ended(trainer(0, "1.0")), trainer(1, "1.0"))
    lines = story.sees(*pods, after=5)
    assert lines[0] == "Running pservers 2/2 trainers 2/2 restarts 0 failures 0"
    assert story.job.status.role(Role.TRAINER).completed_indexes == "0"
    story.sees(*pods[:3], ended(trainer(1, "1.0")), after=6)
    assert story.job.status.state == "Succeeded"


def test_a_replica_whose_restarts_the_status_forgot_is_restarted_under_a_later_attempt():
    story = Story()
    pods = (pserver(0), pserver(1), trainer(0))
    story.sees(*pods, ended(trainer(1, "0.2"), 1))
    assert "create digits-trainer-1 0.3" in story.sees(*pods, after=60)


DAY = 86400


def test_a_clock_that_is_set_back_prolongs_no_pause():
    story = Story()
    pods = (pserver(0), pserver(1), trainer(0))
    story.sees(*pods, ended(trainer(1), 1), after=DAY)
    assert not [line for line in story.sees(*pods, after=DAY) if line.startswith("create")]
    assert "create digits-trainer-1 0.1" in story.sees(*pods, after=0)


def test_a_clock_that_is_set_back_prolongs_no_servers_life():
    story = Story()
    pods = (pserver(0), pserver(1), ended(trainer(0)), ended(trainer(1)))
    assert not [line for line in story.sees(*pods, after=DAY) if line.startswith("delete")]
    assert "delete digits-pserver-0 0.0" in story.sees(*pods, after=0)


def test_succeeds_when_all_trainers_have_completed_and_leaves_the_servers_time_to_exit():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    done = (ended(trainer(0)), ended(trainer(1)))
    assert story.sees(pserver(0), pserver(1), *done, after=60) == [
        "Succeeded pservers 2/2 trainers 2/2 restarts 0 failures 0",
        ALL_THERE,
        "Running False TrainersCompleted: all 2 trainers have completed",
        "Complete True TrainersCompleted: all 2 trainers have completed",
        "tell Normal Succeeded: all 2 trainers have completed",
        "look again after 30 s",
    ]
    assert story.sees(ended(pserver(0)), ended(pserver(1)), *done, after=61) == [
        "Succeeded pservers 2/2 trainers 2/2 restarts 0 failures 0",
        ALL_THERE,
        "Running False TrainersCompleted: all 2 trainers have completed",
        "Complete True TrainersCompleted: all 2 trainers have completed",
    ]


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param((pserver(0), ended(pserver(1), 1), ended(trainer(0)), trainer(1)), id="a-server-fails"),
        pytest.param((pserver(0), pserver(1), ended(trainer(0)), ended(trainer(1), 1)), id="a-trainer-fails"),
        pytest.param((), id="everything-is-gone"),
    ],
)
def test_nothing_leads_out_of_success(pods):
    story = Story(successPolicy={"type": "RankZero"})
    story.sees(pserver(0), pserver(1), ended(trainer(0)), trainer(1))
    told = story.job.status
    story.sees(*pods, after=10)
    assert story.job.status.state == "Succeeded"
    assert story.job.status.conditions == told.conditions
    assert story.job.status.completion_time == told.completion_time
    assert not any("create" in line for line in story.sees(*pods, after=100))


def test_a_trainer_that_has_completed_is_never_created_again():
    story = Story()
    story.sees(pserver(0), pserver(1), ended(trainer(0)), trainer(1))
    assert story.sees(pserver(0), pserver(1), trainer(1), after=1) == [
        "Running pservers 2/2 trainers 2/2 restarts 0 failures 0",
        ALL_THERE,
        ALL_RUN,
    ]
    assert story.job.status.role(Role.TRAINER).completed_indexes == "0"


def test_a_job_that_is_being_deleted_is_left_alone():
    deleted = jobs.job(deletionTimestamp="2026-11-21T10:00:00Z")
    story = Story()
    story.job = deleted
    assert story.sees(pserver(0), ended(trainer(0), 1), service=False) == [
        "None trainers None restarts 0 failures 0"
    ]


def test_a_pod_that_the_api_server_refuses_fails_the_job_with_its_sentence():
    sentence = 'Pod "digits-pserver-0" is invalid: spec.containers[0].resources: must be less than the limit'
    then = "; correct the template and create the job again"
    assert Story().sees(rejected=sentence) == [
        "Failed pservers 0/2 trainers 0/2 restarts 0 failures 0",
        f"PodsCreated False PodRejected: the API server refuses an object of this job: {sentence}",
        f"Running False PodRejected: the API server refuses an object of this job: {sentence}",
        f"Failed True PodRejected: the API server refuses an object of this job: {sentence}{then}",
        f"tell Warning Failed: the API server refuses an object of this job: {sentence}{then}",
    ]


def test_a_job_whose_trainers_have_completed_succeeds_though_a_server_can_no_longer_be_created():
    story = Story()
    story.sees(ended(trainer(0)), ended(trainer(1)), rejected="a server of this size is not allowed")
    assert story.job.status.state == "Succeeded"


@pytest.mark.parametrize(
    "observed",
    [
        pytest.param({"pods": (trainer(0, owned=False),)}, id="a-pod-of-somebody-else"),
        pytest.param({"foreign": ("Pod/digits-trainer-0",)}, id="a-pod-without-our-labels"),
    ],
)
def test_an_object_of_somebody_else_is_never_adopted_and_named_once(observed):
    taken = (
        "NameTaken: Pod/digits-trainer-0 has a name that this job needs, but another owner;"
        " delete it, or create the job under another name"
    )
    pods, foreign = observed.get("pods", ()), observed.get("foreign", ())
    story = Story()
    assert story.sees(*pods, service=False, foreign=foreign) == [
        "Pending pservers 0/2 trainers 0/2 restarts 0 failures 0",
        f"PodsCreated False {taken}",
        f"Running False {taken}",
        f"tell Warning {taken}",
    ]
    assert story.sees(*pods, service=False, foreign=foreign, after=5)[3:] == []


def test_an_object_that_only_has_our_labels_is_in_nobodys_way():
    copied = replace(trainer(0, owned=False), name="digits-trainer-0-debug")
    story = Story()
    assert "create digits-pserver-0 0.0" in story.sees(copied, service=False)
    story.sees(copied, pserver(0), pserver(1), trainer(0), trainer(1))
    assert story.job.status.state == "Running"


def test_what_a_deleted_job_of_the_same_name_left_is_waited_for_without_alarm():
    pod = trainer(0, owned=False)
    waiting = (
        "PredecessorTerminating: Pod/digits-trainer-0 (and 1 more) of a deleted job with this name still"
        " exists, and is being removed"
    )
    story = Story()
    left_over = ("Service/digits", "Pod/digits-trainer-0")
    assert story.sees(pod, service=False, left_over=left_over) == [
        "Pending pservers 0/2 trainers 0/2 restarts 0 failures 0",
        f"PodsCreated False {waiting}",
        f"Running False {waiting}",
    ]
    assert "create Service digits" in story.sees(service=False)


def test_the_status_tells_which_generation_was_looked_at():
    story = Story()
    story.sees()
    story.edit(backoff_limit=3)
    story.sees()
    assert story.job.status.observed_generation == 2
    assert {each.observed_generation for each in story.job.status.conditions} == {2}


def test_only_counts_can_wait():
    story = Story()
    story.sees(pserver(0), pserver(1), pending(trainer(0)), pending(trainer(1)))
    assert story.plan.urgent
    story.sees(pserver(0), pserver(1), trainer(0), pending(trainer(1)), after=1)
    assert not story.plan.urgent
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1), after=2)
    assert story.plan.urgent


def test_that_pods_are_on_their_way_can_wait():
    story = Story(startupPolicy={"order": "AnyOrder"})
    story.sees()
    assert story.plan.urgent
    everything = pending(pserver(0)), pending(pserver(1)), pending(trainer(0)), pending(trainer(1))
    story.sees(*everything, after=1)
    assert story.job.status.is_true(ConditionType.PODS_CREATED)
    assert not story.plan.urgent
    story.sees(*everything[:3], pending(trainer(1), reason="ErrImagePull"), after=2)
    assert story.plan.urgent


def test_the_time_of_a_condition_is_that_of_its_last_change():
    story = Story()
    story.sees(pserver(0), pserver(1), after=0)
    story.sees(pserver(0), pserver(1), pending(trainer(0)), pending(trainer(1)), after=10)
    times = {each.type: each.last_transition_time.second for each in story.job.status.conditions}
    assert times == {"PodsCreated": 10, "Running": 0}


FOREIGN = "kueue.x-k8s.io/multikueue"


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param((), id="nothing-there"),
        pytest.param((pserver(0), ended(trainer(0), 1)), id="a-failure"),
        pytest.param((ended(trainer(0)), ended(trainer(1))), id="a-success"),
    ],
)
def test_nothing_is_done_and_no_status_written(pods):
    story = Story(managedBy=FOREIGN, suspend=True, runPolicy={"activeDeadlineSeconds": 1})
    before = story.job.status
    assert story.sees(*pods, service=False, after=60)[1:] == []
    assert story.job.status == before


def test_the_operators_own_name_is_as_good_as_none():
    story = Story(managedBy=CONTROLLER)
    assert "create Service digits" in story.sees(service=False)


HELD = "spec.suspend is true"


def test_a_job_created_suspended_creates_nothing():
    story = Story(suspend=True)
    assert story.sees(service=False) == [
        "Suspended pservers 0/2 trainers 0/2 restarts 0 failures 0",
        f"PodsCreated False Suspended: {HELD}",
        f"Running False Suspended: {HELD}",
        f"Suspended True Suspended: {HELD}: no pod of this job runs until it is false",
        f"tell Normal Suspended: {HELD}: no pod of this job runs until it is false",
    ]
    assert story.job.status.start_time is None


def test_a_suspended_job_loses_its_pods_and_begins_anew_when_resumed():
    story = Story()
    story.sees(pserver(0), pserver(1), ended(trainer(0)), trainer(1))
    story.edit(suspend=True)
    lines = story.sees(pserver(0), pserver(1), ended(trainer(0)), trainer(1), after=5)
    assert [line for line in lines if line.startswith("delete")] == [
        "delete digits-pserver-0 0.0",
        "delete digits-pserver-1 0.0",
        "delete digits-trainer-0 0.0",
        "delete digits-trainer-1 0.0",
    ]
    story.sees(after=10)
    story.edit(suspend=False)
    lines = story.sees(after=20)
    assert lines[0] == "Pending pservers 0/2 trainers 0/2 restarts 0 failures 0"
    assert lines[3:] == [
        "Suspended False Resumed: spec.suspend is false",
        "create digits-pserver-0 1.0",
        "create digits-pserver-1 1.0",
        "tell Normal Resumed: spec.suspend is false",
    ]


def queues(story: Story) -> set[str | None]:
    """Return the queues of the pods that the last plan creates."""
    made = [
        action.manifest["metadata"]["labels"]
        for action in story.plan.actions
        if isinstance(action, CreatePod)
    ]
    assert made
    return {labels.get("kueue.x-k8s.io/queue-name") for labels in made}


def test_the_queue_of_a_jobs_label_is_that_of_its_start_until_it_is_suspended():
    story = Story()
    story.label(**{"kueue.x-k8s.io/queue-name": "research"})
    assert sum(line.startswith("create digits-") for line in story.sees()) == 4, "all at once"
    assert queues(story) == {"research"}
    story.label(**{"kueue.x-k8s.io/queue-name": "night"})
    story.sees(pserver(0), pserver(1), trainer(0), ended(trainer(1), 1))
    story.sees(after=5)
    assert queues(story) == {"research"}, "the other replicas' queue, although another is asked for"
    story.edit(suspend=True)
    story.sees(after=6)
    story.edit(suspend=False)
    story.sees(after=7)
    assert queues(story) == {"night"}


def test_a_label_that_a_running_job_gets_holds_none_of_its_pods_back():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    story.label(**{"kueue.x-k8s.io/queue-name": "night"})
    story.sees(pserver(0), pserver(1), trainer(0), ended(trainer(1), 1), after=1)
    story.sees(pserver(0), pserver(1), trainer(0), after=5)
    assert queues(story) == {None}


def test_a_job_that_has_finished_cannot_be_suspended():
    story = Story()
    done = (ended(pserver(0)), ended(pserver(1)), ended(trainer(0)), ended(trainer(1)))
    story.sees(*done)
    story.edit(suspend=True)
    story.sees(*done, after=5)
    assert story.job.status.state == "Succeeded"


def test_suspending_while_restarting_ends_the_restart():
    story = Story()
    story.sees(pserver(0), pserver(1), trainer(0), ended(trainer(1), 1))
    story.edit(suspend=True)
    assert "Restarting False Suspended: spec.suspend is true" in story.sees(after=1)
