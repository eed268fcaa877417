"""Tables that real processes save: kill -9 amid a save of what has changed, and rows on servers' disks."""

import re
from pathlib import Path

import pytest

from fleet.checkpoint import Manifest
from tests.support.replicas import Job, Replica, job

SCRIPT = Path(__file__).parent / "scripts" / "saved_rows.py"
STEPS = 8

pytestmark = pytest.mark.timeout(300)


def end_of(running: Job, trainer: Replica) -> str:
    """Wait for the end of a job's last life; return the digest of what its trainer ends with."""
    for replica in running.replicas[-running.servers - 1 :]:
        replica.expect(0, seconds=120)
    (digest,) = re.findall(r"^ends with (\w+)$", trainer.output, re.M)
    return str(digest)


def begins_at(trainer: Replica) -> int:
    """Return the step with which a trainer has begun."""
    return int(trainer.wait_for_output(r"begins at step (\d+)", 120)[1])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of a training that nobody disturbs, with all rows in memory."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with job(folder, 2, 1, FLEET_CHECKPOINT_DIR=str(folder / "checkpoints")) as running:
        return end_of(running, running.start(SCRIPT, str(STEPS))[1][0])


@pytest.mark.parametrize(
    ("point", "disk", "begins"),
    [
        pytest.param("rows", False, {4}, id="amid-the-rows-that-have-changed"),
        pytest.param("rows", True, {4}, id="amid-rows-on-a-disk"),
        pytest.param("commit", False, {4, 6}, id="before-its-manifest-which-the-other-may-have-written"),
        pytest.param("tidy", False, {6}, id="behind-the-manifest"),
        pytest.param("remove", False, {6}, id="before-the-one-that-is-not-needed-is-removed"),
    ],
)
def test_a_server_killed_amid_an_incremental_save_loses_nothing_that_was_saved(
    tmp_path, undisturbed, point, disk, begins
):
    folder = tmp_path / "checkpoints"
    environ = {"FLEET_CHECKPOINT_DIR": str(folder), "FLEET_HEARTBEAT_SECONDS": "1"}
    if disk:
        environ["DISK"] = str(tmp_path)
    with job(tmp_path, 2, 1, 1, **environ) as running:
        killed = running.server(0, SCRIPT, str(STEPS), KILL_AT=point)
        other = running.server(1, SCRIPT, str(STEPS))
        trainer = running.trainer(0, SCRIPT, str(STEPS))
        assert killed.wait(120) == -9
        for replica in (other, trainer):  # as the operator ends them
            replica.kill()
        said = [int(step) for step in re.findall(r"checkpoint-\d+ holds step (\d+)", trainer.output)]
        assert said[:2] == [2, 4]
        again = {"FLEET_RESTARTS": "1", "FLEET_LIFE": "2"}
        for index in range(2):
            running.server(index, SCRIPT, str(STEPS), **again)
        back = running.trainer(0, SCRIPT, str(STEPS), **again)
        began = begins_at(back)
        assert began in begins
        assert began >= max(said)
        assert end_of(running, back) == undisturbed


def test_rows_on_the_disks_of_servers_are_saved_and_loaded_by_other_servers_with_disks(tmp_path, undisturbed):
    disks = [tmp_path / "a", tmp_path / "b"]
    folder = tmp_path / "checkpoints"
    for life, servers in enumerate((2, 3)):
        disks[life].mkdir()
        environ = {"FLEET_CHECKPOINT_DIR": str(folder), "DISK": str(disks[life])}
        with job(disks[life], servers, 1, rounds=2, **environ) as running:
            port = int(running.endpoints[-1].rpartition(":")[2]) + 1
            running.server(0, SCRIPT, str(STEPS), FLEET_METRICS_PORT=str(port))
            for index in range(1, servers):
                running.server(index, SCRIPT, str(STEPS))
            steps = "4" if life == 0 else str(STEPS)
            trainer = running.trainer(0, SCRIPT, steps, METRICS=f"127.0.0.1:{port}")
            digest = end_of(running, trainer)
            assert begins_at(trainer) == 4 * life
            (on_disk,) = re.findall(r'^fleet_table_rows_on_disk\{table="rows"\} (\S+)$', trainer.output, re.M)
            assert float(on_disk) > 100
            if life == 0:
                assert Manifest.read(folder / "checkpoint-1").bases
    assert digest == undisturbed
