"""A gradient that is no number, with parameter servers: told of, refused, or left out on every trainer."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fleet.errors import FleetError
from fleet.plan import DistributeTranspilerConfig
from tests.support.joined import joined
from tests.support.threads import at_once
from tests.support.training import values_of

ASYNC = {"sync_mode": False, "runtime_split_send_recv": True}


class Script:
    """One trainer's loop."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer

    def step(self, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.linspace(-1, 1, 60).reshape(3, 20)).square().mean() * factor
        loss.backward()
        self.optimizer.step()


@contextmanager
def scripts(trainers: int, non_finite: str, **config: Any) -> Iterator[list[tuple[Any, Script]]]:
    """Give trainers that have joined, each with its loop."""
    arguments: dict[str, Any] = {"config": DistributeTranspilerConfig(**config)} if config else {}
    with joined(trainers, {"overlap": False, "non_finite": non_finite}, **arguments) as made:
        yield [(trainer, Script(model, optimizer)) for trainer, model, optimizer in made]


def test_a_step_with_a_gradient_that_is_no_number_is_made_by_nobody():
    with scripts(2, "skip") as made:
        held = values_of(made[0][1].model)
        factors = [1.0, float("nan")]
        at_once(*(lambda i=i, each=each: each[1].step(factors[i]) for i, each in enumerate(made)))
        for trainer, script in made:
            assert trainer.current_step == 1
            assert all(torch.equal(value, held[name]) for name, value in script.model.state_dict().items())
        at_once(*(script.step for _, script in made))
        found = made[0][1].model.state_dict()
        assert not any(torch.equal(found[name], value) for name, value in held.items())
        assert all(bool(value.isfinite().all()) for value in found.values())


def test_an_asynchronous_trainer_leaves_it_out_alone():
    with scripts(2, "skip", **ASYNC) as [(_, first), (_, second)]:
        second.step()
        held = values_of(second.model)
        first.step(float("inf"))
        assert all(torch.equal(value, held[name]) for name, value in first.model.named_parameters())


def test_a_step_with_a_gradient_that_is_no_number_is_an_error_where_the_strategy_says_so():
    with scripts(1, "stop") as [(_, script)]:
        script.step()
        held = values_of(script.model)
        said = (
            r"the gradient of \S+ holds NaN or infinity on trainer 0 in step 1, and strategy\.non_finite is"
        )
        with pytest.raises(FleetError, match=said):
            script.step(float("nan"))
        assert all(torch.equal(value, held[name]) for name, value in script.model.named_parameters())


def test_a_step_with_a_gradient_that_is_no_number_is_told_of_once(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    with scripts(1, "warn") as [(_, script)]:
        script.step()
        script.step(float("nan"))
        script.step()
    told = [each.getMessage() for each in caplog.records if "NaN or infinity" in each.getMessage()]
    assert len(told) == 1
    assert "on trainer 0 in step 1; the weights become NaN or infinite, too" in told[0]
