"""Optimizers without TorchDynamo, for as long as nothing compiles.

The first optimizer of a process imports ``torch._dynamo``, only so that a compilation would leave it out. It
takes seconds, and more than a hundred MiB, of each trainer and each server, most of which never compile.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["defer_dynamo", "step"]

METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
"""What torch leaves out of compilations."""

ATTRIBUTE = "__dynamo_disable"
"""Where torch keeps, on such a function, what to call instead of it (`torch._compile._disable_dynamo`)."""


def defer_dynamo() -> None:
    """Let optimizers work without importing ``torch._dynamo``; once anything else has, torch's own way holds.

    Until then nothing can be about to be compiled, so there is nothing to be left out of. A torch that keeps
    it elsewhere is as slow as ever.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in METHODS:
        function = getattr(getattr(Optimizer, name), "__wrapped__", None)
        if function is not None:
            vars(function).setdefault(ATTRIBUTE, _until_imported(name, function))


def step(optimizer: Optimizer) -> None:
    """Call ``optimizer.step()``; of one of torch's own classes, only the arithmetic, which imports nothing.

    Hooks around the step and a profiler's marks are left out, for optimizers that the runtime made itself.
    """
    kind = type(optimizer)
    if "torch._dynamo" in sys.modules or not kind.__module__.startswith("torch.optim."):
        optimizer.step()
    else:
        with torch.set_grad_enabled(bool(optimizer.defaults.get("differentiable", False))):
            inspect.unwrap(kind.step)(optimizer)


def _until_imported(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        vars(function).pop(ATTRIBUTE, None)
        return getattr(Optimizer, name)(*args, **kwargs)

    return call
