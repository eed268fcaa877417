"""LocalSGD by real trainers: what it comes to, what is saved, and what trainers cannot average."""

import pytest

AVERAGED = """
fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()

def built():
    model = build(seed=0)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

model, sgd = built()
optimizer = fleet.distributed_optimizer(sgd, STRATEGY, model=model)
fleet.init_worker()
for step in range(20):
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()
found = [each.detach().clone() for each in model.parameters()]

trainers = [built() for _ in range(size)]
for step in range(20):
    for each, (other, sgd) in enumerate(trainers):
        sgd.zero_grad()
        loss_of(other, step, each).backward()
        sgd.step()
    if step + 1 in AVERAGED:
        with torch.no_grad():
            for values in zip(*(other.parameters() for other, _ in trainers)):
                mean = sum(value / size for value in values)
                for value in values:
                    value.copy_(mean)
expected = [each.detach() for each in trainers[rank][0].parameters()]
assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
assert fleet.step == 20
fleet.stop_worker()
torch.save(list(model.parameters()), f"end-{rank}.pt")
"""


@pytest.mark.parametrize(
    ("strategy", "averaged"),
    [
        pytest.param(
            "fleet.DistributedStrategy(local_sgd=fleet.LocalSGD(k_steps=8, begin_step=3))",
            (1, 2, 8, 16),
            id="a-strategy",
        ),
        pytest.param(
            "fleet.DistributeTranspilerConfig(collective_mode='local_sgd')",
            tuple(range(1, 21)),
            id="a-transpilers-config-in-place-of-a-strategy",
        ),
    ],
)
def test_it_is_what_it_is_said_to_be_to_the_bit(trainers, tmp_path, strategy, averaged):
    import torch

    for process in trainers(AVERAGED.replace("STRATEGY", strategy).replace("AVERAGED", repr(averaged))):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
    first, second = (torch.load(tmp_path / f"end-{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


RESUMED = """
fleet.init()
rank = fleet.worker_index()

def trained(steps, saved_after, folder):
    model = build(seed=rank)
    model.register_parameter("temperature", torch.nn.Parameter(torch.ones(())))
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    strategy = fleet.DistributedStrategy(local_sgd=fleet.LocalSGD(k_steps=4))
    optimizer = fleet.distributed_optimizer(adam, strategy, model=model)
    begin = 0
    if not saved_after:
        begin = fleet.load_check_point(folder).step
        assert begin == 10
    for step in range(begin, steps):
        optimizer.zero_grad()
        (loss_of(model, step, rank) * model.temperature).backward()
        optimizer.step()
        if step + 1 == saved_after:
            fleet.save_check_point(folder, fleet.TrainStatus())
            fleet.barrier_worker()
    return [each.detach().clone() for each in model.parameters()]

if not pathlib.Path("whole-0.pt").exists():
    torch.save(trained(20, 10, "saves"), f"whole-{rank}.pt")
else:
    found = trained(20, 0, "saves")
    assert all(torch.equal(*pair) for pair in zip(found, torch.load(f"whole-{rank}.pt"), strict=True))
fleet.stop_worker()
"""


def test_10_steps_and_10_more_from_a_checkpoint_are_20_to_the_bit(trainers):
    for _ in range(2):
        for process in trainers(RESUMED):
            _, err = process.communicate(timeout=100)
            assert process.returncode == 0, err


SAVED = """
fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()
model = build(seed=0)
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
strategy = fleet.DistributedStrategy(local_sgd=fleet.LocalSGD(k_steps=100))
optimizer = fleet.distributed_optimizer(sgd, strategy, model=model)
for step in range(3):
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()
kept = [*model.parameters(), *(sgd.state[each]["momentum_buffer"] for each in model.parameters())]
own = [each.detach().numpy().copy() for each in kept]
expected = [torch.from_numpy(fleet.all_reduce_worker(each / size)) for each in own]
assert not any(torch.equal(*pair) for pair in zip(kept, expected))
fleet.save_persistables(dirname="saves")
fleet.barrier_worker()
for each in kept:
    each.detach().zero_()
assert fleet.load_persistables(dirname="saves").step == 3
loaded = [*model.parameters(), *(sgd.state[each]["momentum_buffer"] for each in model.parameters())]
assert all(torch.equal(*pair) for pair in zip(loaded, expected, strict=True))
fleet.stop_worker()
"""


def test_what_save_persistables_saves_is_the_average(trainers):
    for process in trainers(SAVED):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


EXPORTED = """
from safetensors.torch import load_file

fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()
model = build(seed=0)
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
strategy = fleet.DistributedStrategy(local_sgd=fleet.LocalSGD(k_steps=8))
optimizer = fleet.distributed_optimizer(sgd, strategy, model=model)

def trained(steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step, rank).backward()
        optimizer.step()
    own = {name: each.numpy().copy() for name, each in model.state_dict().items()}
    return {name: torch.from_numpy(fleet.all_reduce_worker(each / size)) for name, each in own.items()}

def agrees(found, expected):
    assert found.keys() == expected.keys()
    return all(torch.equal(found[name], each) for name, each in expected.items())

expected = trained(range(11))
assert not agrees(model.state_dict(), expected)
fleet.save_inference_model("at-11")
assert rank or agrees(load_file("at-11/model.safetensors"), expected)
assert agrees(model.state_dict(), expected)  # of every trainer, which go on from it
expected = trained(range(11, 13))
assert agrees(fleet.export_state_dict(), expected)
trained(range(13, 16))
if fleet.is_first_worker():  # after the average of step 16 they are one: nobody has to meet
    assert agrees(fleet.export_state_dict(), model.state_dict())
trained(range(16, 18))
fleet.stop_worker()
if fleet.is_first_worker():
    fleet.save_inference_model("at-the-end")
    assert agrees(load_file("at-the-end/model.safetensors"), model.state_dict())
"""


def test_what_is_exported_between_two_averages_is_the_average(trainers):
    for process in trainers(EXPORTED):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


OTHER_STATE = """
fleet.init()
rank = fleet.worker_index()
model = build(seed=0)
optimizer = fleet.distributed_optimizer(
    torch.optim.Adam(model.parameters()),
    fleet.DistributedStrategy(local_sgd=fleet.LocalSGD(k_steps=4)),
    model=model,
)
(loss_of(model, 0, rank) if rank else model[2].bias.sum()).backward()
optimizer.step()
fleet.save_check_point("saves")
"""


def test_trainers_whose_optimizers_keep_other_tensors_are_named(trainers):
    for rank, process in enumerate(trainers(OTHER_STATE)):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2, err
        assert f"the optimizer of trainer {1 - rank} (127.0.0.1:" in err
        assert "so a checkpoint cannot average them" in err


ONE_SAVES = """
fleet.init()
rank = fleet.worker_index()
model = build(seed=0)
strategy = fleet.DistributedStrategy(local_sgd=fleet.LocalSGD(k_steps=4))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
for step in range(8):
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()
    if rank == 0 and step == 1:
        fleet.CALL
"""


@pytest.mark.parametrize(
    ("call", "named"),
    [
        ('save_check_point("saves")', "a checkpoint"),
        ("export_state_dict()", "fleet.export_state_dict"),
        ('save_inference_model("model")', "fleet.save_inference_model"),
    ],
)
def test_a_call_between_two_averages_that_only_one_trainer_makes_is_named(trainers, call, named):
    for process in trainers(ONE_SAVES.replace("CALL", call), FLEET_HEARTBEAT_SECONDS="0.5"):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2, err
        assert f"for the exchange of the state of the optimizers at {named}" in err
        assert "make the same calls on each" in err


ONE_EXPORTS_AT_THE_END = """
fleet.init()
rank = fleet.worker_index()
model = build(seed=0)
strategy = fleet.DistributedStrategy(local_sgd=fleet.LocalSGD(k_steps=4))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
for step in range(6):
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()
    optimizer.step()
if fleet.is_first_worker():
    fleet.save_inference_model("model")
fleet.stop_worker()
"""


def test_an_export_by_one_trainer_where_the_others_have_come_to_the_end_is_named(trainers):
    for process in trainers(ONE_EXPORTS_AT_THE_END):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2, err
        assert "has reached the exchange of the state of the optimizers at fleet.save_inference_model" in err
        assert "expected the same calls, in the same order, on every trainer" in err


LEFT_OUT = """
fleet.init()
rank = fleet.worker_index()
model = build(seed=0)
strategy = fleet.DistributedStrategy(local_sgd=fleet.LocalSGD(k_steps=4))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
for step in range(8):
    optimizer.zero_grad()
    loss = loss_of(model, step, rank)
    scaler.scale(loss * float("inf") if (rank, step) == (1, 2) else loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_a_step_that_one_trainer_leaves_out_is_named_at_the_next_average(trainers):
    one, none = (f"cleared the gradients of {which}" for which in ("one backward pass", "no backward pass"))
    for rank, process in enumerate(trainers(LEFT_OUT)):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2, err
        assert f") {none if rank else one} without a step after 2 steps where this trainer, " in err
        assert "combine the trainers' numbers" in err
