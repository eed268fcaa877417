"""A job that other numbers of trainers resume goes on as one story: values, optimizer, steps and data."""

import pytest

RESUMED = """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STORY = ((2, 0, 0, 3), (3, 0, 2, 6), (3, 1, 0, 4), (1, 1, 12, 18), (1, 2, 0, 18))
STOPS = {2: 3, 3: 11}
generator = torch.Generator().manual_seed(7)
data = TensorDataset(torch.randn(36, 6, generator=generator), torch.randint(0, 3, (36,), generator=generator))

def exactly(gradient):  # of 1, 2 or 3 trainers these have exact means, whatever order they are added in
    return (gradient * 1024).round() * 3 / 1024

def built():
    model = build(seed=0)
    adam = torch.optim.Adam(model.parameters(), lr=0.02)
    return model, adam

def shares(size, rank, epoch):
    sampler = DistributedSampler(data, size, rank)
    sampler.set_epoch(epoch)
    return list(DataLoader(data, 2, sampler=sampler))

def loss_on(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

def simulated():
    model, adam = built()
    scheduler = torch.optim.lr_scheduler.StepLR(adam, 1, 0.5)
    losses = {}
    for size, epoch, first, last in STORY:
        everybodys = [shares(size, rank, epoch) for rank in range(size)]
        for step in range(first, last):
            parts = []
            for rank, batches in enumerate(everybodys):
                loss = loss_on(model, batches[step])
                losses.setdefault((size, rank), []).append(loss.item())
                parts.append([exactly(each) for each in torch.autograd.grad(loss, list(model.parameters()))])
            for parameter, *gradients in zip(model.parameters(), *parts):
                parameter.grad = sum(gradients) / size
            adam.step()
        if last == len(everybodys[0]):
            scheduler.step()
    return losses, model

fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()
model, adam = built()
for parameter in model.parameters():
    parameter.register_hook(exactly)
optimizer = fleet.distributed_optimizer(adam, model=model)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
fleet.init_worker()
fleet.load_check_point("saves")
losses = []

def train():
    loader = DataLoader(data, 2, sampler=DistributedSampler(data, size, rank))
    for _, batches in fleet.epochs(3, loader, scheduler):
        for batch in batches:
            if fleet.step == STOPS.get(size):
                return fleet.save_check_point("saves", fleet.TrainStatus())
            optimizer.zero_grad()
            loss = loss_on(model, batch)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
        scheduler.step()

train()
expected, whole = simulated()
assert losses == expected[size, rank], (losses, expected[size, rank])
if size == 1:
    assert fleet.step == 3 + 8 + 24
    assert all(map(torch.equal, model.parameters(), whole.parameters()))
fleet.stop_worker()
"""

LOCAL = """
fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()
model = build(seed=0)
strategy = fleet.DistributedStrategy(local_sgd=fleet.LocalSGD(k_steps=4))
optimizer = fleet.distributed_optimizer(torch.optim.Adam(model.parameters()), strategy, model=model)
fleet.load_check_point("saves")
assert fleet.step == (10 if size == 1 else 0)
if size == 2:
    for step in range(10):
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    fleet.save_check_point("saves", fleet.TrainStatus())
    torch.save([model.state_dict(), optimizer.state_dict()["state"]], f"saved-{rank}.pt")
else:
    values, states = torch.load("saved-0.pt")
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    for position, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, states[position][name]) for name, value in state.items())
fleet.stop_worker()
"""


@pytest.mark.parametrize(
    ("body", "sizes"),
    [
        pytest.param(RESUMED, (2, 3, 1), id="gradients-averaged"),
        pytest.param(LOCAL, (2, 1), id="parameters-averaged"),
    ],
)
def test_a_checkpoint_is_resumed_by_other_numbers_of_trainers_to_the_bit(trainers, body, sizes):
    for size in sizes:
        for process in trainers(body, ranks=tuple(range(size)), size=size):
            _, err = process.communicate(timeout=100)
            assert process.returncode == 0, err
