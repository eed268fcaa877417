"""A script's own copies of a model that is trained together: they are that trainer's alone."""

COPIED = """
import copy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

DECAY = 0.75

def own_step(model):  # on this trainer only: what would be exchanged would wait for the other for ever
    loss_of(model, 0, rank).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

def averaged(old, new):
    return [DECAY * one + (1 - DECAY) * other for one, other in zip(old, new)]

fleet.init()
rank = fleet.worker_index()
model = build(seed=rank)
model.insert(1, torch.nn.BatchNorm1d(8))
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = fleet.distributed_optimizer(sgd, model=model)
begun = copy.deepcopy(model)
exponential = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
evenly = AveragedModel(model)
history, expected = [], None
for step in range(4):
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()
    for each in (exponential, evenly):
        each.update_parameters(model)
    history.append([each.detach().clone() for each in model.parameters()])
    expected = averaged(expected, history[-1]) if expected else history[-1]
    if rank == step % 2:
        own_step(copy.deepcopy(model))
assert fleet.step == 4
torch.testing.assert_close(list(exponential.parameters()), expected)
torch.testing.assert_close(list(evenly.parameters()), [sum(each) / 4 for each in zip(*history)])
if rank == 0:
    before = [each.detach().clone() for each in model.parameters()]
    own_step(begun)
    own_step(exponential)
    assert all(map(torch.equal, model.parameters(), before))
assert fleet.step == 4
loss_of(model, 4, rank).backward()
optimizer.step()
values = torch.nn.utils.parameters_to_vector([*model.parameters(), *evenly.parameters()]).detach()
most, least = (fleet.all_reduce_worker(values, mode=mode) for mode in ("max", "min"))
assert torch.equal(most, least)
fleet.stop_worker()
"""


def test_copies_and_running_averages_of_a_model_are_a_trainers_own(trainers):
    for process in trainers(COPIED):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err


COPIED_OPTIMIZER = """
import copy, io, pickle
fleet.init()
model = build(seed=0)
adam = torch.optim.Adam(model.parameters(), lr=0.1)
optimizer = fleet.distributed_optimizer(adam, model=model)
loss_of(model, 0, 0).backward()
optimizer.step()
saved = io.BytesIO()
torch.save(optimizer, saved)
saved.seek(0)
loaded = torch.load(saved, weights_only=False)
for each in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer)), loaded):
    assert type(each) is torch.optim.Adam
    assert str(each.state_dict()) == str(optimizer.state_dict())
    each.zero_grad()
    each.step()
fleet.stop_worker()
"""


def test_copies_of_an_optimizer_are_of_the_scripts_class(trainers):
    (process,) = trainers(COPIED_OPTIMIZER, ranks=(0,), size=1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
