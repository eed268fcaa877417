"""A trainer that is told to stop, and saves what it has: nobody takes it for one that has completed."""

import signal
from pathlib import Path

import torch

from tests.support.replicas import job

SCRIPT = Path(__file__).parent / "scripts" / "stopped.py"


def test_a_trainer_told_to_stop_saves_and_is_waited_for_by_the_servers(tmp_path: Path) -> None:
    with job(tmp_path, servers=1, trainers=2, FLEET_SYNC_MODE="Async") as running:
        (server,), trainers = running.start(SCRIPT, str(tmp_path))
        for trainer in trainers:
            trainer.wait_for_output("trains")
        trainers[1].process.send_signal(signal.SIGTERM)
        trainers[1].expect(128 + signal.SIGTERM, "saved", "has not completed")
        assert set(torch.load(tmp_path / "model-1.pt")) == {"weight", "bias"}
        again = running.trainer(1, SCRIPT, str(tmp_path), FLEET_RESTARTS="1")
        again.wait_for_output("trains")
        (tmp_path / "enough").touch()
        for replica in (trainers[0], again, server):
            replica.expect(0)
