"""A gradient that is no number, averaged over all trainers: left out by all of them, or an error on each."""

import pytest

SCRIPT = """
fleet.init()
rank = fleet.worker_index()
model = build(seed=0)
inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
strategy = fleet.DistributedStrategy(non_finite="ACTION")
optimizer = fleet.distributed_optimizer(inner, strategy, model=model)
held = [parameter.detach().clone() for parameter in model.parameters()]
for step in range(3):
    before = [parameter.detach().clone() for parameter in model.parameters()]
    STEP
    same = all(torch.equal(*pair) for pair in zip(before, model.parameters()))
    assert same is (step == 1), step
assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
fleet.stop_worker()
"""


PLAIN = """closure()
    optimizer.step()"""
CLOSURE = """
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        (loss * float("nan") if step == 1 and rank == 1 else loss).backward()
        return loss

"""


@pytest.mark.parametrize("step", [PLAIN, "optimizer.step(closure)", "optimizer.step(closure=closure)"])
@pytest.mark.parametrize("action", ["skip", "stop"])
def test_a_step_with_a_gradient_that_is_no_number(trainers, action, step):
    script = SCRIPT.replace("ACTION", action).replace("    STEP", CLOSURE + "    " + step)
    for rank, process in enumerate(trainers(script)):
        _, err = process.communicate(timeout=100)
        said = f"holds NaN or infinity on trainer {rank} in step 1"
        if action == "skip":
            assert process.returncode == 0, err
            assert said in err
            assert "such steps are skipped. This is logged once" in err
        else:
            assert process.returncode != 0
            assert f"the gradient of 0.weight {said}" in err
            assert "'skip' skips such steps" in err


SCALED = """
fleet.init()
rank = fleet.worker_index()
model = build(seed=0)
inner = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
strategy = fleet.DistributedStrategy(STRATEGY)
optimizer = fleet.distributed_optimizer(inner, strategy, model=model)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
for step in range(3):
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer.zero_grad()
    loss = scaler.scale(loss_of(model, step, rank))
    (loss * float("inf") if step == 1 and rank == 1 else loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, before, model.parameters())) is (step == 1), step
fleet.stop_worker()
"""


@pytest.mark.parametrize("action", ["warn", "stop"])
def test_what_a_gradscaler_leaves_out_of_a_fused_optimizer_is_its_own_business(trainers, action):
    for process in trainers(SCALED.replace("STRATEGY", f"non_finite='{action}'")):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err
        assert "NaN" not in err


def test_a_gradscaler_beside_a_fused_optimizer_is_refused_with_local_sgd(trainers):
    for process in trainers(SCALED.replace("STRATEGY", "local_sgd=fleet.LocalSGD(k_steps=4)")):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2, err
        assert "use torch.bfloat16, which needs none" in err
