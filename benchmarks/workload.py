"""The dense workload: a multi-layer perceptron with 25 million parameters, on random data."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn

__all__ = ["BATCH", "LEARNING_RATE", "NUM_PARAMETERS", "Config", "batch", "build_layers"]

BATCH = 64
LEARNING_RATE = 0.01
WIDTHS = (1024, *[2048] * 6, 1000)
NUM_PARAMETERS = sum((inputs + 1) * outputs for inputs, outputs in pairwise(WIDTHS))


@dataclass(frozen=True)
class Config:
    """One process of a measured system: trainers and servers are counted from 0."""

    system: str
    role: str
    index: int
    num_servers: int
    num_trainers: int
    ports: tuple[int, ...]


def build_layers() -> list[nn.Module]:
    """Return the layers, with the same values in every process."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return layers[:-1]


def batch(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the inputs and labels of one trainer; every step takes the same."""
    generator = torch.Generator().manual_seed(index)
    inputs = torch.randn(BATCH, WIDTHS[0], generator=generator)
    return inputs, torch.randint(0, WIDTHS[-1], (BATCH,), generator=generator)
