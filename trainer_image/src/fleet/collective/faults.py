"""Whose fault an error of an operation on a device is. Pure.

torch tells an error of this trainer's own device, which may come from any kernel before, by the same calls
that tell that another trainer does not answer; and hooks of a script run while gradients are awaited.
"""

import os
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

__all__ = ["is_of_script", "own_fault", "reason_of"]

_BY_KERNEL = "CUDA_LAUNCH_BLOCKING=1 shows which operation failed"
_OWN = {
    "out of memory": "make the batch or the model smaller, or see who else computes on this device",
    "CUDA error": _BY_KERNEL,
    "ncclUnhandledCudaError": _BY_KERNEL,
    "ncclInvalid": "NCCL_DEBUG=INFO shows what NCCL refuses",
}
"""What marks an error as this trainer's, and what helps."""
_OF_TRANSPORT = ("gloo", "nccl", "connect", "socket", "broken pipe", "timed out", "timeout", "abort")
_NO_SCRIPT = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))
_DETAIL = "Last error:\n"


def own_fault(error: BaseException) -> str:
    """Return what helps against an error of this trainer's device; empty where another may be to blame."""
    text = str(error)
    for mark, help_ in _OWN.items():
        if mark in text:
            return help_
    return _BY_KERNEL if isinstance(error, torch.AcceleratorError) else ""


def is_of_script(error: BaseException) -> bool:
    """Whether an error comes from code of the script, such as a hook, and tells nothing of a connection.

    Parameters
    ----------
    error : BaseException
        Caught around the wait: its traceback has what was called in there.
    """
    text = str(error).lower()
    if isinstance(error, dist.DistError) or any(mark in text for mark in _OF_TRANSPORT):
        return False
    files = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
    return any(not file.startswith(("<", *_NO_SCRIPT)) for file in files)


def reason_of(error: BaseException) -> str:
    """Return the line of an error that says most: its first, or the last that NCCL has logged."""
    text = str(error).strip()
    return (text.partition(_DETAIL)[2] or text).partition("\n")[0]
