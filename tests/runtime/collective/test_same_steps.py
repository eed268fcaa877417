"""Trainers that would train different models are told so, and what they may do alike goes on to work."""

import pytest

START = """
fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()
model = build(seed=0)
inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer = fleet.distributed_optimizer(inner, model=model)
parameters = list(model.parameters())
step = 0

def backward(model=model):
    optimizer.zero_grad()
    loss_of(model, step, rank).backward()

"""

OWN = """
for step in range(3):
    optimizer.zero_grad()
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss_of(model, step, rank), parameters)):
        parameter.grad = gradient
    optimizer.step()
"""

OWN_LATER = """
for step in range(3):
    backward()
    optimizer.step()
optimizer.zero_grad()
gradients = torch.autograd.grad(loss_of(model, 3, rank), parameters)
for parameter, gradient in zip(parameters, gradients):
    parameter.grad = gradient
optimizer.step()
"""

OWN_IN_A_CLOSURE = """
def closure():
    optimizer.zero_grad()
    loss = loss_of(model, step, rank)
    for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters)):
        parameter.grad = gradient
    return loss

optimizer.step(closure)
"""

OWN_BESIDE_A_BACKWARD = """
head = model[2]
backward(lambda x: head(model[0](x).detach()))  # reaches the head alone
for parameter, gradient in zip(model[0].parameters(), torch.autograd.grad(
    loss_of(model, step, rank), list(model[0].parameters())
)):
    parameter.grad = gradient
optimizer.step()
"""

SPARSE = """
for step in range(2):
    backward()
    optimizer.step()
optimizer.zero_grad()
parameters[0].grad = torch.ones(8, 6).to_sparse()
optimizer.step()
"""

NEVER_EXCHANGED = """
with optimizer.no_sync():
    backward()
optimizer.step()
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        pytest.param(
            OWN,
            ("does not come from it", "torch.autograd.backward(parameters, gradients)"),
            id="from-the-start",
        ),
        pytest.param(OWN_LATER, ("does not come from it",), id="later"),
        pytest.param(OWN_IN_A_CLOSURE, ("does not come from it",), id="in-a-closure"),
        pytest.param(OWN_BESIDE_A_BACKWARD, ("does not come from it",), id="beside-a-backward"),
        pytest.param(SPARSE, ("does not come from it",), id="a-sparse-one"),
        pytest.param(NEVER_EXCHANGED, ("were in no_sync(); expected the last pass",), id="all-in-no_sync"),
    ],
)
def test_a_step_on_gradients_that_nobody_averaged_is_refused(trainers, body, words):
    for process in trainers(START + body + "\nfleet.stop_worker()\n"):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2, err
        assert "the gradient of 0.weight is local to this trainer" in err
        for each in words:
            assert each in err
        assert "Traceback" not in err


def test_a_learning_rate_of_its_own_is_named_before_the_first_step(trainers):
    body = START.replace("lr=0.1", "lr=0.1 * (1 + rank)")
    first, second = trainers(body)
    for process, words in (
        (first, ") has lr=0.2 in param group 0 where this trainer, 0, has lr=0.1 in param group 0"),
        (second, ") has lr=0.1 in param group 0 where this trainer, 1, has lr=0.2 in param group 0"),
    ):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2, err
        assert words in err
        assert "in every trainer, with the same hyper-parameters" in err


OTHER_RATE = """
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
for step in range(6):
    backward()
    optimizer.step()
    scheduler.step(float(step) if rank == 2 and step > 1 else -float(step))  # a metric of its own
"""

SKIPPED = """
for step in range(6):
    backward()
    if rank == 2 and step == 3:
        continue
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("body", "odd", "usual", "when", "remedy"),
    [
        pytest.param(
            OTHER_RATE,
            "stepped with lr=0.05",
            "stepped with lr=0.1",
            " in param group 0 after the average of step 3's gradients",
            "a scheduler that follows a metric the mean over all trainers (fleet.all_reduce_worker)",
            id="another-learning-rate",
        ),
        pytest.param(
            SKIPPED,
            "made no optimizer.step()",
            "made one optimizer.step()",
            " after the average of step 3's gradients",
            "to decide whether to skip a step, combine the trainers' numbers first (fleet.all_reduce_worker)",
            id="a-step-skipped",
        ),
    ],
)
def test_another_step_is_named_with_the_next_gradients(trainers, body, odd, usual, when, remedy):
    for rank, process in enumerate(trainers(START + body, ranks=(0, 1, 2), size=3)):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2, err
        who, found, ours = (2, odd, usual) if rank != 2 else (0, usual, odd)
        assert f"trainer {rank}: trainer {who} (127.0.0.1:" in err
        assert f") {found}{when} where this trainer, {rank}, {ours}; expected" in err
        assert remedy in err
        assert "Traceback" not in err


def test_another_last_step_is_named_at_the_end(trainers):
    body = START + "backward()\nif rank == 0:\n    optimizer.step()\nfleet.stop_worker()\n"
    first, second = trainers(body)
    for process, words in (
        (
            first,
            ") made no optimizer.step() after the average of step 0's gradients where this trainer, 0, made",
        ),
        (
            second,
            ") made one optimizer.step() after the average of step 0's gradients where this trainer, 1, made",
        ),
    ):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 2, err
        assert words in err


LEGAL = """
fleet.init()
rank, size = fleet.worker_index(), fleet.worker_num()

def train(model, optimizer, loss):
    optimizer.step()  # on no gradients: changes nothing
    for step in range(8):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        loss(model, step).backward()
        if step == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)  # steps the momentum
            elif step == 1:
                parameter.grad = parameter.grad.clamp(-0.01, 0.01)
            elif step == 2:
                parameter.grad.data.mul_(0.5)
        if step not in (3, 5):  # skipped by all alike
            optimizer.step()
        if step == 4:
            optimizer.step()  # again, on the same gradients
        if step == 5:  # of several losses one gradient, as in gradient surgery
            first = [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.zero_grad()
            loss(lambda x: model[2](model[0](x).detach()), 100).backward()  # reaches the head alone
            for parameter, gradient in zip(model.parameters(), first):
                parameter.grad = gradient if parameter.grad is None else (gradient + parameter.grad) / 2
            optimizer.step()
        if step == 6:
            optimizer.zero_grad(set_to_none=False)
            optimizer.step()  # on zeros: momentum alone

def built():
    model = build(seed=0)
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(2)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

model, inner = built()
train(model, fleet.distributed_optimizer(inner, model=model), lambda model, step: loss_of(model, step, rank))
fleet.stop_worker()
alone, optimizer = built()
train(alone, optimizer, lambda model, step: sum(loss_of(model, step, each) for each in range(size)) / size)
for one, other in zip(alone.parameters(), model.parameters(), strict=True):
    torch.testing.assert_close(one, other)
"""


def test_what_all_trainers_do_alike_with_averaged_gradients_goes_on_to_work(trainers):
    for process in trainers(LEGAL):
        _, err = process.communicate(timeout=100)
        assert process.returncode == 0, err


def test_one_trainer_may_step_on_its_own_gradients(trainers):
    (only,) = trainers(START + OWN + "\nfleet.stop_worker()\n", ranks=(0,), size=1)
    _, err = only.communicate(timeout=100)
    assert only.returncode == 0, err
