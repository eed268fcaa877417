"""ResNet with bottlenecks, and how its learning rate goes.

He et al. 2015, arXiv:1512.03385; the stride is in the convolution of 3 by 3, as most have it today.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn


def convolution(before: int, after: int, size: int, stride: int = 1) -> tuple[nn.Conv2d, nn.BatchNorm2d]:
    """Return a convolution from so many channels to so many others, and its normalization."""
    layer = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer, nn.BatchNorm2d(after)


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut: to few channels, over those, and to four times as many."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        last, norm = convolution(width, after, 1)
        nn.init.zeros_(norm.weight)  # a block begins as its shortcut: arXiv:1706.02677, 5.1
        self.residual = nn.Sequential(
            *convolution(before, width, 1),
            nn.ReLU(inplace=True),
            *convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            last,
            norm,
        )
        changes = stride != 1 or before != after
        self.shortcut = nn.Sequential(*(convolution(before, after, 1, stride) if changes else ()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.residual(x) + self.shortcut(x))


class ResNet(nn.Sequential):
    """From pictures, float32[n, 3, height, width], to logits of classes, float32[n, classes].

    Parameters
    ----------
    classes : int
    blocks : sequence of int
        Of each stage; a stage has half the height and width of the one before, and twice the channels.
        (3, 4, 6, 3) is ResNet-50.
    width : int
        Channels of the first convolution.
    """

    def __init__(self, classes: int, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64) -> None:
        stages: list[nn.Module] = []
        channels = width
        for stage, number in enumerate(blocks):
            for block in range(number):
                stages.append(Bottleneck(channels, width << stage, 2 if stage and not block else 1))
                channels = 4 * width << stage
        super().__init__(
            *convolution(3, width, 7, stride=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
            *stages,
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(channels, classes),
        )


def rate(step: int, warm_up: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0, as a part of the highest one.

    It grows evenly for `warm_up` steps, and falls as half a cosine wave afterwards.
    """
    if step < warm_up:
        return (step + 1) / warm_up
    return (1 + math.cos(math.pi * (step - warm_up) / max(1, steps - warm_up))) / 2
