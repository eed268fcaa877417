"""Parameters that are sharded (DTensor): whoever has sharded them averages and saves them."""

import pytest

SHARDED = """
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
fleet.init()
rank = fleet.worker_index()
mesh = init_device_mesh("cpu", (2,))
sharded = torch.nn.Parameter(distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)]))
plain = torch.nn.Parameter(torch.full((2,), 1.0 + rank))
optimizer = fleet.distributed_optimizer(torch.optim.SGD([sharded, plain], lr=0.1))
before = fleet.step
(sharded * sharded).sum().full_tensor().backward()
(plain * (1 + rank)).sum().backward()
optimizer.step()
assert torch.equal(sharded.full_tensor(), torch.full((4, 2), 0.8)), sharded  # 1 - 0.1 x 2
torch.testing.assert_close(plain.detach(), torch.full((2,), 1 - 0.1 * 1.5))
try:
    fleet.save_check_point("saves")
except fleet.ConfigurationError as error:
    assert "torch.distributed.checkpoint" in str(error)
else:
    assert rank == 1, "it saved a part"  # trainer 0 saves
fleet.stop_worker()
"""


def test_sharded_parameters_are_named_and_left_to_what_has_sharded_them(trainers):
    for process in trainers("import logging\nlogging.basicConfig(level=20)\n" + SHARDED):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert "1 of 2 parameters are sharded (DTensor), so fleet does not average them: param_0_0" in err


FULLY = """
import logging
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
logging.basicConfig(level=20)
fleet.init()
rank = fleet.worker_index()
mesh = init_device_mesh("cpu", (2,))
alone, model = build(seed=0), build(seed=0)
SHARD
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model=model)
fleet.init_worker()
own = torch.optim.SGD(alone.parameters(), lr=0.5)
for step in range(3):
    assert fleet.step == step
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()
    own.zero_grad()
    (sum(loss_of(alone, step, other) for other in range(2)) / 2).backward()
    own.step()
assert fleet.step == 3
for one, other in zip(model.parameters(), alone.parameters()):
    torch.testing.assert_close(one.full_tensor() if hasattr(one, "full_tensor") else one, other)
fleet.stop_worker()
"""


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        pytest.param(
            "fully_shard(model, mesh=mesh)",
            "4 of 4 parameters are sharded (DTensor), so fleet does not average them: "
            "0.weight, 0.bias, 2.weight and 1 more",
            id="all",
        ),
        pytest.param(
            "fully_shard(model[0], mesh=mesh)",
            "2 of 4 parameters are sharded (DTensor), so fleet does not average them: 0.weight, 0.bias",
            id="some",
        ),
    ],
)
def test_what_fully_shard_averages_is_named_counted_and_not_averaged_twice(trainers, shard, said):
    for process in trainers(FULLY.replace("SHARD", shard)):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
        assert said in err


SAVED = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh
fleet.init()
rank = fleet.worker_index()
mesh = init_device_mesh("cpu", (2,))

def built(seed):
    model = fully_shard(build(seed), mesh=mesh)
    return model, fleet.distributed_optimizer(torch.optim.Adam(model.parameters(), lr=0.05), model=model)

def train(model, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    return [each.full_tensor().detach().clone() for each in model.parameters()]

def states(model, optimizer):
    values, state = get_state_dict(model, optimizer)
    return {"model": values, "optimizer": state}

first = built(seed=0)
train(*first, range(3))
dcp.save(states(*first), checkpoint_id="sharded")
expected = train(*first, range(3, 5))
second = built(seed=1)
loaded = states(*second)
dcp.load(loaded, checkpoint_id="sharded")
set_state_dict(*second, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
assert all(map(torch.equal, train(*second, range(3, 5)), expected))
fleet.stop_worker()
"""


def test_torchs_checkpoints_of_sharded_parameters_bring_every_trainer_back_to_the_bit(trainers, tmp_path):
    for process in trainers(SAVED):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert len(list((tmp_path / "sharded").glob("*.distcp"))) == 2
