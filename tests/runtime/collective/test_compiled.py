"""A model that torch.compile has made faster: its gradients are averaged as those of any other."""

import pytest
import torch

COMPILED = """
if DEVICE == "cuda":
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "CUDA_VISIBLE_DEVICES": "0"}
from torch._dynamo.utils import counters

fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()
alone, model = build(seed=0), build(seed=rank).to(DEVICE)
compiled = torch.compile(model, backend=BACKEND, fullgraph=True)
sgd = torch.optim.SGD(compiled.parameters(), lr=0.1)
optimizer = fleet.distributed_optimizer(sgd, model=compiled)
own = torch.optim.SGD(alone.parameters(), lr=0.1)
for step in range(4):
    optimizer.zero_grad()
    x, y = (each.to(DEVICE) for each in batch(step, rank))
    torch.nn.functional.cross_entropy(compiled(x), y).backward()
    optimizer.step()
    own.zero_grad()
    (sum(loss_of(alone, step, each) for each in range(size)) / size).backward()
    own.step()
assert counters["stats"]["unique_graphs"] == 1, counters
for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(found.cpu(), expected)
fleet.stop_worker()
"""


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        pytest.param("cpu", "aot_eager", id="on-the-cpu-with-nothing-compiled-in-c"),
        pytest.param(
            "cuda",
            "inductor",
            id="on-a-gpu-that-two-share",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(
                    not torch.cuda.is_available(), reason="PyTorch finds no GPU on this machine"
                ),
            ],
        ),
    ],
)
def test_a_compiled_model_trains_together(trainers, device, backend):
    body = COMPILED.replace("DEVICE", repr(device)).replace("BACKEND", repr(backend))
    for process in trainers(body):
        _, err = process.communicate(timeout=110)
        assert process.returncode == 0, err


GOES_ON = """
fleet.init()
model = build(seed=0)
given = torch.compile(model, backend="eager") if COMPILED else model
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
fleet.distributed_optimizer(sgd, model=given)
status = fleet.load_check_point("saves")
if COMPILED:
    assert list(fleet.export_state_dict()) == list(model.state_dict())
    fleet.save_check_point("saves", fleet.TrainStatus(3))
else:
    assert status.next() == 4, status
fleet.stop_worker()
"""


def test_a_job_goes_on_without_compilation_under_the_models_own_names(trainers):
    for compiled in (True, False):
        *_, last = trainers(GOES_ON.replace("COMPILED", str(compiled)), ranks=(0,), size=1)
        _, err = last.communicate(timeout=110)
        assert last.returncode == 0, err
