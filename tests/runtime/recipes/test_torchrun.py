"""How long torchrun waits for the other pods of a job: as the job's variables, read by torch itself, say."""

from __future__ import annotations

import pytest
from torch.distributed.run import config_from_args, parse_args

from fleet_operator.api import Role
from fleet_operator.build import ClusterHosts, role_env
from tests.support import jobs

C10D = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0")
OWN = "--rdzv-conf=timeout=5"
AN_HOUR = dict.fromkeys(("timeout", "join_timeout", "read_timeout"), "3600")


@pytest.mark.parametrize(
    ("words", "backend", "expected"),
    [
        pytest.param((), "static", AN_HOUR | {"rank": 1}, id="by-the-jobs-variables"),
        pytest.param(C10D, "c10d", AN_HOUR, id="by-c10d"),
        pytest.param((OWN,), "static", {"timeout": "5", "rank": 1}, id="as-the-command-says"),
    ],
)
def test_torchrun_waits_for_the_other_pods(monkeypatch, words, backend, expected):
    job = jobs.job(jobs.collective_manifest(trainer={"nprocPerNode": 2}))
    for name, value in role_env(job, Role.TRAINER, 1, ClusterHosts(job)).items():
        monkeypatch.setenv(name, value)
    config, _, _ = config_from_args(parse_args([*words, "train.py"]))
    assert (config.rdzv_backend, config.rdzv_configs) == (backend, expected)
