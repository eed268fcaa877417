"""A trainer that is killed when it had told the servers that it was done, as they are about to end."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.local import LocalRun, forked, job_manifest

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what is left"),
]

# Trainer 1 is killed between stop_worker() and its exit. Its next life has begun, and not joined, when
# trainer 0 is done and the server ends.
SCRIPT = """
import os, pathlib, signal, socket, time
import torch
from fleet.parameter_server import fleet

me = os.environ.get("PADDLE_TRAINER_ID"), int(os.environ["FLEET_RESTARTS"])

def wait_until(done):
    while not done():
        time.sleep(0.05)

def server_has_ended():
    host, _, port = os.environ["PADDLE_PSERVERS_IP_PORT_LIST"].rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return True
    return False

if me == ("1", 1):
    print("again", flush=True)
    pathlib.Path("again").touch()
    wait_until(server_has_ended)
torch.manual_seed(0)
model = torch.nn.Linear(20, 1)
fleet.init()
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01), model=model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    model(torch.ones(4, 20)).square().mean().backward()
    optimizer.step()
    if me == ("0", 0):
        wait_until(pathlib.Path("again").exists)
    fleet.stop_worker()
    if me == ("1", 0):
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_trainer_whose_servers_have_ended_does_not_call_them_in_vain(tmp_path: Path):
    job = forked(job_manifest(SCRIPT, server=SCRIPT, trainers=2))
    with LocalRun(tmp_path / "run", job) as run:
        run.says("trainer-1 must be restarted, but parameter servers have completed", 150)
        assert run.wait(120) == 0, run.stderr
        assert "exit code 91" not in run.stderr
        _, _, said = run.log("trainer-1").rpartition("attempt 1.1")
        assert "waiting for parameter server" not in said
