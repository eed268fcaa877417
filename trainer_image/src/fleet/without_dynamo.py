"""Keeps torch.optim from importing TorchDynamo unless the script compiles a function.

The first optimizer of a process imports ``torch._dynamo``, only to exclude some of its methods from
compilation. The import takes much of the start-up time and memory of every trainer and server, most of which
never compile anything.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["defer_dynamo", "direct_step", "step_directly"]

METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
"""The methods that torch excludes from compilation."""

ATTRIBUTE = "__dynamo_disable"
"""The attribute in which `torch._compile._disable_dynamo` stores the replacement of a function."""


def defer_dynamo() -> None:
    """Make optimizers work without ``torch._dynamo`` until other code imports it.

    Before that import nothing can compile, so there is nothing to exclude. With a version of torch that uses
    another attribute, nothing is deferred.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in METHODS:
        method = getattr(Optimizer, name)
        function = getattr(method, "__wrapped__", None)
        if function is not None:
            vars(function).setdefault(ATTRIBUTE, _until_imported(method, function))


def direct_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return an optimizer's step function without its hooks, which already run around the script's own step.

    The step function of a torch optimizer is called alone, without hooks, profiler marks and the import. A
    user-defined ``step`` is called unchanged, except for the hooks.
    """
    step, is_torchs = _unwrapped(type(optimizer).step)
    if is_torchs:
        differentiable = bool(optimizer.defaults.get("differentiable", False))
        return partial(torch.set_grad_enabled(differentiable)(step), optimizer)
    return partial(step, optimizer) if step is not None else optimizer.step


def step_directly(optimizer: Optimizer) -> None:
    """Step an optimizer without its hooks; see `direct_step`."""
    direct_step(optimizer)()


@cache  # keyed by function, because torch replaces it when the first optimizer of a class is made
def _unwrapped(step: Callable[..., Any]) -> tuple[Any, bool]:
    """Return a class's ``step`` without hooks (None if unknown), and whether torch defines the method."""
    layers = [step]
    while (wrapped := getattr(layers[-1], "__wrapped__", None)) is not None:
        layers.append(wrapped)
    if all(_module_of(layer).startswith("torch.") for layer in layers):
        return layers[-1], True
    hooked = getattr(step, "hooked", False) and _module_of(step) == Optimizer.__module__
    return (layers[1] if hooked else None), False


def _module_of(function: Any) -> str:
    """Return the name of the module that defines a function's code, even for a decorated function."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def _until_imported(method: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        vars(function).pop(ATTRIBUTE, None)
        return method(*args, **kwargs)

    return call
