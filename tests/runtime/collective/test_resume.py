"""Training that goes on in other processes is that of one that was never ended, to the bit."""

import pytest
import torch

BODY = """
fleet.init()
rank, phase = fleet.worker_index(), os.environ["PHASE"]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(6, 500), torch.nn.ReLU(), torch.nn.Linear(500, 3))
model.extra = torch.nn.Parameter(torch.ones(9000))
matrices = [each for each in model.parameters() if each.dim() > 1]
vectors = [each for each in model.parameters() if each.dim() == 1]  # no weight decay
groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
optimizer = fleet.distributed_optimizer(torch.optim.AdamW(groups, lr=0.01), model=model)
fleet.init_worker()
fleet.load_check_point(phase.partition("-")[0])

while fleet.step < 20:
    if phase == "parts-first" and fleet.step == int(os.environ["SAVED_AT"]):
        fleet.save_check_point("parts", fleet.TrainStatus())
        break
    if phase == "parts-then":
        assert fleet.step >= int(os.environ["SAVED_AT"])
    optimizer.zero_grad()
    loss = loss_of(model, fleet.step, rank)
    if fleet.step < int(os.environ["EXTRA_UNTIL"]):
        loss = loss + model.extra.square().mean() * torch.tensor([0.1, 0.3, 0.7, 1.1])[rank]
    loss.backward()
    optimizer.step()
else:
    torch.save(model.state_dict(), f"{phase}-{rank}")
fleet.stop_worker()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("saved_at", "extra_until"),
    [
        pytest.param(10, 20, id="all-are-used"),
        pytest.param(10, 5, id="one-is-not-used-any-more"),
        pytest.param(6, 5, id="the-next-pass-decides-the-order"),
    ],
)
def test_four_trainers_go_on_to_the_bit(trainers, tmp_path, saved_at, extra_until):
    for phase in ("whole", "parts-first", "parts-then"):
        started = trainers(
            BODY,
            ranks=(0, 1, 2, 3),
            size=4,
            PHASE=phase,
            SAVED_AT=str(saved_at),
            EXTRA_UNTIL=str(extra_until),
        )
        for process in started[-4:]:
            _, err = process.communicate(timeout=200)
            assert process.returncode == 0, err
    whole, parts = (torch.load(tmp_path / f"{phase}-0") for phase in ("whole", "parts-then"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())


WITH_A_TEACHER = """
fleet.init()
rank, phase = fleet.worker_index(), os.environ["PHASE"]
torch.manual_seed(phase == "parts-then")
model = torch.nn.ModuleDict({name: torch.nn.Linear(6, 6) for name in ("a", "b", "teacher")})
model["teacher"].requires_grad_(False)
trained = [*model["a"].parameters(), *model["b"].parameters()]
optimizer = fleet.distributed_optimizer(torch.optim.Adam(trained, lr=0.01), model=model)
fleet.init_worker()
model["a"].requires_grad_(not (phase == "parts-then" and FROZEN_AT_LOAD))
fleet.load_check_point(phase.partition("-")[0])
assert phase != "parts-then" or fleet.step == 10

while fleet.step < 20:
    if phase == "parts-first" and fleet.step == 10:
        fleet.save_check_point("parts", fleet.TrainStatus())
        break
    model["a"].requires_grad_(fleet.step not in FROZEN)
    optimizer.zero_grad()
    x, y = batch(fleet.step, rank)
    found = model["b"](model["a"](x))
    loss = torch.nn.functional.cross_entropy(found, y) + (found - model["teacher"](x)).square().mean()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(model["teacher"].parameters(), model["b"].parameters(), strict=True):
            slow.lerp_(fast, 0.1)
else:
    torch.save(model.state_dict(), f"{phase}-{rank}")
fleet.stop_worker()
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("frozen", "frozen_at_load"),
    [
        pytest.param((), False, id="a-teacher"),
        pytest.param((8, 9, 10), False, id="a-layer-at-the-save"),
        pytest.param((8, 9, 10), True, id="a-layer-at-the-save-and-the-load"),
        pytest.param((), True, id="a-layer-at-the-load"),
    ],
)
def test_what_is_frozen_goes_on_to_the_bit(trainers, tmp_path, frozen, frozen_at_load):
    body = WITH_A_TEACHER.replace("FROZEN_AT_LOAD", repr(frozen_at_load)).replace("FROZEN", repr(frozen))
    for phase in ("whole", "parts-first", "parts-then"):
        for process in trainers(body, PHASE=phase)[-2:]:
            _, err = process.communicate(timeout=100)
            assert process.returncode == 0, err
    whole = torch.load(tmp_path / "whole-0")
    for rank in (0, 1):
        parts = torch.load(tmp_path / f"parts-then-{rank}")
        assert [name for name, value in whole.items() if not torch.equal(value, parts[name])] == []
