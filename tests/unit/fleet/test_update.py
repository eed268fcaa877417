"""The arithmetic of updates: PyTorch's own optimizers, norms over blocks, delay compensation."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ConfigurationError
from fleet.update import DenseUpdate, clip_coefficient, compensate_delay, sum_of_squares, total_of

CLASSES = [
    pytest.param(
        torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}, id="sgd"
    ),
    pytest.param(torch.optim.Adam, {"lr": 0.01, "amsgrad": True}, id="adam"),
    pytest.param(torch.optim.AdamW, {"lr": 0.01}, id="adamw"),
    pytest.param(torch.optim.Adagrad, {"lr": 0.1}, id="adagrad"),
    pytest.param(torch.optim.RMSprop, {"lr": 0.01, "centered": True}, id="rmsprop"),
    pytest.param(torch.optim.Adadelta, {}, id="adadelta"),
]


class Renamed(torch.optim.SGD):
    """Takes its options by another way than its constructor says."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)


def options_of(optimizer_class: type[torch.optim.Optimizer], chosen: dict[str, Any]) -> dict[str, Any]:
    optimizer = optimizer_class([torch.zeros(1)], **chosen)
    return {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}


@pytest.mark.parametrize(("optimizer_class", "chosen"), CLASSES)
def test_two_slices_are_stepped_as_the_whole_is(optimizer_class, chosen):
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(10, 7))
    optimizer = optimizer_class([whole], **chosen)
    arena = whole.detach().clone()
    options = options_of(optimizer_class, chosen)
    updates = [DenseUpdate(optimizer_class, part, options) for part in (arena[:6], arena[6:])]
    for step in range(5):
        gradient = torch.randn(10, 7)
        whole.grad = gradient.clone()
        optimizer.param_groups[0]["lr"] = options["lr"] / (step + 1)
        optimizer.step()
        for update, part in zip(updates, (gradient[:6], gradient[6:]), strict=True):
            update.apply(part, {"lr": options["lr"] / (step + 1)})
    assert torch.equal(arena, whole)


def test_a_rate_that_is_a_tensor_is_on_the_cpu_where_the_script_has_another_default_device():
    value = torch.ones(2, 3)
    options = options_of(torch.optim.SGD, {"lr": 0.5})
    with torch.device("meta"):
        update = DenseUpdate(torch.optim.SGD, value, options, tensors={"lr": "float32"})
        update.apply(torch.ones(2, 3, device="cpu"), {"lr": 0.25})
    assert torch.equal(value, torch.full((2, 3), 0.75))


@pytest.mark.parametrize("foreach", [None, True])
@pytest.mark.parametrize(
    "optimizer_class",
    [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam],
)
def test_a_rate_that_is_a_tensor_steps_as_a_tensor_does(optimizer_class, foreach):
    torch.manual_seed(0)
    start, gradients = torch.randn(10, 7), torch.randn(8, 10, 7)
    differs = False
    for lr in (0.7, 0.1, 0.05, 0.01, 3e-3, 1e-3):
        whole = torch.nn.Parameter(start.clone())
        value, number = start.clone(), start.clone()
        optimizer = optimizer_class([whole], lr=torch.tensor(lr))
        options = {**options_of(optimizer_class, {"lr": lr}), "foreach": foreach}
        update = DenseUpdate(optimizer_class, value, options, tensors={"lr": "float32"})
        as_number = DenseUpdate(optimizer_class, number, options)
        for step, gradient in enumerate(gradients):
            rate = optimizer.param_groups[0]["lr"].fill_(lr * 0.9**step)
            whole.grad = gradient.clone()
            for each in (update, as_number):
                each.apply(gradient.clone(), {"lr": rate.item()})
            optimizer.step()
        assert torch.equal(value, whole)
        differs = differs or not torch.equal(number, whole)
    assert differs or optimizer_class is not torch.optim.Adam, "a number has other bits"


@pytest.mark.parametrize("optimizer_class", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_fused_update_is_the_fused_optimizers_own(optimizer_class):
    torch.manual_seed(0)
    whole = torch.nn.Parameter(torch.randn(10, 7))
    value = whole.detach().clone()
    optimizer = optimizer_class([whole], lr=0.1, weight_decay=0.01, fused=True)
    options = options_of(optimizer_class, {"lr": 0.1, "weight_decay": 0.01, "foreach": True})
    update = DenseUpdate(optimizer_class, value, options, fused=True)
    for _ in range(3):
        whole.grad = torch.randn(10, 7)
        update.apply(whole.grad.clone(), {"lr": 0.1})
        optimizer.step()
    assert torch.equal(value, whole)


def test_a_class_without_a_fused_kernel_is_refused_by_name():
    options = options_of(torch.optim.Adadelta, {})
    with pytest.raises(
        ConfigurationError, match=r"server_kernels is 'fused', and Adadelta has no fused kernel"
    ):
        DenseUpdate(torch.optim.Adadelta, torch.zeros(3), options, fused=True)


def test_the_state_has_torchs_entries_and_none_before_the_first_step():
    update = DenseUpdate(torch.optim.Adam, torch.zeros(3), options_of(torch.optim.Adam, {"lr": 0.1}))
    assert update.state() == {}
    update.apply(torch.ones(3), {})
    assert set(update.state()) == {"step", "exp_avg", "exp_avg_sq"}


def test_options_that_no_constructor_names_are_set_all_the_same():
    value = torch.zeros(2)
    DenseUpdate(Renamed, value, {"lr": 0.5, "momentum": 0}).apply(torch.ones(2), {})
    assert torch.equal(value, torch.full((2,), -0.5))


def test_a_class_that_refuses_its_options_is_named():
    with pytest.raises(ConfigurationError, match=r"SGD cannot be built .*Invalid learning rate: -1"):
        DenseUpdate(torch.optim.SGD, torch.zeros(2), {"lr": -1})


def test_a_server_never_captures_a_graph():
    options = {**options_of(torch.optim.Adam, {"lr": 0.1}), "capturable": True}
    DenseUpdate(torch.optim.Adam, torch.zeros(2), options).apply(torch.ones(2), {})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("cut", [1, 40, 99])
def test_a_norm_of_parts_is_the_norm_of_the_whole(dtype, scale, cut):
    whole = (torch.randn(100, generator=torch.Generator().manual_seed(0)) * scale).to(dtype)
    found = total_of({1: sum_of_squares(whole[cut:]), 0: sum_of_squares(whole[:cut])})
    assert found**0.5 == pytest.approx(whole.double().norm().item(), rel=1e-12)


@pytest.mark.parametrize("max_norm", [0.1, 1.0, 10.0, 1e4])
@pytest.mark.parametrize("value", [0.0, 1e-4, 3.0, float("inf"), float("nan")])
def test_the_coefficient_is_torch_s(max_norm, value):
    parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    parameter.grad = torch.tensor([value, -2 * value], dtype=torch.float64)
    before = parameter.grad.clone()
    torch.nn.utils.clip_grad_norm_(parameter, max_norm)
    ours = before * clip_coefficient(sum_of_squares(before), max_norm)
    torch.testing.assert_close(ours, parameter.grad, rtol=1e-12, atol=0.0, equal_nan=True)


def test_a_large_gradient_does_not_overflow():
    assert sum_of_squares(torch.full((4,), 1e38)) == pytest.approx(4e76)
    assert clip_coefficient(math.inf, 1.0) == 0.0


@given(st.dictionaries(st.integers(0, 50), st.floats(0, 1e30), min_size=1), st.randoms())
def test_the_order_of_the_parts_changes_no_bit(sums, random):
    shuffled = list(sums.items())
    random.shuffle(shuffled)
    assert total_of(dict(shuffled)) == total_of(sums)


def test_a_gradient_without_delay_is_itself():
    gradient, value = torch.randn(3, 2), torch.randn(3, 2)
    assert torch.equal(compensate_delay(gradient, value, value.clone()), gradient)


def test_the_drift_counts_with_the_square_of_the_gradient():
    found = compensate_delay(torch.tensor([2.0, -3.0]), torch.tensor([1.5, 1.0]), torch.tensor([1.0, 2.0]))
    assert found.tolist() == [2.0 + 4.0 * 0.5, -3.0 + 9.0 * -1.0]


def test_nothing_is_modified():
    tensors = [torch.ones(2), torch.full((2,), 3.0), torch.zeros(2)]
    copies = [each.clone() for each in tensors]
    compensate_delay(*tensors)
    assert all(torch.equal(each, copy) for each, copy in zip(tensors, copies, strict=True))


def test_other_shapes_are_named():
    with pytest.raises(ValueError, match=r"gradient of shape \[2\], a value of \[3\] and .* \[2\]"):
        compensate_delay(torch.ones(2), torch.ones(3), torch.ones(2))
