"""Buffers that each trainer's own batches write, such as BatchNorm's statistics."""

import pytest

TRAINED = """
from torch.nn.parallel import DistributedDataParallel
fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()

def built():
    model = build(seed=0)
    model.insert(1, torch.nn.BatchNorm1d(8))
    return model

def trained(model, sgd, of=None):
    for step in range(20):
        sgd.zero_grad()
        loss_of(of or model, step, rank).backward()
        sgd.step()

def same_everywhere(model):
    every = torch.cat([buffer.double().reshape(-1) for buffer in model.buffers()]).numpy()
    most, least = (fleet.all_reduce_worker(every, mode=mode) for mode in ("max", "min"))
    return bool((most == least).all())

strategies = [fleet.DistributedStrategy(), fleet.DistributedStrategy(broadcast_buffers=False)]
strategies.append(fleet.DistributedStrategy(local_sgd=fleet.LocalSGD(k_steps=4)))
found = []
for strategy in strategies:
    model = built()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    trained(model, fleet.distributed_optimizer(sgd, strategy, model=model))
    found.append((model, same_everywhere(model)))
assert [same for _, same in found] == [True, False, True], found

alone = built()
parallel = DistributedDataParallel(alone)
trained(alone, torch.optim.SGD(alone.parameters(), lr=0.1), parallel)
assert not same_everywhere(alone)  # those of the last batch: its next forward pass would take trainer 0's
if rank == 0:
    ours = found[0][0].state_dict()
    for name, buffer in alone.named_buffers():
        assert torch.equal(buffer, ours[name]), name

retained = built()
sgd = torch.optim.SGD(retained.parameters(), lr=0.1)
fleet.distributed_optimizer(sgd, model=retained)
output = retained(batch(0, rank)[0])
output.sum().backward(retain_graph=True)
output.square().sum().backward()
fleet.stop_worker()
"""


def test_buffers_follow_trainer_0s_unless_they_are_not_to(trainers):
    for process in trainers(TRAINED):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


OF_OTHER_SHAPES = """
fleet.init()
model = build(seed=0)
for name in ("taken", "seen"):
    model.register_buffer(name, torch.zeros(4))
sgd = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
del model.taken
for step in range(3):
    if step == 1:
        model.seen = torch.zeros(6)
    if step == 2 and fleet.worker_index() == 0:
        model.seen = torch.zeros(1)
    sgd.zero_grad()
    loss_of(model, step, fleet.worker_index()).backward()
    assert step < 2
    sgd.step()
"""


def test_a_buffer_of_another_shape_is_named_before_values_come_to_lie_elsewhere(trainers):
    for process in trainers(OF_OTHER_SHAPES):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2, err
        assert "has the buffer seen (" in err
        assert "expected buffers of the same shapes on every trainer" in err


SPARSE = """
fleet.init()
rank = fleet.worker_index()
model = build(seed=rank)
model.register_buffer("adjacency", torch.eye(3).to_sparse())
strategy = fleet.DistributedStrategy(broadcast_buffers=BROADCAST)
sgd = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
(model.adjacency @ model(batch(0, rank)[0][:3])).sum().backward()
sgd.step()
fleet.push_parameters()
every = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
assert torch.equal(fleet.all_reduce_worker(every, mode="max"), every)
fleet.stop_worker()
"""


@pytest.mark.parametrize(
    ("size", "broadcast", "status"),
    [
        pytest.param(1, True, 0, id="of-the-only-trainer"),
        pytest.param(2, False, 0, id="left-to-each-trainer"),
        pytest.param(2, True, 2, id="to-follow-trainer-0s"),
    ],
)
def test_a_sparse_buffer_is_a_trainers_own_or_refused_by_name(trainers, size, broadcast, status):
    body = SPARSE.replace("BROADCAST", str(broadcast))
    for process in trainers(body, ranks=range(size), size=size):
        _, err = process.communicate(timeout=100)
        assert process.returncode == status, err
        assert ("the buffer adjacency is torch.sparse_coo, and only dense buffers" in err) is (status == 2), (
            err
        )


REPLACED = """
fleet.init()
rank = fleet.worker_index()
model = build(seed=0)
model.register_buffer("scale", torch.zeros(3))
model[0].requires_grad_(False)
fleet.distributed_optimizer(torch.optim.SGD(model[2].parameters(), lr=0.1), model=model)
model.scale = torch.full((3,), 5.0 + rank)
model[0].bias = torch.nn.Parameter(torch.full((8,), 7.0 + rank), requires_grad=False)
fleet.push_parameters()
assert model.scale.tolist() == [5.0] * 3, model.scale
assert model[0].bias.tolist() == [7.0] * 8, model[0].bias
if rank == 1:
    model.scale = torch.zeros(4)
try:
    fleet.push_parameters()
except fleet.ConfigurationError as error:
    assert "has scale (" in str(error), error
else:
    raise AssertionError("values came to lie in a buffer of another shape")
"""


def test_what_is_pushed_is_what_the_model_has_then(trainers):
    for process in trainers(REPLACED):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
