"""What a parameter server does to its slices: reduce the trainers' gradients, then step torch.optim."""

from fleet.update.delay import compensate_delay
from fleet.update.dense import DenseUpdate, average_in_order

__all__ = ["DenseUpdate", "average_in_order", "compensate_delay"]
