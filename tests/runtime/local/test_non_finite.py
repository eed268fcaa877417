"""A training that ends with weights which are no numbers says so wherever its success is told."""

from __future__ import annotations

import sys

import pytest

from tests.support.local import LocalRun, forked, job_manifest

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
    with LocalRun(tmp_path, forked(job_manifest(script, server=server)), options=()) as run:
        assert run.wait(200) == 0, run.stderr
        assert "trainer-0 ended with NaN or infinity in 4 parameters" in run.stdout + run.stderr
        said = "NaN or infinity in 4 of 4 parameters: 0.weight, 0.bias, 1.weight and 1 more"
        assert said in run.log("trainer-0")


ROWS = """
import torch
import fleet as package
from fleet.parameter_server import fleet
fleet.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torch.nn.Module()
model.table = package.nn.DistributedEmbedding(100, 4, name="clicks")
model.head = torch.nn.Linear(4, 1)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
if fleet.is_server():
    fleet.run_server()
    raise SystemExit
fleet.init_worker()
for step in range(9):
    optimizer.zero_grad()
    rows = model.table(torch.tensor([7 if step == 6 else 3]))
    if step == 6:
        rows.register_hook(lambda gradient: gradient * float("nan"))
    model.head(rows).square().mean().backward()
    optimizer.step()
fleet.stop_worker()
"""


def test_the_summary_and_the_log_name_a_row_that_is_lost_between_two_looks_at_dense_gradients(tmp_path):
    with LocalRun(tmp_path, forked(job_manifest(ROWS, server=ROWS)), options=()) as run:
        assert run.wait(200) == 0, run.stderr
        assert "trainer-0 ended with NaN or infinity in 1 parameters" in run.stdout + run.stderr
        log = run.log("trainer-0")
        assert "the gradient of row 7 of table clicks holds NaN or infinity on trainer 0 in step 6" in log
        assert "NaN or infinity in 1 of 3 parameters: table clicks (row 7 in step 6)" in log
