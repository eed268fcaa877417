"""What a step allocates on its way between trainers and servers: nothing of the size of a tensor."""

import gc
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from fleet.parameter_server.trainer.optimizer import DistributedOptimizer
from tests.support.parameter_server import QUICK, loopback
from tests.support.training import never_minimized

WIDTH = 512
PARAMETER_BYTES = 4 * WIDTH * WIDTH
WARM_UP_STEPS = 3
VIEWS = {"as_strided", "detach", "resolve_conj", "resolve_neg", "select", "slice", "to", "view"}
"""Operators that copy nothing; where `to` must, it calls another one."""


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)])


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def allocates(event: Any) -> bool:
    """Whether an operator on more than one element works neither in place nor gives a view."""
    kind, _, name = event.name.partition("::")
    if kind != "aten" or name.endswith("_") or name in VIEWS:
        return False
    return any(shape != [] for shape in event.input_shapes if isinstance(shape, list))


@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_after_warm_up_a_step_allocates_no_tensor_and_no_buffer(transport: str):
    """Beside the gradients that autograd makes, which are the trainer's own."""
    settings = replace(QUICK, transport=transport)
    with loopback(servers=2, model=model, optimizer=momentum, settings=settings) as job:
        trainer, module, wrapped = job.make_trainer()
        optimizer = DistributedOptimizer(wrapped, never_minimized)
        trainer.start()
        optimizer.bind(trainer)
        x = torch.ones(2, WIDTH)

        def backward() -> None:
            optimizer.zero_grad()
            module(x).sum().backward()

        for _ in range(WARM_UP_STEPS):
            backward()
            optimizer.step()

        with profile(
            activities=[ProfilerActivity.CPU],
            record_shapes=True,
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        ) as profiler:
            backward()
            optimizer.step()
        events: Any = profiler.events()
        trains = {event.thread for event in events if event.name == "aten::mm"}
        elsewhere = [event for event in events if event.thread not in trains]
        assert "aten::add_" in {event.name for event in elsewhere}, "nothing of the servers' steps was seen"
        assert not [(event.name, event.input_shapes) for event in elsewhere if allocates(event)]

        backward()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as stepping:
            optimizer.step()
        own: Any = stepping.events()
        assert sum(max(0, event.self_cpu_memory_usage) for event in own) < PARAMETER_BYTES / 100

        gc.collect()
        tracemalloc.start()
        try:
            backward()
            optimizer.step()
            base = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            for _ in range(3):
                backward()
                optimizer.step()
            present, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak - base < PARAMETER_BYTES / 4
        assert present - base < PARAMETER_BYTES / 20
        trainer.complete()
