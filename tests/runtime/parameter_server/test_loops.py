"""Loops that begin where the training is: real processes, one of them killed with -9 and started again."""

import json
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


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[Replica]:
    """Give the trainers of a job in which nothing happens."""
    with job(tmp_path_factory.mktemp("undisturbed"), servers=2, trainers=2) as running:
        servers, trainers = running.start(SCRIPT, str(EPOCHS))
        for replica in (*trainers, *servers):
            replica.expect(0, seconds=120)
    return trainers


def run_and_kill(
    running: Job, at_step: int, **environ: str
) -> tuple[Replica, Replica, Replica, list[Replica]]:
    """Kill trainer 1 in a step, and start it again; return trainer 0, both lives, and the servers."""
    servers = [running.server(index, SCRIPT, str(EPOCHS)) for index in range(running.servers)]
    survivor = running.trainer(0, SCRIPT, str(EPOCHS))
    victim = running.trainer(1, SCRIPT, str(EPOCHS), KILL_AT_STEP=str(at_step))
    assert victim.wait(120) == -9
    back = running.trainer(1, SCRIPT, str(EPOCHS), FLEET_RESTARTS="1", **environ)
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
def test_a_restarted_trainer_makes_the_steps_that_are_left_and_changes_no_bit(
    at_step, workers, expected, tmp_path
):
    with job(tmp_path, servers=2, trainers=2, WORKERS=workers) as running:
        survivor, victim, back, servers = run_and_kill(running, at_step)
        epoch, batch = divmod(at_step, PER_EPOCH)
        told = f"training resumes at step {at_step}, after {epoch} of 4 epochs and {batch} of 5"
        back.expect(0, told, f"joins late, at step {at_step}", seconds=120)
        for replica in (survivor, *servers):
            replica.expect(0, seconds=120)
        assert made(victim).keys() == set(range(1, at_step + 1))
        assert made(back).keys() == set(range(at_step + 1, STEPS + 1))
        assert made(victim) | made(back) == made(expected[1])
        assert made(survivor) == made(expected[0])
        assert ends_with(back) == ends_with(survivor) == ends_with(expected[0]) != []


def test_a_loop_of_its_own_trains_past_the_others_and_both_sides_are_told(tmp_path):
    with job(tmp_path, servers=2, trainers=2, LOOP="plain", CONSTANT="") as running:
        words = tmp_path / "words"
        survivor, _, back, servers = run_and_kill(running, 7, FLEET_TERMINATION_LOG=str(words))
        back.expect(0, "has made 7 steps after the others completed, with its own data", seconds=120)
        assert json.loads(words.read_text())["counters"]["steps_past_the_others"] == 7
        survivor.expect(0, seconds=120)
        for server in servers:
            server.expect(
                0,
                f"trainer 1 joined late, and continues after the others completed at step {STEPS}",
                "trainer 1 has made 7 steps after the others completed",
                seconds=60,
            )
        assert "after the others completed" not in survivor.output


def test_a_loop_of_its_own_with_a_scheduler_is_told_which_loop_brings_it_on(tmp_path):
    with job(tmp_path, servers=1, trainers=2, LOOP="plain") as running:
        _, _, back, _ = run_and_kill(running, 7)
        back.expect(2, "lr=0.1 instead of lr=0.07", "fleet.epochs(n, loader, scheduler) does", seconds=120)


@pytest.mark.parametrize("mode", ["async", "half_async", "geo"])
def test_in_each_mode_a_restarted_trainer_goes_on_at_its_own_step_to_the_planned_one(
    mode, expected, tmp_path
):
    with job(tmp_path, servers=1, trainers=2, MODE=mode) as running:
        survivor, _, back, servers = run_and_kill(running, 7)
        for replica in (back, survivor, *servers):
            replica.expect(0, seconds=120)
        known = int(re.findall(r"trainer 1 joined .* at step (\d+)", back.output)[0])
        assert 0 <= known <= 7  # of Geo what the servers have heard of, of HalfAsync what had left
        assert made(back) == {step: what for step, what in made(expected[1]).items() if step > known}
        assert "the others completed" not in back.output + servers[0].output


def test_a_job_that_starts_anew_goes_on_where_its_checkpoint_was_made(expected, tmp_path):
    folder = {"CHECKPOINTS": str(tmp_path / "saves")}
    with job(tmp_path, servers=2, trainers=2, rounds=2, **folder) as running:
        for index in range(2):
            running.server(index, SCRIPT, str(EPOCHS))
        killed = [running.trainer(index, SCRIPT, str(EPOCHS), KILL_AT_STEP="13") for index in range(2)]
        for trainer in killed:
            assert trainer.wait(120) == -9
        running.close()
        servers, trainers = running.start(SCRIPT, str(EPOCHS))
        for replica in (*trainers, *servers):
            replica.expect(0, seconds=120)
        assert made(trainers[0]).keys() == set(range(2 * PER_EPOCH + 1, STEPS + 1))
        assert ends_with(trainers[0]) == ends_with(trainers[1]) == ends_with(expected[0])
