"""A trainer of a built program that restarts continues with its schedule, statistics and metrics."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support import fluid_restarts
from tests.support.collective import ForkedTrainer, environments
from tests.support.processes import free_ports
from tests.support.replicas import Job, Replica, job

SCRIPT = Path(fluid_restarts.__file__)
ROOT = str(SCRIPT.parents[2])
STEPS, SAVES = 7, 4

pytestmark = pytest.mark.timeout(300)


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"trainer-{index}.json").read_text()) for index in range(2)]


def arguments(folder: Path, *, waits: int = 0, saves: int = SAVES, resets: int = 0) -> list[str]:
    return [str(folder), *map(str, (STEPS, waits, saves, resets))]


def finish(replicas: list[Replica]) -> None:
    for replica in replicas:
        replica.expect(0, seconds=120)


def until_saved(running: Job, folder: Path, **given: int) -> tuple[list[Replica], list[Replica]]:
    """Start every replica, and return once trainer 1 waits and the checkpoint is complete."""
    servers, trainers = running.start(SCRIPT, *arguments(folder, waits=SAVES, **given))
    trainers[1].wait_for_output("waits")
    trainers[0].wait_for_output("saved")
    return servers, trainers


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    with job(folder, 2, 2, PYTHONPATH=ROOT) as running:
        servers, trainers = running.start(SCRIPT, *arguments(folder))
        finish([*trainers, *servers])
    found = results(folder)
    assert found[0]["values"] == found[1]["values"]
    assert found[0]["values"]["@LR_DECAY_COUNTER@"] == [STEPS - 1]
    return found


def test_a_trainer_that_was_killed_continues_as_if_it_had_not_been(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    with job(tmp_path, 2, 2, PYTHONPATH=ROOT) as running:
        servers, trainers = until_saved(running, tmp_path)
        trainers[1].kill()
        (tmp_path / "killed").touch()
        again = running.trainer(1, SCRIPT, *arguments(tmp_path))
        finish([again, trainers[0], *servers])
    found = results(tmp_path)
    assert found[1]["losses"] == {
        str(step): undisturbed[1]["losses"][str(step)] for step in range(SAVES, STEPS)
    }
    assert [each["values"] for each in found] == [each["values"] for each in undisturbed]


def test_a_schedule_follows_the_job_without_a_checkpoint(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    with job(tmp_path, 2, 2, PYTHONPATH=ROOT) as running:
        servers, trainers = running.start(SCRIPT, *arguments(tmp_path, waits=SAVES, saves=0))
        trainers[1].wait_for_output("waits")
        trainers[1].kill()
        (tmp_path / "killed").touch()
        again = running.trainer(1, SCRIPT, *arguments(tmp_path, saves=0))
        finish([again, trainers[0], *servers])
    found = results(tmp_path)
    assert found[0]["values"] == undisturbed[0]["values"]
    for name in ("@LR_DECAY_COUNTER@", "fc_0.w_0"):
        assert found[1]["values"][name] == undisturbed[1]["values"][name]


def test_statistics_and_a_counter_that_the_script_has_set_come_back_when_a_trainer_joins(
    tmp_path: Path,
) -> None:
    with job(tmp_path, 2, 2, PYTHONPATH=ROOT) as running:
        servers, trainers = until_saved(running, tmp_path, resets=2)
        trainers[1].kill()
        (tmp_path / "killed").touch()
        again = running.trainer(1, SCRIPT, *arguments(tmp_path, resets=2))
        finish([again, trainers[0], *servers])
    found = results(tmp_path)
    assert found[1]["values"] == found[0]["values"]
    assert found[1]["values"]["@LR_DECAY_COUNTER@"] == [10 + STEPS - 2]


def test_a_job_that_restarts_continues_from_its_checkpoint(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    with job(tmp_path, 2, 2, PYTHONPATH=ROOT) as running:
        until_saved(running, tmp_path)
    (tmp_path / "killed").touch()
    with job(tmp_path, 2, 2, PYTHONPATH=ROOT) as running:
        servers, trainers = running.start(SCRIPT, *arguments(tmp_path))
        finish([*trainers, *servers])
    found = results(tmp_path)
    assert list(found[0]["losses"]) == [str(step) for step in range(SAVES, STEPS)]
    assert [each["values"] for each in found] == [each["values"] for each in undisturbed]


def test_a_collective_job_that_restarts_continues_from_its_checkpoint(tmp_path: Path) -> None:
    every: list[Replica] = []

    def started(folder: Path, *, waits: int = 0) -> list[Replica]:
        for rank, variables in enumerate(environments(folder, free_ports(2))):
            log = folder / f"trainer-{rank}.{waits}.log"
            everything = {**os.environ, **variables, "PYTHONPATH": ROOT}
            with log.open("wb") as output:
                given = arguments(folder, waits=waits)
                process = ForkedTrainer(SCRIPT, *given, env=everything, output=output, errors=output)
            every.append(Replica(f"trainer {rank}", process, log))
        return every[-2:]

    alone, killed = tmp_path / "alone", tmp_path / "killed"
    for folder in (alone, killed):
        folder.mkdir()
    try:
        finish(started(alone))
        first = started(killed, waits=SAVES)
        first[1].wait_for_output("waits")
        first[0].wait_for_output("saved")
        for replica in first:
            replica.kill()
        (killed / "killed").touch()
        finish(started(killed))
    finally:
        for replica in every:
            replica.kill()
    assert [each["values"] for each in results(killed)] == [each["values"] for each in results(alone)]
