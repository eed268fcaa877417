"""A job's `train_from_dataset` has the result of one process that trains on the batches of all trainers."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import fluid_datasets
from tests.support.collective import ForkedTrainer, environments
from tests.support.processes import free_ports
from tests.support.replicas import Replica, job

SCRIPT = Path(fluid_datasets.__file__)
ROOT = str(SCRIPT.parents[2])
STEPS = fluid_datasets.EPOCHS * fluid_datasets.FILES * fluid_datasets.LINES // fluid_datasets.BATCH

pytestmark = pytest.mark.timeout(200)


def fetched(replica: Replica, what: str) -> list[float]:
    return [float(number) for number in re.findall(rf"{what}\S*\s+\[?([0-9.]+)", replica.output)]


def started(folder: Path, how: str, environs: list[dict[str, str]]) -> list[Replica]:
    replicas = []
    for rank, variables in enumerate(environs):
        log = folder / f"trainer-{rank}.log"
        everything = {**os.environ, **variables, "PYTHONPATH": ROOT}
        with log.open("wb") as output:
            process = ForkedTrainer(SCRIPT, str(folder), how, env=everything, output=output, errors=output)
        replicas.append(Replica(f"trainer {rank}", process, log))
    return replicas


def ended(replicas: list[Replica]) -> None:
    try:
        for replica in replicas:
            replica.expect(0, seconds=100)
    finally:
        for replica in replicas:
            replica.kill()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("alone")
    fluid_datasets.write(folder)
    (only,) = started(folder, "alone", [{}])
    ended([only])
    losses = fetched(only, "cost")
    assert len(losses) == STEPS
    return {"losses": losses, "values": json.loads((folder / "trainer-0.json").read_text())}


@pytest.mark.parametrize("how", ["served", "collective"])
def test_a_job_trains_on_its_files_as_one_process(how: str, alone: dict[str, Any], tmp_path: Path) -> None:
    fluid_datasets.write(tmp_path)
    if how == "served":
        with job(tmp_path, 2, 2, PYTHONPATH=ROOT) as running:
            servers, trainers = running.start(SCRIPT, str(tmp_path), how)
            ended([*trainers, *servers])
    else:
        trainers = started(tmp_path, how, environments(tmp_path, free_ports(2)))
        ended(trainers)
    losses = [fetched(trainer, "cost") for trainer in trainers]
    np.testing.assert_allclose(np.mean(losses, axis=0), alone["losses"], rtol=1e-4)
    assert len(fetched(trainers[0], "tested")) == STEPS // fluid_datasets.EPOCHS
    for index in range(2):
        values = json.loads((tmp_path / f"trainer-{index}.json").read_text())
        assert len(values) >= 4
        for name, value in values.items():
            np.testing.assert_allclose(value, alone["values"][name], rtol=1e-5, atol=1e-6)
