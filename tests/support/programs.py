"""Modules and programs with named parameters but without computation."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fleet.fluid import Program
from fleet.plan import GradClip

Shapes = Mapping[str, Sequence[int]]


class Parameters(torch.nn.Module):
    """A module that has parameters but does not compute."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(tuple(shape))))


def never(model: torch.nn.Module, x: Any, y: Any) -> Any:
    """Stand in for a loss function that must not be called during capture."""
    raise AssertionError("capture ran the model")


def captured(
    shapes: Shapes | None = None,
    optimizer: str = "SGD",
    grad_clip: GradClip | None = None,
    **options: Any,
) -> Program:
    """Return a captured program with parameters of the given shapes."""
    module = Parameters(shapes if shapes is not None else {"w": (400, 100), "b": (100,)})
    optimizer_class = getattr(torch.optim, optimizer)
    made = optimizer_class(module.parameters(), **{"lr": 0.1, **options})
    return Program.capture(module, never, made, grad_clip)
