"""The end of a backward pass, for all optimizers that it reaches."""

import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from fleet.collective.backward import BackwardPass
from fleet.errors import ConfigurationError, FleetError


class Leaf:
    """An optimizer with one parameter, whose gradients nobody averages."""

    def __init__(self, backward: BackwardPass, events: list[str], name: str) -> None:
        self.steps: Any = SimpleNamespace(number=3)
        self.device = torch.device("cpu")
        self.parameter = torch.ones(1, requires_grad=True)
        self.rest = torch.ones(1, requires_grad=True)
        self._events, self._name = events, name
        self.parameter.register_post_accumulate_grad_hook(lambda _: backward.reach(self))
        self.rest.register_post_accumulate_grad_hook(lambda _: events.append(f"{name} leaves"))
        backward.add(self)

    def on_backward_end(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(self.rest, torch.zeros(1))]

    def collect(self) -> None:
        self._events.append(f"{self._name} collects")


@pytest.fixture
def backward() -> BackwardPass:
    group = SimpleNamespace(waiting=lambda *_: contextlib.nullcontext())
    return BackwardPass(cast("Any", group))


@pytest.mark.parametrize("first", [0, 1])
def test_everybodys_last_gradients_leave_before_any_average_is_awaited(backward, first):
    events: list[str] = []
    leaves = [Leaf(backward, events, name) for name in "ab"]
    loss = leaves[first].parameter * 1
    (loss + leaves[1 - first].parameter.exp().exp()).backward()
    assert sorted(events[:2]) == ["a leaves", "b leaves"]
    assert events[2:] == ["a collects", "b collects"]  # in one order, whichever was reached first


def test_a_pass_that_an_error_ends_is_told_afterwards(backward):
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
def test_a_pass_within_a_pass_must_not_end_it(backward, reentrant):
    leaf = Leaf(backward, [], "a")
    start = torch.ones(1, requires_grad=True)
    loss = checkpoint(lambda x: x * leaf.parameter, start, use_reentrant=reentrant)
    if reentrant:
        with pytest.raises(ConfigurationError, match="pass use_reentrant=False"):
            loss.sum().backward()
    else:
        loss.sum().backward()
        backward.check_ended()
