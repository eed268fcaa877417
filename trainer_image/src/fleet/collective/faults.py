"""Whose fault an error of an operation on a device is. Pure.

torch tells an error of this trainer's own device, which may come from any kernel before, by the same calls
that tell that another trainer does not answer.
"""

import torch

__all__ = ["own_fault", "reason_of"]

_BY_KERNEL = "CUDA_LAUNCH_BLOCKING=1 shows which operation failed"
_OWN = {
    "out of memory": "make the batch or the model smaller, or see who else computes on this device",
    "CUDA error": _BY_KERNEL,
    "ncclUnhandledCudaError": _BY_KERNEL,
    "ncclInvalid": "NCCL_DEBUG=INFO shows what NCCL refuses",
}
"""What marks an error as this trainer's, and what helps."""
_DETAIL = "Last error:\n"


def own_fault(error: BaseException) -> str:
    """Return what helps against an error of this trainer's device; empty where another may be to blame."""
    text = str(error)
    for mark, help_ in _OWN.items():
        if mark in text:
            return help_
    return _BY_KERNEL if isinstance(error, torch.AcceleratorError) else ""


def reason_of(error: BaseException) -> str:
    """Return the line of an error that says most: its first, or the last that NCCL has logged."""
    text = str(error).strip()
    return (text.partition(_DETAIL)[2] or text).partition("\n")[0]
