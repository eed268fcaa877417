"""What went wrong with a replica, in a sentence, and what it says about trying again."""

from datetime import datetime

import pytest

from fleet_operator.build import ClusterHosts
from fleet_operator.plan.decide.failures import Failure, Kind, failure_sentence, find_failures
from fleet_operator.plan.model import Observed, ObservedPod, PodPhase
from fleet_operator.plan.observe.context import context_of
from tests.support import jobs
from tests.support.plans import T0, at, ended, pserver, trainer

LOW = "The node was low on resource: memory."
FULL = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."


def lasted(seconds: float) -> dict[str, datetime]:
    """Return the times of a container that ran for so long."""
    return {"started_at": at(-seconds), "finished_at": at(0)}


def failure_of(*pods: ObservedPod) -> Failure:
    job = jobs.job()
    [failure] = find_failures(context_of(job, Observed(pods, True), T0, ClusterHosts(job)))
    return failure


@pytest.mark.parametrize(
    ("pod", "kind", "sentence"),
    [
        pytest.param(
            ended(trainer(0), 1, message="Traceback:\n  File x\nKeyError: 'epoch'\n"),
            Kind.ORDINARY,
            "digits-trainer-0 failed with exit code 1: KeyError: 'epoch'",
            id="the-last-line-of-the-message-is-the-error",
        ),
        pytest.param(
            ended(
                trainer(0),
                1,
                message="ValueError: Error initializing torch.distributed using env:// rendezvous:"
                " environment variable RANK expected, but not set",
            ),
            Kind.ORDINARY,
            "digits-trainer-0 failed with exit code 1: ValueError: Error initializing torch.distributed using"
            " env:// rendezvous: environment variable RANK expected, but not set; a pod has RANK only in mode"
            " Collective with trainer.nprocPerNode 1: with more write command: [torchrun, SCRIPT] or"
            " [python, -m, fleet.launch, SCRIPT], which give each process its rank",
            id="processes-without-a-launcher",
        ),
        pytest.param(
            ended(trainer(0), 137, reason="OOMKilled"),
            Kind.ORDINARY,
            "digits-trainer-0 ran out of memory (OOMKilled); container fleet needs a higher limit",
            id="out-of-memory",
        ),
        pytest.param(
            ended(trainer(0), 137),
            Kind.ORDINARY,
            "digits-trainer-0 was ended by SIGKILL (exit code 137)",
            id="killed",
        ),
        pytest.param(
            ended(trainer(0), 143),
            Kind.ORDINARY,
            "digits-trainer-0 was ended by SIGTERM (exit code 143)",
            id="a-trainer-that-was-stopped-has-not-done-its-part",
        ),
        pytest.param(
            ended(pserver(0), 143),
            Kind.ORDINARY,
            "digits-pserver-0 was ended by SIGTERM (exit code 143)",
            id="nor-has-a-server-that-nobody-had-asked-to-stop",
        ),
        pytest.param(
            ended(pserver(0), 143, disruption="TerminationByKubelet"),
            Kind.DISRUPTION,
            "digits-pserver-0 was disrupted (TerminationByKubelet)",
            id="stopped-as-its-node-shut-down",
        ),
        pytest.param(
            ended(pserver(0), 143, deleted_at=at(30)),
            Kind.DISRUPTION,
            "digits-pserver-0 was disrupted (it was deleted)",
            id="a-server-that-was-deleted",
        ),
        pytest.param(
            ended(trainer(0), 2, message="PADDLE_TRAINER_ID is 7"),
            Kind.BAD_CONFIGURATION,
            "digits-trainer-0 refused its configuration (exit code 2): PADDLE_TRAINER_ID is 7",
            id="wrong-configuration",
        ),
        pytest.param(
            ended(trainer(0), 2, message="trainer 0 (not joined): no data", **lasted(7200)),
            Kind.BAD_CONFIGURATION,
            "digits-trainer-0 refused its configuration (exit code 2): no data",
            id="wrong-configuration-however-late-if-it-had-not-joined",
        ),
        pytest.param(
            ended(trainer(0), 2, message="trainer 0 (joined): no disk", **lasted(5)),
            Kind.ORDINARY,
            "digits-trainer-0 failed with exit code 2: no disk",
            id="a-mistake-that-was-found-at-work",
        ),
        pytest.param(
            ended(trainer(0), 2, message='{"joined": true, "step": 900}', **lasted(5)),
            Kind.ORDINARY,
            "digits-trainer-0 failed with exit code 2",
            id="a-script-that-ended-itself-so-at-work",
        ),
        pytest.param(
            ended(trainer(0), 2, message="train.py: error: no such option: --lr", **lasted(60)),
            Kind.BAD_CONFIGURATION,
            "digits-trainer-0 refused its configuration (exit code 2): train.py: error: no such option: --lr",
            id="a-script-without-fleet-that-ends-within-a-minute",
        ),
        pytest.param(
            ended(trainer(0), 2, message="grep: no such file", **lasted(61)),
            Kind.ORDINARY,
            "digits-trainer-0 failed with exit code 2: grep: no such file",
            id="a-script-without-fleet-that-ran-for-longer",
        ),
        pytest.param(
            ended(trainer(0), 2, container="download"),
            Kind.ORDINARY,
            "digits-trainer-0 failed with exit code 2 in container download",
            id="another-containers-exit-codes-mean-nothing",
        ),
        pytest.param(
            ended(trainer(0), 90),
            Kind.STATE_LOST,
            "digits-trainer-0 found that a parameter server had lost its state (exit code 90)",
            id="state-lost",
        ),
        pytest.param(
            ended(trainer(0), 91, message="pserver 1 is silent since step 12"),
            Kind.ORDINARY,
            "digits-trainer-0 lost a peer for good (exit code 91): pserver 1 is silent since step 12",
            id="peer-lost",
        ),
        pytest.param(
            ended(trainer(0), 1, disruption="EvictionByEvictionAPI"),
            Kind.DISRUPTION,
            "digits-trainer-0 was disrupted (EvictionByEvictionAPI)",
            id="evicted",
        ),
        pytest.param(
            ended(trainer(0), 143, deleted_at=at(30)),
            Kind.DISRUPTION,
            "digits-trainer-0 was disrupted (it was deleted)",
            id="deleted-by-somebody",
        ),
        pytest.param(
            ended(trainer(0), 137, reason="Evicted", disruption="TerminationByKubelet", message=LOW),
            Kind.DISRUPTION,
            f"digits-trainer-0 was disrupted (TerminationByKubelet): {LOW}",
            id="evicted-for-its-nodes-sake",
        ),
        pytest.param(
            ended(trainer(0), 137, reason="Evicted", message=FULL),
            Kind.ORDINARY,
            f"digits-trainer-0 was evicted by its node for a limit of its own (Evicted): {FULL}",
            id="evicted-for-its-own-limit",
        ),
        pytest.param(
            ended(trainer(0), None, reason="Evicted", message=FULL),
            Kind.ORDINARY,
            f"digits-trainer-0 was evicted by its node for a limit of its own (Evicted): {FULL}",
            id="evicted-for-its-own-limit-before-it-ran",
        ),
        pytest.param(
            ended(trainer(0), 2, reason="Evicted", message=FULL),
            Kind.ORDINARY,
            f"digits-trainer-0 was evicted by its node for a limit of its own (Evicted): {FULL}",
            id="evicted-for-its-own-limit-whatever-its-exit-code",
        ),
        pytest.param(
            ended(trainer(0), None, reason="UnexpectedAdmissionError", message="no healthy devices"),
            Kind.DISRUPTION,
            "digits-trainer-0 was disrupted (UnexpectedAdmissionError): no healthy devices",
            id="refused-by-its-node-for-a-device-the-first-time",
        ),
        pytest.param(
            ended(trainer(0), None, reason="OutOfcpu"),
            Kind.DISRUPTION,
            "digits-trainer-0 was disrupted (OutOfcpu)",
            id="refused-by-its-node",
        ),
        pytest.param(
            ended(trainer(0), None, reason="StartError", message="exec: python3: not found"),
            Kind.ORDINARY,
            "digits-trainer-0 could not run (StartError): exec: python3: not found",
            id="never-ran",
        ),
        pytest.param(
            ended(trainer(0), 128, reason="StartError", message="exec: python3: not found"),
            Kind.ORDINARY,
            "digits-trainer-0 could not run (StartError): exec: python3: not found",
            id="never-ran-though-there-is-a-code",
        ),
        pytest.param(
            ended(trainer(0), 1, phase=PodPhase.RUNNING),
            Kind.ORDINARY,
            "digits-trainer-0 failed with exit code 1",
            id="a-sidecar-that-still-runs-does-not-hide-it",
        ),
    ],
)
def test_find_failures(pod, kind, sentence):
    failure = failure_of(pod)
    assert (failure.kind, failure.record.message) == (kind, sentence)


def test_a_long_message_is_cut_from_its_beginning():
    record = failure_of(ended(trainer(0), 1, message="x" * 5000 + "\nValueError: the end")).record
    message = record.termination_message or ""
    assert message.endswith("ValueError: the end")
    assert len(message) == 1024


def test_the_time_of_a_failure_is_the_containers_end():
    assert failure_of(ended(trainer(0), 1, finished_at=at(-3.5))).record.time == at(-4)


def test_main_container_decides_when_a_sidecar_fails():
    job = jobs.job()
    pods = (ended(trainer(0), 0, phase=PodPhase.FAILED),)
    assert find_failures(context_of(job, Observed(pods, True), T0, ClusterHosts(job))) == ()


@pytest.mark.parametrize(
    ("said", "slots", "advised"),
    [
        ("KeyError: 'LOCAL_RANK'", 2, True),
        ("KeyError: 'RANK'", 2, True),
        ("KeyError: 'rank'", 2, False),
        ("KeyError: 'RANK'", 1, False),
    ],
)
def test_a_script_that_looks_for_its_rank_in_a_pod_of_several_slots_is_told_of_launchers(
    said, slots, advised
):
    job = jobs.job(jobs.collective_manifest(trainer={"nprocPerNode": slots}))
    message = f"Traceback (most recent call last):\n  File x\n{said}\n"
    sentence = failure_sentence(ended(trainer(0), 1, message=message), job)
    assert sentence.startswith(f"digits-trainer-0 failed with exit code 1: {said}")
    what_to_write = "write command: [torchrun, SCRIPT] or [python, -m, fleet.launch, SCRIPT]"
    assert (what_to_write in sentence) is advised
