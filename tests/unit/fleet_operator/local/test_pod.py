"""Which GPUs of this machine each trainer of a run gets."""

from typing import Any

import pytest

from fleet_operator.api import FleetJob, Role
from fleet_operator.local.pod import share_of, too_few, visible_gpus
from tests.support import jobs
from tests.support.pods import template


def job_of(each: int, **devices: Any) -> FleetJob:
    trainer: dict[str, Any] = {"replicas": 2, "nprocPerNode": 1}
    if each:
        trainer["devices"] = {"count": each, **devices}
    return jobs.job(jobs.collective_manifest(trainer=trainer))


def asking(count: object, **spec: Any) -> FleetJob:
    """Return a job whose template asks for so many."""
    asked = template({"resources": {"limits": {"nvidia.com/gpu": count}}})
    return jobs.job(jobs.collective_manifest(template=asked, **spec))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("0", "1", "2")),
        ({"CUDA_VISIBLE_DEVICES": "10, GPU-4f"}, ("10", "GPU-4f")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
    ],
)
def test_all_gpus_are_seen_unless_the_environment_chooses(environ, expected):
    """CUDA counts from 0 what a container has been given, whatever numbers the node has for it."""
    assert visible_gpus(environ, ["nvidia10", "nvidia0", "nvidiactl", "nvidia2", "null"]) == expected


def test_each_trainer_gets_gpus_of_its_own():
    for job in (
        job_of(2),
        asking(2),
        asking("2"),
        asking(8, trainer={"replicas": 2, "devices": {"count": 2}}),
    ):
        shares = [share_of(("0", "1", "4", "5"), job, Role.TRAINER, index) for index in (0, 1)]
        assert shares == [{"CUDA_VISIBLE_DEVICES": "0,1"}, {"CUDA_VISIBLE_DEVICES": "4,5"}]


@pytest.mark.parametrize(
    ("job", "role"),
    [
        pytest.param(job_of(0), Role.TRAINER, id="none-asked-for"),
        pytest.param(job_of(1), Role.PSERVER, id="a-server"),
        pytest.param(job_of(8), Role.TRAINER, id="too-few"),
        pytest.param(job_of(1, resourceName="amd.com/gpu"), Role.TRAINER, id="not-nvidias"),
        pytest.param(asking("many"), Role.TRAINER, id="no-number"),
    ],
)
def test_others_see_what_there_is(job, role):
    assert share_of(("0", "1"), job, role, 0) == {}


def test_too_few_are_told_unless_there_are_none_at_all():
    assert too_few(("0",), job_of(1)) == (
        "the trainers request 2 GPUs, but this machine has 1: each trainer sees all of them"
    )
    assert too_few(("0",), asking(1)) == too_few(("0",), job_of(1))
    assert too_few((), job_of(1)) == too_few(("0", "1"), job_of(1)) == ""
