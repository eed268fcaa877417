"""Real processes killed with -9: who notices, who waits, and who ends with which status."""

import json
import signal
import time
from pathlib import Path

import pytest

from fleet.errors import EXIT_PEER_LOST, EXIT_STATE_LOST
from tests.support.processes import wait_for
from tests.support.replicas import job

SCRIPT = Path(__file__).parent / "scripts" / "faults.py"
FOR_EVER = "1000000"
IMPATIENT = {"FLAGS_rpc_deadline": "10000", "FLEET_HEARTBEAT_SECONDS": "0.2"}

pytestmark = pytest.mark.timeout(300)


@pytest.mark.serial
def test_a_trainer_that_is_killed_comes_back_under_a_higher_attempt(tmp_path):
    with job(tmp_path, servers=2, trainers=2) as running:
        words = [tmp_path / f"words-{index}" for index in range(2)]
        life = {"FLEET_CHECKPOINT_DIR": str(tmp_path), "FLEET_LIFE": "0"}
        servers = [
            running.server(index, SCRIPT, "25", FLEET_TERMINATION_LOG=str(words[index]), **life)
            for index in range(2)
        ]
        survivor = running.trainer(0, SCRIPT, "25")
        victim = running.trainer(1, SCRIPT, "25", KILL_AT_STEP="7", LEAVE_CHILD="")
        assert victim.wait(120) == -9
        killed = time.monotonic()
        for server in servers:  # the victim's forked child lives on, and must not hide its end
            server.wait_for_output(r"trainer 1 \(attempt 0\).* broke", seconds=20)
        assert time.monotonic() - killed < 5
        back = running.trainer(1, SCRIPT, "25", FLEET_RESTARTS="1")
        back.expect(0, "joined at step 7", "made step 25", seconds=120)
        survivor.expect(0, "made step 25", seconds=120)
        for server in servers:
            server.expect(0, "trainer 1 joined again (attempt 1) at step 7", seconds=60)
        for each in words:  # who ends well has seen all others complete, and says so
            said = json.loads(each.read_text())
            assert said["completedTrainers"] == "0-1"
            assert said["completedAfter"] == {"0": "0", "1": "1"}
            each.unlink()
        again = running.server(0, SCRIPT, "25", FLEET_TERMINATION_LOG=str(words[0]), **life)
        again.expect(0, "this training run has already finished", seconds=60)
        late = running.trainer(1, SCRIPT, "25", FLEET_RESTARTS="2", **life)  # no server listens any more
        late.expect(0, "this training run has already finished", seconds=60)
        assert json.loads(words[0].read_text())["completedTrainers"] == "0-1"


def test_a_trainer_that_has_completed_unseen_is_told_so_by_servers_that_run(tmp_path):
    with job(tmp_path, servers=2, trainers=2) as running:
        servers = [running.server(index, SCRIPT, FOR_EVER, FLEET_LIFE="0") for index in range(2)]
        other = running.trainer(0, SCRIPT, FOR_EVER)
        running.trainer(1, SCRIPT, "3").expect(0, "made step 3", seconds=120)
        words = tmp_path / "words"
        again = {"FLEET_RESTARTS": "1", "FLEET_LIFE": "0", "FLEET_TERMINATION_LOG": str(words)}
        told = "trainer 1 has already completed, according to all parameter servers: nothing is left to do"
        running.trainer(1, SCRIPT, FOR_EVER, **again).expect(0, told, seconds=60)
        assert json.loads(words.read_text())["completedTrainers"] == "1"
        assert not any("trainer 1 joined again" in server.output for server in servers)
        anew = running.trainer(1, SCRIPT, FOR_EVER, FLEET_RESTARTS="2", FLEET_LIFE="1")  # of another training
        anew.wait_for_output("joined at step")
        assert other.process.poll() is None


def test_a_server_that_comes_back_without_its_state_ends_the_trainers(tmp_path):
    with job(tmp_path, servers=2, trainers=2) as running:
        servers, trainers = running.start(SCRIPT, FOR_EVER)
        for trainer in trainers:
            trainer.wait_for_output("made step 3", seconds=120)
        servers[1].kill()
        trainers[0].wait_for_output("has not answered.* broke.*waiting for it", seconds=20)
        again = running.server(1, SCRIPT, FOR_EVER)
        for trainer in trainers:
            trainer.expect(
                EXIT_STATE_LOST,
                f"parameter server {running.endpoints[1]} came back without its state",
                seconds=120,
            )
        assert again.process.poll() is None


def test_a_trainer_that_vanishes_ends_the_others_by_the_deadline(tmp_path):
    with job(tmp_path, servers=1, trainers=2) as running:
        server = running.server(0, SCRIPT, "25", **IMPATIENT)
        survivor = running.trainer(0, SCRIPT, "25")
        victim = running.trainer(1, SCRIPT, "25", KILL_AT_STEP="3")
        assert victim.wait(120) == -9
        server.expect(EXIT_PEER_LOST, "trainer 1 lost its connection", "vanished for good", seconds=60)
        survivor.expect(EXIT_PEER_LOST, "trainer 1 lost its connection", "at step 3", seconds=60)


def test_a_server_that_was_frozen_gives_nobody_up_for_what_it_did_not_hear(tmp_path):
    with job(tmp_path, servers=1, trainers=1) as running:
        server = running.server(0, SCRIPT, FOR_EVER, **IMPATIENT | {"FLAGS_rpc_deadline": "2000"})
        trainer = running.trainer(0, SCRIPT, FOR_EVER)
        trainer.wait_for_output("made step 3", seconds=120)
        server.process.send_signal(signal.SIGSTOP)
        try:
            # For longer than the server would wait for anybody, which is 3 s.
            trainer.wait_for_output("has not answered for 1[0-9] s", seconds=60)
        finally:
            server.process.send_signal(signal.SIGCONT)
        made = len(trainer.output.splitlines())
        wait_for(lambda: len(trainer.output.splitlines()) > made + 100, "training to go on", seconds=60)
        assert server.process.poll() is None
        assert "vanished" not in server.output


def test_a_server_that_vanishes_ends_the_trainers_by_the_deadline(tmp_path):
    with job(tmp_path, servers=1, trainers=1) as running:
        server = running.server(0, SCRIPT, FOR_EVER)
        running.wait_until_serving(0)
        trainer = running.trainer(0, SCRIPT, FOR_EVER, **IMPATIENT)
        trainer.wait_for_output("made step 3", seconds=120)
        server.kill()
        trainer.expect(
            EXIT_PEER_LOST,
            f"parameter server {running.endpoints[0]} has not answered",
            "FLAGS_rpc_deadline is 10000 ms",
            seconds=60,
        )


def test_a_trainer_alone_says_whom_it_waits_for_and_gives_up(tmp_path):
    with job(tmp_path, servers=1, trainers=1, FLAGS_rpc_deadline="6000") as running:
        trainer = running.trainer(0, SCRIPT, "1")
        trainer.expect(
            EXIT_PEER_LOST,
            f"waiting for parameter server {running.endpoints[0]} to listen",
            f"no connection to parameter server {running.endpoints[0]} after 6 s",
            seconds=120,
        )
