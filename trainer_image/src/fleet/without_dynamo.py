"""Optimizers that do not import TorchDynamo until something compiles.

The first optimizer of a process imports ``torch._dynamo``, only to exclude some of its methods from
compilation. The import takes much of the start-up time, and much memory, of every trainer and server; most of
them never compile.
"""

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

__all__ = ["defer_dynamo", "step_directly"]

METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
"""The methods that torch excludes from compilation."""

ATTRIBUTE = "__dynamo_disable"
"""Where torch keeps the replacement of such a function (`torch._compile._disable_dynamo`)."""


def defer_dynamo() -> None:
    """Let optimizers work without importing ``torch._dynamo`` until something else has imported it.

    Before that import nothing can compile, so there is nothing to exclude. A version of torch that uses
    another attribute is as slow as ever.
    """
    if "torch._dynamo" in sys.modules:
        return
    for name in METHODS:
        method = getattr(Optimizer, name)
        function = getattr(method, "__wrapped__", None)
        if function is not None:
            vars(function).setdefault(ATTRIBUTE, _until_imported(method, function))


def step_directly(optimizer: Optimizer) -> None:
    """Step an optimizer without its hooks: these run around the step that the script makes.

    The step function of a torch optimizer is called alone, without hooks, profiler marks and the import. A
    ``step`` of the user's own class is called as it is, but for the hooks.
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
    """Yield a function, the function that it wraps, and so on."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _module_of(function: Any) -> str:
    """Return the module of a function's code; a wrapper may claim that of the function it wraps."""
    return str(getattr(function, "__globals__", {}).get("__name__", ""))


def _until_imported(method: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        vars(function).pop(ATTRIBUTE, None)
        return method(*args, **kwargs)

    return call
