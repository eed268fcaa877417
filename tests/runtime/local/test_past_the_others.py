"""A trainer that is killed and comes back: the summary says whether its script trained past the others."""

from __future__ import annotations

import sys

import pytest

from tests.support.local import LocalRun, forked, job_manifest

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="the runs look into /proc for what is left"),
]

SCRIPT = """
import os, signal, torch
from fleet.parameter_server import fleet
fleet.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
if fleet.is_server():
    fleet.run_server()
    raise SystemExit
fleet.init_worker()
loader = torch.randn(5, 2, 4)
for _ in range(4):
    for batch in loader:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        if fleet.step == 7 and fleet.worker_index() == 1 and os.environ["FLEET_RESTARTS"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
fleet.stop_worker()
"""
SAYS = "trainer-1 joined late, and made 7 steps after the others completed, with its own data only"


def test_the_summary_names_a_trainer_whose_loop_began_anew(tmp_path):
    # One whose loop resumes is not named: test_digits.py has it.
    with LocalRun(tmp_path, forked(job_manifest(SCRIPT, server=SCRIPT, trainers=2)), options=()) as run:
        assert run.wait(200) == 0, run.stderr
        assert "trainer-1  exit codes 137, 0; restarted once" in run.stdout + run.stderr
        assert SAYS in run.stdout + run.stderr
        assert "after the others completed" in run.log("trainer-1")
        assert "after the others completed" in run.log("pserver-0")
