"""Parameters that are trained, left alone for a while, and trained again."""

import pytest

BODY = """
fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()

def built():
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"a": torch.nn.Linear(6, 6), "b": torch.nn.Linear(6, 3)})

def trained(model, optimizer, ranks):
    for step, frozen in enumerate(FROZEN):
        for name, part in model.items():
            part.requires_grad_(name != frozen)
        optimizer.zero_grad()
        x, y = (torch.cat(parts) for parts in zip(*(batch(step, each) for each in ranks)))
        torch.nn.functional.cross_entropy(model["b"](model["a"](x)), y).backward()
        optimizer.step()

model = built()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer = fleet.distributed_optimizer(optimizer, fleet.DistributedStrategy(STRATEGY), model=model)
trained(model, optimizer, [rank])
values = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
most, least = (fleet.all_reduce_worker(values, mode=mode) for mode in ("max", "min"))
assert (most == least).all()
fleet.stop_worker()
assert all(parameter.isfinite().all() for parameter in model.parameters())
if not "STRATEGY":
    alone = built()
    trained(alone, torch.optim.SGD(alone.parameters(), lr=0.1), range(size))
    for found, expected in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
"""
POWER_SGD = "power_sgd=fleet.PowerSGD(matrix_rank=1, start_step=2)"


@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param([None] * 2 + ["a"] * 3 + [None] * 3, id="one-of-them-for-a-while"),
        pytest.param([None, "a", "b", "a", "b", None], id="in-turns"),
        pytest.param(["a", "a", "a", None, None], id="one-of-them-at-first"),
    ],
)
@pytest.mark.parametrize("strategy", ["", POWER_SGD], ids=["whole", "as-products"])
def test_what_is_trained_again_is_averaged_again(trainers, frozen, strategy):
    body = BODY.replace("FROZEN", repr(frozen)).replace("STRATEGY", strategy)
    for process in trainers(body):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
