"""A gradient scaler in each mode: who skips a step, and who goes on."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from fleet.plan import DistributeTranspilerConfig
from tests.support.joined import joined
from tests.support.parameter_server import small_model
from tests.support.threads import at_once, one_torch_thread
from tests.support.training import values_of

CONFIGS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"sync_mode": False, "runtime_split_send_recv": True},
    "half-async": {"sync_mode": False},
    "geo": {"sync_mode": False, "geo_sgd_mode": True, "geo_sgd_need_push_nums": 2},
}
INFINITE = 2
"""The step whose loss is infinite."""


class Script:
    """One trainer's loop with a scaler."""

    def __init__(self, model: Any, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.scaler = torch.amp.GradScaler("cpu")

    def step(self, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.linspace(-1, 1, 60).reshape(3, 20)).square().mean() * factor
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self, steps: int) -> None:
        for step in range(steps):
            self.step(float("inf") if step == INFINITE else 1.0)


@contextmanager
def scripts(trainers: int = 1, *, cross_step: bool = False, **arguments: Any) -> Iterator[list[Any]]:
    """Give trainers that have joined, each with its loop."""
    with joined(trainers, {"overlap": None, "cross_step": cross_step}, **arguments) as made:
        yield [(trainer, Script(model, optimizer)) for trainer, model, optimizer in made]


@pytest.mark.parametrize("name", CONFIGS)
def test_one_trainer_skips_as_one_process_does(name):
    with one_torch_thread():
        model = small_model()
        alone = Script(model, torch.optim.SGD(model.parameters(), lr=0.1))
        alone.train(5)
    with scripts(config=DistributeTranspilerConfig(**CONFIGS[name])) as [(trainer, script)]:
        script.train(5)
        trainer.complete()
        assert trainer.current_step == 5
    assert script.scaler.get_scale() == alone.scaler.get_scale() == 32768.0
    if name == "half-async":  # its gradients are of older values
        assert all(parameter.isfinite().all() for parameter in script.model.parameters())
        return
    for found, expected in zip(script.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)


def test_an_asynchronous_trainer_skips_alone():
    config = DistributeTranspilerConfig(**CONFIGS["async"])
    with scripts(trainers=2, config=config) as [(zero, first), (one, second)]:
        second.step()
        held = values_of(second.model)
        first.step(float("inf"))
        assert (first.scaler.get_scale(), second.scaler.get_scale()) == (32768.0, 65536.0)
        assert all(torch.equal(value, held[name]) for name, value in first.model.named_parameters())
        zero.complete()
        one.complete()


def test_across_steps_all_skip_too():
    with scripts(trainers=2, cross_step=True) as made:
        held = values_of(made[0][1].model)
        at_once(*(lambda i=i, each=each: each[1].step([1.0, float("inf")][i]) for i, each in enumerate(made)))
        for _, script in made:
            assert all(torch.equal(value, held[name]) for name, value in script.model.state_dict().items())
        at_once(*(each[1].step for each in made))
        for trainer, script in made:
            assert trainer.current_step == 2
            found = script.model.state_dict()
            assert not any(torch.equal(found[name], value) for name, value in held.items())
