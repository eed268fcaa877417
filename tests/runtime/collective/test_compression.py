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
