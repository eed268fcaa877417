"""What a parameter server does to its slices: reduce the trainers' gradients, clip, then step torch.optim."""

from fleet.update.clip import clip_coefficient, sum_of_squares, total_of
from fleet.update.delay import compensate_delay
from fleet.update.dense import DenseUpdate, average_in_order

__all__ = [
    "DenseUpdate",
    "average_in_order",
    "clip_coefficient",
    "compensate_delay",
    "sum_of_squares",
    "total_of",
]
