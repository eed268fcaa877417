"""A parameter server that is killed: the job begins again where its last checkpoint is, or at its start."""

from __future__ import annotations

import re
import sys

import pytest

from tests.support.local import LocalRun, forked, job_manifest
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
# The first life trains past its checkpoint, if it makes one, and waits until its server has been killed.
SCRIPT = f"""{MODEL}
import pathlib, time
from fleet.parameter_server import fleet
fleet.init()
optimizer = fleet.distributed_optimizer(optimizer, model=model)
if fleet.is_server():
    fleet.init_server()
    fleet.run_server()
else:
    fleet.init_worker()
    print("begins at step", fleet.step, flush=True)
    while fleet.step < {LAST}:
        backward(fleet.step)
        optimizer.step()
        if fleet.step == {SAVED} and SAVES:
            fleet.save_check_point()
        if fleet.step == {LAST - 1}:
            print("waits", flush=True)
            while not pathlib.Path("killed").exists():
                time.sleep(0.02)
    fleet.stop_worker()
    print("ends with", digest(), flush=True)
"""


@pytest.mark.parametrize(
    ("saves", "first_steps", "restarts"),
    [
        pytest.param(True, [0, SAVED], "restarting (1 of 6)", id="to-its-checkpoint-and-no-further"),
        pytest.param(False, [0, 0], "restarting the whole job (1 of 6)", id="to-its-start-without-one"),
    ],
)
def test_a_killed_server_takes_the_job_back(tmp_path, saves, first_steps, restarts):
    with one_torch_thread():
        alone: dict[str, object] = {}
        exec(MODEL + f"for step in range({LAST}):\n    backward(step)\n    optimizer.step()\n", alone)  # noqa: S102
        expected = eval("digest()", alone)  # noqa: S307
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    script = SCRIPT.replace("SAVES", repr(saves))
    job = forked(job_manifest(script, server=script))
    if saves:
        job["spec"]["checkpoint"] = {"volumeClaimTemplate": {"spec": claim}}
    given = ("--volume", f"checkpoint={tmp_path / 'checkpoints'}") if saves else ()
    with LocalRun(tmp_path / "run", job, options=("-o", "json", *given)) as run:
        run.says("trainer-0 has started", 60)
        wait_for(lambda: "waits\n" in run.log("trainer-0"), "the last step but one", seconds=180)
        if saves:
            wait_for(lambda: "it was durable after" in run.log("trainer-0"), "the save", seconds=180)
        run.kill("pserver-0")
        (run.folder / "killed").touch()
        assert restarts in run.says("pserver-0 was ended by SIGKILL (exit code 137)")
        assert run.wait(200) == 0, run.stderr
        trainer = run.log("trainer-0")
        exit_codes = {each["role"]: each["exit_codes"] for each in run.result()["replicas"]}
    assert re.findall(r"begins at step (\d+)", trainer) == [str(step) for step in first_steps]
    assert re.findall(r"ends with (\w+)", trainer) == [expected]
    assert (exit_codes["pserver"][0], exit_codes["pserver"][-1]) == (137, 0)
    assert exit_codes["trainer"][-1] == 0
