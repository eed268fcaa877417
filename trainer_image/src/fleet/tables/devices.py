"""Rows between the memory of the host, where they come from and leave, and the device of a model.

A GPU copies from and to pinned memory by itself; other memory the driver first copies to such.
"""

import torch
from torch import Tensor

__all__ = ["to_device", "to_host"]


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return values of the host on a device; what is computed there next waits for them, no thread does."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def to_host(values: Tensor) -> Tensor:
    """Return values of any device in memory of the host, once they are computed."""
    if not values.is_cuda:
        return values.cpu()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values)
