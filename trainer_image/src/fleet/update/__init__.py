"""What a parameter server does to its slices: clip means of gradients, step torch.optim."""

from fleet.update.clip import clip_coefficient, sum_of_squares, total_of
from fleet.update.delay import compensate_delay
from fleet.update.dense import DenseUpdate

__all__ = [
    "DenseUpdate",
    "clip_coefficient",
    "compensate_delay",
    "sum_of_squares",
    "total_of",
]
