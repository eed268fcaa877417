"""Paddle's optimizers as classes of torch.optim, against 20 steps of paddlepaddle 1.8.5."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from fleet import optim
from fleet.errors import TranspileError
from fleet.parameter_server.modes.agreement import clip_coefficient
from fleet.parameter_server.store import DenseUpdate
from fleet.plan.elementwise import try_out
from fleet.plan.optimizers import class_path, optimizer_class_at
from tests.support.paddle_steps import (
    ARRAYS,
    CASES,
    CLASSES,
    CONSTANTS,
    LAZY,
    NAMES,
    RECORD,
    SETTINGS,
    TOLERANCE,
    give_gradients,
    optimizer_of,
    options_of,
    parameters,
)


def clip(kind: str, gradients: list[Tensor]) -> None:
    """Clip as the servers do."""
    if kind == "value":
        for each in gradients:
            each.clamp_(*CONSTANTS["value"])
    groups = [[each] for each in gradients] if kind == "norm" else [gradients]
    limit = CONSTANTS["norm" if kind == "norm" else "global_norm"]
    for group in groups if kind != "value" else []:
        factor = clip_coefficient(sum(float(each.double().square().sum()) for each in group), limit)
        for each in group:
            each.mul_(factor)


def train(
    case: dict[str, Any], trained: dict[str, Parameter], optimizer: optim.Optimizer
) -> list[dict[str, Any]]:
    """Return the parameters after each step."""
    found, kind = [], case["clip"] or ""
    for step in range(RECORD["steps"]):
        give_gradients(trained, step)
        if kind and kind != "decayed_rate":
            trained["table_sparse"].grad = trained["table_sparse"].grad.to_dense()  # type: ignore[union-attr]
            clip(kind, [p.grad for group in optimizer.param_groups for p in group["params"]])
        rate = CONSTANTS["LR"] * (0.5 ** (step // 4) if "decayed_rate" in kind else 1.0)
        for group in optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        optimizer.step()
        found.append({name: each.detach().numpy().copy() for name, each in trained.items()})
    return found


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_give_paddles_values(name):
    case, trained = CASES[name], parameters()
    found = train(case, trained, optimizer_of(case, trained))
    for each in NAMES:
        if each == "table_sparse" and name in LAZY:
            continue
        # Both tables start alike, and the dense one says what is right: Paddle's sparse steps have bugs.
        expected = ARRAYS[f"{name}/{'table_dense' if each == 'table_sparse' else each}"]
        for step, values in enumerate(found):
            np.testing.assert_allclose(
                values[each], expected[step], rtol=0, atol=TOLERANCE, err_msg=f"{each}, step {step}"
            )


@pytest.mark.parametrize("name", CASES)
def test_state_has_paddles_names_and_values_after_the_last_step(name):
    case, trained = CASES[name], parameters()
    optimizer = optimizer_of(case, trained)
    train(case, trained, optimizer)
    for each in ("w", "b", "table_dense"):
        state = optimizer.state.get(trained[each], {})
        recorded = {key for key in case["state"] if key.startswith(f"{each}_")}
        assert recorded == {f"{each}_{key}_0" for key in state}
        for key, value in state.items():
            np.testing.assert_allclose(
                value.numpy(), ARRAYS[f"{name}/state/{each}_{key}_0"], rtol=2e-6, atol=2e-6
            )


@pytest.mark.parametrize("name", LAZY)
def test_lazy_adam_steps_the_rows_of_the_gradient_alone(name):
    """Paddle's own sparse Adam corrects for one step too many; so do these powers, and then all is equal."""
    case, trained = CASES[name], parameters()
    optimizer = optimizer_of(case, trained)
    table, moved = trained["table_sparse"], []
    for step in range(RECORD["steps"]):
        give_gradients(trained, step)
        if case["clip"]:
            gradients = [trained[each].grad for each in ("w", "b", "table_dense")]
            table.grad = table.grad.coalesce()  # type: ignore[union-attr]
            clip(case["clip"], [*gradients, table.grad.values()])  # type: ignore[list-item]
        if step == 0:
            group = next(each for each in optimizer.param_groups if each["params"][0] is table)
            state = optimizer._state_of(table, group)
            state["beta1_pow_acc"].mul_(optim.float32(group["beta1"]))
            state["beta2_pow_acc"].mul_(optim.float32(group["beta2"]))
        before = table.detach().clone()
        optimizer.step()
        moved.append(set(np.flatnonzero((before != table).any(dim=1).numpy())))
        np.testing.assert_allclose(
            table.detach(), ARRAYS[f"{name}/table_sparse"][step], rtol=0, atol=TOLERANCE
        )
    assert moved == [set(ids.ravel()) for ids in ARRAYS["feed/ids"]]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_server_may_step_any_slice(name):
    kind, arguments = SETTINGS[name]
    optimizer = kind([torch.nn.Parameter(torch.zeros(6, 4))], **options_of(arguments), l1_decay=0.02)  # type: ignore[call-arg]
    findings = try_out(optimizer, 0, {0: 2})
    assert (findings.elementwise, findings.refusal) == (True, "")


def test_a_servers_step_is_the_optimizers_own():
    value, gradient = torch.randn(4, 3), torch.randn(4, 3)
    own = torch.nn.Parameter(value.clone())
    own.grad = gradient
    optimizer = optim.Adam([own], lr=0.1, weight_decay=0.01)
    optimizer.step()
    update = DenseUpdate(optim.Adam, value, {**optimizer.defaults, "lr": 0.1})
    update.apply(gradient, {"lr": 0.1})
    assert torch.equal(value, own)
    assert torch.equal(update.state()["beta2_pow_acc"], optimizer.state[own]["beta2_pow_acc"])


@pytest.mark.parametrize("kind", CLASSES.values())
def test_a_program_read_from_text_finds_the_class(kind):
    assert optimizer_class_at(class_path(kind), None) is kind


def test_no_other_name_of_the_module_is_a_class_to_step_with():
    with pytest.raises(TranspileError, match=r"fleet\.optim\.Optimizer2"):
        optimizer_class_at("fleet.optim.Optimizer2", None)


def test_a_rate_that_is_no_number_is_refused():
    with pytest.raises(ValueError, match="SGD: lr is nan, expected a finite number"):
        optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=float("nan"))


@pytest.mark.parametrize("bounds", [(float("nan"), 1.0), (-1.0, float("inf")), (1.0, -1.0)])
def test_bounds_that_are_no_range_are_refused(bounds):
    with pytest.raises(ValueError, match=r"SGD: clip_value is .*, expected None, or two finite numbers"):
        optim.SGD([Parameter(torch.zeros(2))], clip_value=bounds)


def test_a_loaded_state_without_an_option_is_refused():
    optimizer = optim.Momentum([Parameter(torch.zeros(2))])
    state = optimizer.state_dict()
    del state["param_groups"][0]["clip_value"]
    with pytest.raises(ValueError, match=r"Momentum: param group 0 .* has no clip_value; .* clip_value=None"):
        optimizer.load_state_dict(state)


def test_a_closure_recomputes_the_loss():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = optim.SGD([parameter], lr=0.5)

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = parameter.square().sum()
        value.backward()
        return value

    assert optimizer.step(loss).item() == 1.0
    assert parameter.item() == 0.0
