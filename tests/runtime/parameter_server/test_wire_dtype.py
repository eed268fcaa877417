"""Tensors that travel as bfloat16: what is rounded, and what is not."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fleet.errors import ConfigurationError
from fleet.parameter_server.modes import Async, Geo, HalfAsync, Mode
from fleet.parameter_server.settings import Settings
from fleet.process import progress
from tests.support.parameter_server import QUICK, loopback
from tests.support.training import NoSync, Training, Values, assert_same_bits, train_together, values_of

ROWS, COLUMNS = 600, 30  # 18000 elements: cut in two at two servers
SHORT = replace(QUICK, transport="tcp", wire_dtype="bfloat16")
DTYPES = {"w": torch.float32, "v": torch.float64, "b": torch.bfloat16}


class Mixed(nn.Module):
    """Parameters of three dtypes, one of which is no longer than what travels."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in {"w": (ROWS, COLUMNS), "v": (COLUMNS, 3), "b": (3,)}.items():
            value = torch.randn(shape, generator=generator) * 0.1
            self.register_parameter(name, nn.Parameter(value.to(DTYPES[name])))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w, v, b = (getattr(self, name).double() for name in ("w", "v", "b"))
        return torch.as_tensor(torch.tanh(x.double() @ w) @ v + b)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def backward(model: Any, step: int, trainer: int, no_sync: NoSync) -> None:
    x = torch.randn(8, ROWS, generator=torch.Generator().manual_seed(100 * step + trainer))
    (model(x) - 1.0).square().mean().backward()


def rounded(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to(torch.bfloat16).to(value.dtype)


def train_alone_rounded(steps: int, trainers: int) -> Values:
    """Train in one process that keeps the values, and computes with rounded ones and gradients."""
    kept, model = Mixed(), Mixed()
    optimizer = adam(kept.parameters())
    for step in range(steps):
        totals: list[torch.Tensor] = []
        for trainer in range(trainers):
            for own, master in zip(model.parameters(), kept.parameters(), strict=True):
                own.data, own.grad = rounded(master), None
            backward(model, step, trainer, nullcontext)
            gradients = [rounded(each.grad) for each in model.parameters() if each.grad is not None]
            totals = [a + b for a, b in zip(totals, gradients, strict=True)] if totals else gradients
        for master, total in zip(kept.parameters(), totals, strict=True):
            master.grad = total * (1.0 / trainers)
        optimizer.step()
    return {name: rounded(value) for name, value in kept.named_parameters()}


def test_gradients_and_values_are_rounded_and_what_the_servers_keep_is_not():
    training = Training(Mixed, adam, backward, steps=(4, 4))
    alone = train_alone_rounded(4, 2)
    for ended in train_together(training, settings=SHORT):
        assert_same_bits(ended, alone)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def trained(settings: Settings, mode: Mode | None = None) -> tuple[Values, float]:
    """Train one trainer; return its values, and how many bytes were sent meanwhile, by both ends."""
    with loopback(servers=2, model=Mixed, optimizer=sgd, mode=mode, settings=settings) as job:
        trainer, model, _ = job.make_trainer()
        trainer.start()
        before = progress.snapshot()["counters"].get("bytes_sent", 0)
        for step in range(4):
            model.zero_grad()
            backward(model, step, 0, nullcontext)
            trainer.step()
        trainer.complete()
        sent = progress.snapshot()["counters"]["bytes_sent"] - before
    return values_of(model), sent


def test_about_half_of_the_bytes_travel():
    _, whole = trained(replace(SHORT, wire_dtype=""))
    _, short = trained(SHORT)
    assert 0.45 < short / whole < 0.6


@pytest.mark.parametrize("mode", [Async(), HalfAsync(2, 2), Geo(push_nums=2)], ids=lambda mode: mode.name)
def test_every_mode_learns_nearly_the_same(mode: Mode):
    found, _ = trained(SHORT, mode)
    expected, _ = trained(replace(SHORT, wire_dtype=""), mode)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0.02, atol=0.02)


def test_a_trainer_that_sends_another_dtype_is_refused_by_name():
    with loopback(model=Mixed, optimizer=adam, settings=SHORT) as job:
        job.settings = replace(SHORT, wire_dtype="")
        trainer, _, _ = job.make_trainer()
        with pytest.raises(ConfigurationError, match=r"wire_dtype: bfloat16 here, nothing there"):
            trainer.start()
