"""A parameter server that is killed: the job begins again where its last checkpoint is."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support.local import LocalRun, job_manifest
from tests.support.processes import wait_for
from tests.support.threads import one_torch_thread

pytestmark = [
    pytest.mark.timeout(420),
    pytest.mark.skipif(sys.platform != "linux", reason="/proc shows what is left"),
]

SAVED, LAST = 5, 12
MODEL = """
import hashlib, torch
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(20, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

def backward(step):
    model.zero_grad()
    batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(step))
    model(batch).square().mean().backward()

def digest():
    values = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    return hashlib.sha256(values).hexdigest()
"""
# The first life trains on until somebody ends it; the one that finds a checkpoint trains to the end.
SCRIPT = f"""{MODEL}
from fleet.parameter_server import fleet
fleet.init()
optimizer = fleet.distributed_optimizer(optimizer, model=model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    first = fleet.step
    print("begins at step", first, flush=True)
    while first == 0 or fleet.step < {LAST}:
        backward(fleet.step)
        optimizer.step()
        if fleet.step == {SAVED}:
            fleet.save_check_point()
    fleet.stop_worker()
    print("ends with", digest(), flush=True)
"""


def test_a_killed_server_takes_the_job_back_to_its_checkpoint_and_no_further(tmp_path):
    with one_torch_thread():
        alone: dict[str, object] = {}
        exec(MODEL + f"for step in range({LAST}):\n    backward(step)\n    optimizer.step()\n", alone)  # noqa: S102
        expected = eval("digest()", alone)  # noqa: S307
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    job = job_manifest(SCRIPT, server=SCRIPT, checkpoint={"volumeClaimTemplate": {"spec": claim}})
    given = ("--volume", f"checkpoint={tmp_path / 'checkpoints'}")
    with LocalRun(tmp_path / "run", job, options=("-o", "json", *given)) as run:
        run.says("trainer-0 has started", 60)
        wait_for(lambda: "it was durable after" in run.log("trainer-0"), "the save", seconds=180)
        run.kill("pserver-0")
        assert run.wait(200) == 0, run.stderr
        trainer = run.log("trainer-0")
    assert re.findall(r"begins at step (\d+)", trainer) == ["0", str(SAVED)]
    assert re.findall(r"ends with (\w+)", trainer) == [expected]
