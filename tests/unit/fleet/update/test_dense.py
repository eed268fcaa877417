"""The update of dense blocks: PyTorch's own mathematics after a reduction in a fixed order."""

from typing import Any

import pytest
import torch

from fleet.errors import ConfigurationError
from fleet.update import DenseUpdate

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
