"""What a job's only trainer counts, though it has nobody to average with."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fleet.collective.synchronizer import LEARNING_PASSES, Alone
from fleet.errors import ConfigurationError


def alone(*parameters: torch.Tensor) -> Alone:
    named = [(f"p{number}", parameter) for number, parameter in enumerate(parameters)]
    made = Alone(cast("Any", SimpleNamespace(group=None, trained=named)))
    made.start()
    return made


def leaves(number: int) -> list[torch.Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(number)]


def hooks(parameters: list[torch.Tensor]) -> int:
    return sum(bool(getattr(each, "_post_accumulate_grad_hooks", None)) for each in parameters)


def test_each_backward_pass_outside_no_sync_counts_once():
    one, other = leaves(2)
    made = alone(one, other)
    for count in range(1, 2 * LEARNING_PASSES):
        (one + other).sum().backward()
        assert made.steps.number == count
        with made.paused():
            (one + other).sum().backward()
        made.on_step([])
    assert made.steps.number == count


def test_one_hook_stays_on_a_parameter_that_every_pass_reaches():
    parameters = leaves(3)
    made = alone(*parameters)
    for number in range(LEARNING_PASSES):
        assert hooks(parameters) == 3
        parts = parameters if number % 2 else parameters[:2]
        torch.stack(parts).sum().backward()
    assert hooks(parameters) == 1
    parameters[0].sum().backward()  # and the last one alone tells nothing
    made.on_step([])
    made.close()
    assert hooks(parameters) == 0
    made.on_step([])
    assert made.steps.number == LEARNING_PASSES


def test_passes_without_a_common_parameter_are_counted():
    parameters = leaves(2)
    made = alone(*parameters)
    for number in range(3 * LEARNING_PASSES):
        parameters[number % 2].sum().backward()
        assert made.steps.number == number + 1
    assert hooks(parameters) == 2


def test_a_pass_without_the_hooked_parameter_is_counted_at_its_step():
    parameters = leaves(2)
    made = alone(*parameters)
    for _ in range(LEARNING_PASSES):
        torch.stack(parameters).sum().backward()
        made.on_step([])
    for each in parameters:
        each.grad = None
    parameters[0].sum().backward()
    made.on_step([])
    assert made.steps.number == LEARNING_PASSES + 1
    assert hooks(parameters) == 2
    parameters[0].sum().backward()
    assert made.steps.number == LEARNING_PASSES + 2


def test_a_step_on_the_same_gradients_again_is_no_pass():
    parameters = leaves(2)
    made = alone(*parameters)
    for _ in range(LEARNING_PASSES):
        torch.stack(parameters).sum().backward()
        made.on_step([])
    made.on_step([])
    assert made.steps.number == LEARNING_PASSES


def test_a_pass_that_an_error_ends_does_not_count():
    one, late = leaves(2)

    def fail(_: torch.Tensor) -> None:
        raise ValueError("no way back")

    made = alone(one)
    late.register_hook(fail)
    with pytest.raises(ValueError, match="no way back"):
        (late.exp().exp() + one).sum().backward()
    one.sum().backward()
    assert made.steps.number == 1


def test_reentrant_checkpoints_are_refused_as_with_several_trainers():
    one, start = leaves(2)
    alone(one)
    loss = checkpoint(lambda x: x * one, start, use_reentrant=True)
    with pytest.raises(ConfigurationError, match="pass use_reentrant=False"):
        loss.sum().backward()
