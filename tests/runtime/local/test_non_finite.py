"""A training that ends with weights which are no numbers says so wherever its success is told."""

from __future__ import annotations

import sys

import pytest

from tests.support.local import LocalRun, job_manifest

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="the runs look into /proc for what is left"),
]

SCRIPT = """
import torch
from MODULE import fleet
fleet.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 1), torch.nn.Linear(1, 1))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=1e38), model=model)
if fleet.is_server():
    fleet.run_server()
    raise SystemExit
fleet.init_worker()
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
fleet.stop_worker()
"""


@pytest.mark.parametrize("module", ["fleet.parameter_server", "fleet.collective"])
def test_the_summary_and_the_log_name_weights_that_are_lost(module, tmp_path):
    script = SCRIPT.replace("MODULE", module)
    server = script if module == "fleet.parameter_server" else None
    with LocalRun(tmp_path, job_manifest(script, server=server), options=()) as run:
        assert run.wait(200) == 0, run.stderr
        assert "trainer-0 ended with NaN or infinity in 4 parameters" in run.stdout + run.stderr
        said = "NaN or infinity in 4 of 4 parameters: 0.weight, 0.bias, 1.weight and 1 more"
        assert said in run.log("trainer-0")
