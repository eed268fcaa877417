"""Which gradients may be stepped on: averages, whatever else has been done, and zeros."""

import pytest
import torch

from fleet.collective.own_gradients import OwnGradients
from fleet.errors import ConfigurationError


@pytest.fixture
def parameters() -> list[torch.Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(2)]


@pytest.fixture
def own(parameters: list[torch.Tensor]) -> OwnGradients:
    return OwnGradients(list(zip("ab", parameters, strict=True)))


def gradients(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return what a reducer has come to: zeros of what nobody uses."""
    return [torch.zeros(2) if each.grad is None else each.grad for each in parameters]


def test_a_gradient_that_was_not_averaged_since_the_last_step_is_named(own, parameters):
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    with pytest.raises(ConfigurationError, match="the gradient of a is this trainer's own"):
        own.check()
    own.average(gradients(parameters), captured=False)
    own.check()
    assert own.step()
    own.check()  # on the same averages once more
    parameters[1].grad = torch.ones(2)
    with pytest.raises(ConfigurationError, match="the gradient of b is"):
        own.check()
    own.accumulate(1)
    with pytest.raises(ConfigurationError, match=r"were in no_sync\(\)"):
        own.check()


@pytest.mark.parametrize("stepped", [False, True], ids=["before-a-step", "after-it"])
def test_an_average_to_which_no_sync_has_added_is_this_trainers_own(own, parameters, stepped):
    parameters[0].grad = torch.ones(2)
    own.average(gradients(parameters), {1}, captured=False)
    if stepped:
        own.step()
        parameters[0].grad.zero_()  # as zero_grad(set_to_none=False) does
    parameters[0].grad += 1
    own.accumulate(0)
    with pytest.raises(ConfigurationError, match=r"the gradient of a is .* were in no_sync\(\)"):
        own.check()
    own.average(gradients(parameters), {1}, captured=False)
    own.check()


def test_an_average_that_is_put_back_after_a_pass_in_no_sync_may_be_stepped_on(own, parameters):
    average = parameters[0].grad = torch.ones(2)
    own.average(gradients(parameters), {1}, captured=False)
    parameters[0].grad = torch.zeros(2)
    own.accumulate(0)
    parameters[0].grad = average
    own.check()


def test_zeros_are_the_same_everywhere(own, parameters):
    parameters[0].grad = torch.zeros(2)
    own.check()
    parameters[0].grad = torch.zeros(2).to_sparse()
    with pytest.raises(ConfigurationError, match="the gradient of a"):
        own.check()


def test_a_step_without_gradients_changes_nothing(own, parameters):
    assert not own.step()
    own.average(gradients(parameters), {0, 1}, captured=False)
    assert not own.step()


def test_what_a_graph_replays_is_not_known(own, parameters):
    own.average(gradients(parameters), captured=True)
    own.step()
    parameters[0].grad = torch.ones(2)
    own.check()
