"""Loops that begin where the training is: real processes, one of them killed with -9 and started again."""

import re
from pathlib import Path

import pytest

from tests.support.replicas import Job, Replica, job

SCRIPT = Path(__file__).parent / "scripts" / "epochs.py"
EPOCHS = 4
PER_EPOCH = 5
STEPS = EPOCHS * PER_EPOCH

pytestmark = pytest.mark.timeout(300)


def made(trainer: Replica) -> dict[int, str]:
    """Return what each step was made of, by how many steps there are with it."""
    return {int(step): what for step, what in re.findall(r"^step (\d+) (.*)$", trainer.output, re.M)}


def ends_with(trainer: Replica) -> list[str]:
    """Return the learning rate and the weights at the end, to the bit."""
    return re.findall(r"^(?:rate|weights) .*$", trainer.output, re.M)


def run(running: Job, **environ: str) -> list[Replica]:
    """Run a job in which nothing happens; return its trainers."""
    servers, trainers = running.start(SCRIPT, str(EPOCHS))
    for replica in (*trainers, *servers):
        replica.expect(0, seconds=120)
    return trainers


def run_and_kill(running: Job, at_step: int) -> tuple[Replica, Replica, Replica, list[Replica]]:
    """Kill trainer 1 in a step, and start it again; return trainer 0, both lives, and the servers."""
    servers = [running.server(index, SCRIPT, str(EPOCHS)) for index in range(running.servers)]
    survivor = running.trainer(0, SCRIPT, str(EPOCHS))
    victim = running.trainer(1, SCRIPT, str(EPOCHS), KILL_AT_STEP=str(at_step))
    assert victim.wait(120) == -9
    back = running.trainer(1, SCRIPT, str(EPOCHS), FLEET_RESTARTS="1")
    return survivor, victim, back, servers


@pytest.mark.parametrize(
    ("at_step", "workers"),
    [
        pytest.param(7, "0", id="in-the-middle-of-an-epoch"),
        pytest.param(8, "2", id="with-processes-that-load-the-data"),
        pytest.param(10, "0", id="where-an-epoch-begins"),
        pytest.param(STEPS - 1, "0", id="in-the-last-step"),
    ],
)
def test_a_restarted_trainer_makes_the_steps_that_are_left_and_changes_no_bit(at_step, workers, tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    with job(whole, servers=2, trainers=2) as undisturbed:
        expected = run(undisturbed)
        with job(tmp_path, servers=2, trainers=2, WORKERS=workers) as running:
            survivor, victim, back, servers = run_and_kill(running, at_step)
            epoch, batch = divmod(at_step, PER_EPOCH)
            told = f"the training is at step {at_step}: going on after {epoch} of 4 epochs and {batch} of 5"
            back.expect(0, told, f"joins late, at step {at_step}", seconds=120)
            for replica in (survivor, *servers):
                replica.expect(0, seconds=120)
            assert made(victim).keys() == set(range(1, at_step + 1))
            assert made(back).keys() == set(range(at_step + 1, STEPS + 1))
            assert made(victim) | made(back) == made(expected[1])
            assert made(survivor) == made(expected[0])
            assert ends_with(back) == ends_with(survivor) == ends_with(expected[0]) != []
