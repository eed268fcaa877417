"""Optimizers without TorchDynamo, for as long as nothing compiles.

The first optimizer of a process imports ``torch._dynamo``, only so that compilations leave parts of it out.
That takes much of the start, and much memory, of each trainer and server, most of which never compile.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["defer_dynamo", "step_directly"]

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
        method = getattr(Optimizer, name)
        function = getattr(method, "__wrapped__", None)
        if function is not None:
            vars(function).setdefault(ATTRIBUTE, _until_imported(method, function))


def step_directly(optimizer: Optimizer) -> None:
    """Step an optimizer that the runtime made itself: if by torch's own function, by that function alone.

    Hooks around the step, a profiler's marks and the import are left out. What somebody else has put there,
    as the ``step`` of a class of one's own, is called as it is, but for the hooks: they belong to the step
    that the script makes.
    """
    layers = tuple(_layers(type(optimizer).step))
    if all(_module_of(layer).startswith("torch.") for layer in layers):
        with torch.set_grad_enabled(bool(optimizer.defaults.get("differentiable", False))):
            layers[-1](optimizer)
    elif getattr(layers[0], "hooked", False) and _module_of(layers[0]) == Optimizer.__module__:
        layers[1](optimizer)
    else:
        optimizer.step()


def _layers(function: Any) -> Iterator[Any]:
    """Give a function, what it wraps, what that wraps, and so on."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _module_of(function: Any) -> str:
    """Return the module whose code a function is; what wraps another one may claim the other's."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def _until_imported(method: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        vars(function).pop(ATTRIBUTE, None)
        return method(*args, **kwargs)

    return call
