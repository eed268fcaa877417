"""Hooks of the script's own, which run while the averages of a pass are awaited, too."""

FAILING = """
fleet.init()
rank = fleet.worker_index()
model = build(seed=0)
model.unused = torch.nn.Parameter(torch.ones(3))
model.unused.register_hook(lambda gradient: gradient.view(7))  # it is given zeros when the pass ends
optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model=model)
loss_of(model, 0, rank).backward()
"""


def test_an_error_of_a_hook_is_told_as_it_is_and_blames_no_connection(trainers, tmp_path):
    for rank, process in enumerate(trainers(FAILING)):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 1, err
        assert "RuntimeError: shape '[7]' is invalid for input of size 3" in err
        assert "every trainer is alive" not in err
        assert "shape '[7]' is invalid" in (tmp_path / f"words-{rank}").read_text()


OF_OPTIMIZERS = """
from torch.optim.optimizer import register_optimizer_step_pre_hook

fleet.init()
rank = fleet.worker_index()
model = build(seed=0)
given = torch.optim.SGD(model.parameters(), lr=0.1)
calls = {}


def note(name):
    def hook(optimizer, *rest):
        calls.setdefault(name, []).append(optimizer)

    return hook


def halve(optimizer, args, kwargs):
    for parameter in model.parameters():
        parameter.grad.mul_(0.5)


def register(optimizer, when):
    optimizer.register_step_pre_hook(note(f"pre, {when}"))
    optimizer.register_step_post_hook(note(f"post, {when}"))
    optimizer.register_state_dict_pre_hook(note(f"state, {when}"))
    optimizer.register_load_state_dict_post_hook(note(f"load, {when}"))


given.register_step_pre_hook(halve)
register(given, "before")
register_optimizer_step_pre_hook(note("all"))
optimizer = fleet.distributed_optimizer(given, model=model)
register(optimizer, "after")
register(given, "after, on what was given")

alone = build(seed=0)
plain = torch.optim.SGD(alone.parameters(), lr=0.05)
for step in range(5):
    optimizer.zero_grad()
    loss_of(model, step, 0).backward()  # one batch on all trainers: the average is its gradient
    optimizer.step()
    for each in alone.parameters():
        each.grad = None
    loss_of(alone, step, 0).backward()
    plain.step()
optimizer.load_state_dict(optimizer.state_dict())

ours = {name: [each is optimizer for each in found] for name, found in calls.items()}
times = ("before", "after", "after, on what was given")
assert ours.pop("all") == [True, False] * 5, ours
assert ours == {
    **{f"{call}, {when}": [True] * 5 for call in ("pre", "post") for when in times},
    **{f"{call}, {when}": [True] for call in ("state", "load") for when in times},
}, ours
for one, other in zip(model.parameters(), alone.parameters()):
    assert torch.equal(one, other)
fleet.stop_worker()
"""


def test_hooks_of_optimizers_are_called_as_in_one_process(trainers):
    for process in trainers(OF_OPTIMIZERS):
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
