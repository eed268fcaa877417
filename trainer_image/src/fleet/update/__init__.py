"""What a parameter server does to its slices: reduce the trainers' gradients, then step torch.optim."""

from fleet.update.dense import KERNEL_FLAGS, DenseUpdate, average_in_order, build_optimizer

__all__ = ["KERNEL_FLAGS", "DenseUpdate", "average_in_order", "build_optimizer"]
