"""The dense workload: a multi-layer perceptron, of 100 MB or 10 kB, on random data."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

__all__ = [
    "LEARNING_RATE",
    "MAX_BATCH",
    "NUM_PARAMETERS",
    "TINY_WIDTHS",
    "WIDTHS",
    "Config",
    "End",
    "Step",
    "batch",
    "build_layers",
    "count_parameters",
]

MAX_BATCH = 64
"""The number of samples of a trainer; a smaller batch uses the first ones."""
LEARNING_RATE = 0.01
WIDTHS = (1024, *[2048] * 6, 1000)
TINY_WIDTHS = (16, 26, 26, 26, 26)

Step = Callable[[int], None]
"""Runs one step on a batch of the given size."""
End = Callable[[], None]


def count_parameters(widths: tuple[int, ...]) -> int:
    """Return the number of parameters in layers of the given widths."""
    return sum((inputs + 1) * outputs for inputs, outputs in pairwise(widths))


NUM_PARAMETERS = count_parameters(WIDTHS)


@dataclass(frozen=True)
class Config:
    """The configuration of one process of a measured system."""

    system: str
    role: str
    index: int
    num_servers: int
    num_trainers: int
    endpoints: tuple[str, ...]
    """The servers' host:port, by index; without servers, the rendezvous address on trainer 0's host."""
    widths: tuple[int, ...] = WIDTHS


def build_layers(widths: tuple[int, ...] = WIDTHS) -> list[nn.Module]:
    """Return the layers of the model, initialized identically in every process."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def batch(index: int, widths: tuple[int, ...] = WIDTHS) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a trainer's inputs and labels; a step with a smaller batch uses only the first samples."""
    generator = torch.Generator().manual_seed(index)
    inputs = torch.randn(MAX_BATCH, widths[0], generator=generator)
    return inputs, torch.randint(0, widths[-1], (MAX_BATCH,), generator=generator)
