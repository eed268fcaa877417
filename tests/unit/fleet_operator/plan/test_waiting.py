"""Why a job does not run yet: what a person must see in ``kubectl describe``."""

import pytest

from fleet_operator.plan.advice import ADVICE
from fleet_operator.plan.restart import FailReason
from tests.support.plans import Story, pending, pserver, trainer

STARTING = "Starting: digits-trainer-1 is being started; if it stays so, its events say why"


@pytest.mark.parametrize(
    ("pod", "expected"),
    [
        pytest.param(
            pending(trainer(1), "Unschedulable", "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."),
            "Unschedulable: digits-trainer-1 waits, Unschedulable:"
            " 0/3 nodes are available: 3 Insufficient nvidia.com/gpu; free or add nodes, or ask for less",
            id="the-schedulers-own-sentence",
        ),
        pytest.param(
            pending(trainer(1), "ImagePullBackOff", 'Back-off pulling image "traner:1"'),
            'ImagePullBackOff: digits-trainer-1 waits, ImagePullBackOff: Back-off pulling image "traner:1";'
            " correct the image's name, or give imagePullSecrets",
            id="an-image-that-cannot-be-pulled",
        ),
        pytest.param(
            pending(trainer(1), "CreateContainerConfigError"),
            "CreateContainerConfigError: digits-trainer-1 waits, CreateContainerConfigError;"
            " create the Secret or ConfigMap that the template names",
            id="without-a-sentence",
        ),
        pytest.param(
            pending(trainer(1), "ContainerCreating"),
            STARTING,
            id="what-every-pod-passes-through-is-no-trouble",
        ),
        pytest.param(
            pending(trainer(1)),
            STARTING,
            id="nothing-known-yet",
        ),
        pytest.param(
            pending(trainer(1), "sidecar not injected", "by the mesh"),
            "PodWaiting: digits-trainer-1 waits, sidecar not injected: by the mesh",
            id="what-is-no-word-is-no-reason",
        ),
    ],
)
def test_a_pod_that_waits(pod, expected):
    assert Story().sees(pserver(0), pserver(1), trainer(0), pod)[:3] == [
        "Pending pservers 2/2 trainers 1/2 restarts 0 failures 0",
        "PodsCreated True PodsCreated: the pods of all replicas are there",
        f"Running False {expected}",
    ]


def test_a_pod_that_may_wait_for_certificates_names_their_secret():
    story = Story(network={"tls": {"secretName": "digits-tls"}})
    assert story.sees(pserver(0), pserver(1), trainer(0), pending(trainer(1), "ContainerCreating"))[2] == (
        f"Running False {STARTING}, such as a Secret digits-tls (spec.network.tls) that is not there"
    )


def test_what_the_api_server_refuses_for_now_is_told_before_what_waits_for_it():
    quota = 'pods "digits-pserver-1" is forbidden: exceeded quota: few'
    refused = f"CreationRefused: the API server refuses what is missing, for now: {quota};"
    refused += " it is tried again: make room, or ask whoever set the limit or runs the webhook"
    lines = Story().sees(pserver(0), refused=quota)
    assert lines[1:3] == [f"PodsCreated False {refused}", f"Running False {refused}"]
    assert "create digits-pserver-1 0.0" in lines, "it is tried again"


def test_a_server_that_cannot_be_placed_is_told_though_the_trainers_wait_for_it():
    lines = Story().sees(pserver(0), pending(pserver(1), "Unschedulable", "0/1 nodes are available"))
    gate = "trainers are created once all parameter servers are ready: digits-pserver-1 is not yet"
    gate += "; if it stays so, its log and its events say why"
    assert lines[1:3] == [
        f"PodsCreated False WaitingForParameterServers: {gate}",
        (
            "Running False Unschedulable: digits-pserver-1 waits, Unschedulable: 0/1 nodes are available;"
            " free or add nodes, or ask for less"
        ),
    ]


def test_a_server_that_is_not_there_has_no_log_to_look_at():
    gate = "PodsCreated False WaitingForParameterServers: trainers are created once all parameter servers are"
    gate += " ready: digits-pserver-0 (and 1 more) is not created yet"
    assert Story().sees()[1] == gate


def test_every_way_to_fail_says_what_to_do():
    told_with_its_cause = {FailReason.BAD_CONFIGURATION}
    assert set(FailReason) - told_with_its_cause <= ADVICE.keys()
