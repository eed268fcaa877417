"""Gradients that travel as fewer bytes: how many, and what is learned from them."""

import pytest

COUNTED = """
sent = 0
all_reduce = torch.distributed.all_reduce

def counted(tensor, *args, **options):
    global sent
    sent += tensor.numel() * tensor.element_size()
    return all_reduce(tensor, *args, **options)

torch.distributed.all_reduce = counted  # the hooks' own calls; a bucket as it is leaves without one
fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()

def built():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 400), torch.nn.Tanh(), torch.nn.Linear(400, 3))

def trained(model, optimizer, ranks):
    for step in range(STEPS):
        optimizer.zero_grad()
        before = sent
        (sum(loss_of(model, step, each) for each in ranks) / len(ranks)).backward()
        last = sent - before
        optimizer.step()
    return last

model = built()
strategy = fleet.DistributedStrategy(FIELD)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
taken = trained(model, optimizer, [rank])
values = sum(parameter.numel() for parameter in model.parameters())
notes = 8 * (4 + 32)
fleet.stop_worker()
alone = built()
trained(alone, torch.optim.SGD(alone.parameters(), lr=0.1), range(size))
"""

ROUNDED = """
assert taken == 2 * values + notes, (taken, values)
for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
    torch.testing.assert_close(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
    assert not torch.equal(found, expected)
"""


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 1e-2), ("float16", 1e-3)])
def test_rounded_gradients_take_half_the_bytes(trainers, dtype, tolerance):
    body = COUNTED.replace("FIELD", f"wire_dtype={dtype!r}").replace("STEPS", "8")
    for process in trainers(body + ROUNDED.replace("TOLERANCE", str(tolerance))):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


FACTORIZED = """
assert taken - notes < 2.2 * values, (taken, values)  # of 4; the vectors travel as they are
first, found, expected = (
    torch.cat([parameter.detach().flatten() for parameter in each.parameters()])
    for each in (built(), model, alone)
)
assert (found - expected).norm() < 0.5 * (expected - first).norm()
"""


def test_matrices_travel_as_products_of_narrow_ones(trainers):
    field = "power_sgd=fleet.PowerSGD(matrix_rank=1, start_step=3)"
    for process in trainers(COUNTED.replace("FIELD", field).replace("STEPS", "20") + FACTORIZED):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


OVERFLOWING = """
fleet.init()
rank = fleet.worker_index()
model = build(seed=0)
scaled, only_a_vector = SCALED, ONLY_A_VECTOR
strategy = fleet.DistributedStrategy(
    power_sgd=fleet.PowerSGD(matrix_rank=1, start_step=2), non_finite="warn" if scaled else "skip"
)
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
losses, missing = [], []

def overflow(gradient):
    return gradient * float("inf") if (rank, step) == (1, 5) else gradient

for parameter in [model[0].bias] if only_a_vector else model.parameters():
    parameter.register_hook(overflow)
for step in range(20):
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    loss = loss_of(model, 0, rank)
    losses.append(float(fleet.all_reduce_worker(loss.item())))
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True)):
        missing.append(step)
assert missing == [5], missing
assert losses[6] == losses[5], losses
assert all(later < earlier for earlier, later in zip(losses[6:], losses[7:])), losses
fleet.stop_worker()
torch.save(list(model.parameters()), f"end-{rank}.pt")
"""


@pytest.mark.parametrize(
    ("scaled", "only_a_vector"),
    [
        pytest.param(True, False, id="a-gradscaler-skips"),
        pytest.param(False, False, id="the-strategy-skips"),
        pytest.param(False, True, id="in-what-travels-as-it-is"),
    ],
)
def test_products_go_on_after_one_gradient_that_overflows(trainers, tmp_path, scaled, only_a_vector):
    import torch

    body = OVERFLOWING.replace("ONLY_A_VECTOR", repr(only_a_vector)).replace("SCALED", repr(scaled))
    for process in trainers(body):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
    first, second = (torch.load(tmp_path / f"end-{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


OF_EVERY_FORM = """
fleet.init()
rank = fleet.worker_index()
model = build(seed=0)
model.scale, model.none = (torch.nn.Parameter(torch.ones(shape)) for shape in ((), (0, 4)))
strategy = fleet.DistributedStrategy(power_sgd=fleet.PowerSGD(matrix_rank=1, start_step=2))
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), strategy, model=model)
for step in range(4):
    optimizer.zero_grad()
    (model.scale * (loss_of(model, step, rank) + model.none.sum())).backward()
    losses = [loss_of(model, step, each).detach() for each in (0, 1)]
    torch.testing.assert_close(model.scale.grad, sum(losses) / 2)
    optimizer.step()
fleet.stop_worker()
"""


def test_beside_products_a_scalar_travels_as_it_is(trainers):
    for process in trainers(OF_EVERY_FORM):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
