"""The averaging of gradients in one process: what it hands back, and what it refuses."""

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fleet.collective.copies import Copies
from fleet.collective.gradients import AverageCheck, BackwardPass, GradientAverager
from fleet.collective.optimizer import distribute, named_parameters
from fleet.collective.world import World
from fleet.errors import ConfigurationError, FleetError
from fleet.process.finite import FiniteCheck
from tests.support.collective import GroupOfOne

pytestmark = pytest.mark.usefixtures("process_group")


def distributed(
    optimizer: torch.optim.Optimizer,
    model: torch.nn.Module | None = None,
    group: GroupOfOne | None = None,
    **options: Any,
) -> Any:
    copies = Copies(named_parameters(optimizer, model), model, cast("Any", group or GroupOfOne()))
    averager = GradientAverager(copies, BackwardPass(copies.group), **options)
    averager.start()
    finite = FiniteCheck("warn", 0, lambda: 0)
    return distribute(optimizer, copies, averager, model, finite=finite)


def convolution() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("late", [False, True], ids=["from-the-start", "once-it-is-distributed"])
def test_fused_optimizers_step_parameters_of_any_layout(late):
    first, second = convolution(), convolution()
    if late:
        second.to(memory_format=torch.contiguous_format)
    alone = torch.optim.Adam(first.parameters(), lr=0.1, fused=True)
    together = distributed(torch.optim.Adam(second.parameters(), lr=0.1, fused=True))
    second.to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 8, 8)
    for _ in range(3):
        for model, optimizer in ((first, alone), (second, together)):
            optimizer.zero_grad()
            model(images).square().sum().backward()
            optimizer.step()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(one, other)


def linear() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


def test_buckets_are_made_again_when_a_model_moves():
    """Another dtype stands in for another device: a bucket holds gradients of one of each."""
    group, first, second = GroupOfOne(), linear(), linear()
    alone = torch.optim.SGD(first.parameters(), lr=0.1)
    together = distributed(torch.optim.SGD(second.parameters(), lr=0.1), second, group)
    for dtype in (torch.float64, torch.float64, torch.float32):
        for model, optimizer in ((first, alone), (second, together)):
            model.half().to(dtype)  # there and back: gradients move with their model
            optimizer.zero_grad()
            model(torch.ones(1, 2, dtype=dtype)).square().sum().backward()
            optimizer.step()
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    assert group.used == [{torch.device("cpu")}] * 3  # at the start, and for each of the two kinds


def test_an_unfrozen_parameter_is_named():
    model = linear()
    model.bias.requires_grad_(False)
    optimizer = distributed(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    model.bias.requires_grad_(True)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigurationError, match="bias has a gradient, but was frozen when"):
        optimizer.step()


def test_parameters_added_later_are_refused():
    model, more = linear(), {"params": [torch.nn.Parameter(torch.ones(1))]}
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = distributed(inner, model)
    with pytest.raises(ConfigurationError, match=r"add_param_group\(\) after distributed_optimizer"):
        optimizer.add_param_group(more)
    inner.add_param_group(more)
    with pytest.raises(ConfigurationError, match=r"has 3 parameters, and had 2 when .* call add_param_group"):
        optimizer.step()


@pytest.mark.parametrize(
    ("steps_with_last", "from_step"),
    [
        pytest.param(None, 1, id="all-are-used"),
        pytest.param(0, 1, id="the-last-is-never-used"),
        pytest.param(1, 3, id="the-last-is-used-in-the-first-step"),
    ],
)
def test_buckets_are_sent_during_the_backward_pass(steps_with_last, from_step):
    """Whatever the order of the optimizer is, and though one gradient never comes, or no more."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    last = torch.nn.Parameter(torch.ones(64))
    if steps_with_last is not None:
        model.register_parameter("last", last)
    matrices = [each for each in model.parameters() if each.dim() > 1]
    vectors = [each for each in model.parameters() if each.dim() == 1]  # no weight decay
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    sgd = torch.optim.SGD(groups, lr=0.1)
    events: list[str] = []

    def noted(_, bucket):
        events.append("leaves")
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    distributed(sgd, model, bucket_bytes=4 * 64 * 64, compression=lambda _: noted)
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda _: events.append("comes"))
    for step in range(6):
        events.clear()
        sgd.zero_grad()
        outputs = model(torch.ones(1, 64))
        (outputs + last if step < (steps_with_last or 0) else outputs).sum().backward()
        before = events[: events.index("leaves")].count("comes")
        if step >= from_step:
            assert before < events.count("comes") / 2, events
            assert before <= 4, events
            assert events.count("leaves") > 4


@pytest.mark.parametrize("to_none", [True, False], ids=["set-to-none", "zeroed"])
def test_gradients_are_views_of_buckets(to_none):
    model = linear()
    came: dict[torch.Tensor, int] = {}
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(lambda each: came.update({each: each.grad.data_ptr()}))
    optimizer = distributed(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for passes in range(3):
        optimizer.zero_grad(set_to_none=to_none)
        model(torch.ones(1, 2)).sum().backward()
        gradients = {each: cast("torch.Tensor", each.grad) for each in model.parameters()}
        assert len({each.untyped_storage().data_ptr() for each in gradients.values()}) == 1
        copied = to_none or not passes
        assert [came[each] != average.data_ptr() for each, average in gradients.items()] == [copied, copied]


def fail(_: torch.Tensor) -> torch.Tensor:
    raise ValueError("no way back")


@pytest.mark.parametrize("then", ["backward", "step"])
def test_the_call_after_a_failed_backward_pass_says_so(then):
    model = torch.nn.Sequential(linear(), torch.nn.Linear(1, 1))
    optimizer = distributed(torch.optim.SGD(model.parameters(), lr=0.1), model)
    hidden = model[0](torch.ones(1, 2))
    hidden.register_hook(fail)
    with pytest.raises(ValueError, match="no way back"):
        model[1](hidden).sum().backward()
    loss = model(torch.ones(1, 2)).sum()
    with pytest.raises(FleetError, match="the backward pass of step 0 was ended by an error"):
        optimizer.step() if then == "step" else loss.backward()


def of_two(model: torch.nn.Module) -> Any:
    """Return a distributed optimizer that takes itself for one of two."""
    group = GroupOfOne()
    group.world = World(0, 2, "localhost", 1)
    return distributed(torch.optim.SGD(model.parameters(), lr=0.1), model, group)


@pytest.mark.parametrize("passes", [1, 2], ids=["the-first", "a-later-one"])
def test_two_steps_may_use_the_same_averages(passes):
    model = linear()
    optimizer = of_two(model)
    for _ in range(passes):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    weight, _ = model.parameters()
    before = weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(weight.detach(), before - 0.1)


@pytest.mark.parametrize("passes", [1, 2], ids=["of-the-first-pass", "of-a-later-one"])
def test_a_sum_made_in_no_sync_must_be_averaged_before_a_step(passes):
    model = linear()
    optimizer = of_two(model)
    for _ in range(passes):
        optimizer.zero_grad(set_to_none=False)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    with optimizer.no_sync():
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ConfigurationError, match=r"the gradient of weight .* were in no_sync\(\)"):
        optimizer.step()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_create_graph_is_refused_by_name():
    model = linear()
    distributed(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with pytest.raises(ConfigurationError, match=r"create_graph=True\) gives differentiable gradients"):
        model(torch.ones(1, 2)).square().sum().backward(create_graph=True)


def test_a_penalty_on_gradients_may_be_part_of_the_loss():
    models = linear(), linear()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    optimizers[1] = distributed(optimizers[1], models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        inputs = torch.ones(1, 2, requires_grad=True)
        loss = model(inputs).square().sum()
        (gradient,) = torch.autograd.grad(loss, inputs, create_graph=True)
        (loss + gradient.square().sum()).backward()
        optimizer.step()
    assert torch.equal(models[0].weight, models[1].weight)
    assert not torch.equal(models[0].weight, linear().weight)


class Undefined(torch.autograd.Function):
    """Passes its input on, and leaves the gradient of it undefined."""

    @staticmethod
    def forward(*values: Any) -> torch.Tensor:
        return cast("torch.Tensor", values[-1]).clone()

    @staticmethod
    def backward(*_: Any) -> None:
        return None


@pytest.mark.parametrize("first", [True, False], ids=["before-any-other", "after-another"])
@pytest.mark.parametrize(
    "undefined_in",
    [
        pytest.param({0, 1, 2, 3, 4, 5}, id="in-each-pass"),
        pytest.param({0}, id="in-the-first-pass"),
        pytest.param({2, 3, 5}, id="in-later-passes"),
    ],
)
def test_an_undefined_gradient_is_none(undefined_in, first):
    left, other = linear(), linear()
    model = torch.nn.ModuleList([left, other])
    optimizer = distributed(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(6):
        optimizer.zero_grad()
        outputs = []
        for branch in (other, left) if first else (left, other):  # autograd begins with what came last
            values = branch(torch.ones(1, 2))
            undefined = branch is left and step in undefined_in
            outputs.append(Undefined.apply(values) if undefined else values)
        torch.cat(outputs).sum().backward()
        assert optimizer.fleet_synchronizer.steps.number == step + 1
        ones = torch.ones(1, 2)
        expected = [None if step in undefined_in else ones, ones]
        for found, each in zip((left.weight.grad, other.weight.grad), expected, strict=True):
            assert found is each is None or torch.equal(
                cast("torch.Tensor", found), cast("torch.Tensor", each)
            )
        optimizer.step()


class Leaf:
    """An optimizer with one parameter, whose gradients nobody averages."""

    def __init__(self, backward: BackwardPass, events: list[str], name: str) -> None:
        self.steps: Any = SimpleNamespace(number=3)
        self.device = torch.device("cpu")
        self.parameter = torch.ones(1, requires_grad=True)
        self.rest = torch.ones(1, requires_grad=True)
        self._events, self._name = events, name
        self.parameter.register_post_accumulate_grad_hook(lambda _: backward.reach(cast("Any", self)))
        self.rest.register_post_accumulate_grad_hook(lambda _: events.append(f"{name} leaves"))
        backward.add(cast("Any", self))

    def remaining_gradients(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(self.rest, torch.zeros(1))]

    def hand_back(self) -> None:
        self._events.append(f"{self._name} hands back")


@pytest.fixture
def backward() -> BackwardPass:
    group = SimpleNamespace(waiting=lambda *_: contextlib.nullcontext())
    return BackwardPass(cast("Any", group))


@pytest.mark.parametrize("first", [0, 1])
def test_all_remaining_gradients_are_sent_before_any_average_is_waited_for(backward, first):
    events: list[str] = []
    leaves = [Leaf(backward, events, name) for name in "ab"]
    loss = leaves[first].parameter * 1
    (loss + leaves[1 - first].parameter.exp().exp()).backward()
    assert sorted(events[:2]) == ["a leaves", "b leaves"]
    assert events[2:] == ["a hands back", "b hands back"]  # in one order, whichever was reached first


def test_a_pass_that_an_error_ended_is_reported(backward):
    leaf = Leaf(backward, [], "a")

    def fail(_: torch.Tensor) -> None:
        raise ValueError("no way back")

    late = torch.ones(1, requires_grad=True)
    late.register_hook(fail)
    backward.check_ended()
    with pytest.raises(ValueError, match="no way back"):
        (late.exp().exp() + leaf.parameter).backward()
    with pytest.raises(FleetError, match="the backward pass of step 3 was ended by an error"):
        backward.check_ended()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_nested_pass_must_not_end_the_outer_one(backward, reentrant):
    leaf = Leaf(backward, [], "a")
    start = torch.ones(1, requires_grad=True)
    loss = checkpoint(lambda x: x * leaf.parameter, start, use_reentrant=reentrant)
    if reentrant:
        with pytest.raises(ConfigurationError, match="pass use_reentrant=False"):
            loss.sum().backward()
    else:
        loss.sum().backward()
        backward.check_ended()


@pytest.fixture
def parameters() -> list[torch.Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(2)]


@pytest.fixture
def check(parameters: list[torch.Tensor]) -> AverageCheck:
    return AverageCheck(list(zip("ab", parameters, strict=True)))


def gradients(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what a reducer has come to: zeros of what nobody uses."""
    return [torch.zeros(2) if each.grad is None else each.grad for each in parameters]


def test_a_gradient_not_averaged_since_the_last_step_is_named(check, parameters):
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    with pytest.raises(ConfigurationError, match="the gradient of a is local to this trainer"):
        check.check()
    check.average(gradients(parameters), captured=False)
    check.check()
    assert check.step()
    check.check()  # on the same averages once more
    parameters[1].grad = torch.ones(2)
    with pytest.raises(ConfigurationError, match="the gradient of b is"):
        check.check()
    check.accumulate(1)
    with pytest.raises(ConfigurationError, match=r"were in no_sync\(\)"):
        check.check()


@pytest.mark.parametrize("stepped", [False, True], ids=["before-a-step", "after-it"])
def test_an_average_changed_in_no_sync_is_this_trainers_own(check, parameters, stepped):
    parameters[0].grad = torch.ones(2)
    check.average(gradients(parameters), {1}, captured=False)
    if stepped:
        check.step()
        parameters[0].grad.zero_()  # as zero_grad(set_to_none=False) does
    parameters[0].grad += 1
    check.accumulate(0)
    with pytest.raises(ConfigurationError, match=r"the gradient of a is .* were in no_sync\(\)"):
        check.check()
    check.average(gradients(parameters), {1}, captured=False)
    check.check()


def test_an_average_restored_after_no_sync_may_be_used(check, parameters):
    average = parameters[0].grad = torch.ones(2)
    check.average(gradients(parameters), {1}, captured=False)
    parameters[0].grad = torch.zeros(2)
    check.accumulate(0)
    parameters[0].grad = average
    check.check()


def test_zeros_are_the_same_everywhere(check, parameters):
    parameters[0].grad = torch.zeros(2)
    check.check()
    parameters[0].grad = torch.zeros(2).to_sparse()
    with pytest.raises(ConfigurationError, match="the gradient of a"):
        check.check()


def test_a_step_without_gradients_changes_nothing(check, parameters):
    assert not check.step()
    check.average(gradients(parameters), {0, 1}, captured=False)
    assert not check.step()


def test_replays_of_a_graph_are_not_checked(check, parameters):
    check.average(gradients(parameters), captured=True)
    check.step()
    parameters[0].grad = torch.ones(2)
    check.check()
