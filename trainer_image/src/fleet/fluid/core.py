"""The part of ``fluid.core``, Paddle's compiled module, that scripts use."""

from typing import TYPE_CHECKING

import torch

from fleet.fluid.names import missing
from fleet.fluid.place import CPUPlace, CUDAPlace
from fleet.fluid.reader import EOFException
from fleet.fluid.scope import Scope

__all__ = ["CPUPlace", "CUDAPlace", "EOFException", "Scope", "VarDesc", "get_cuda_device_count"]


class VarDesc:
    """The namespace of `VarType`, as in ``fluid.core.VarDesc.VarType.FP32``."""

    class VarType:
        """The dtypes of variables, by their names in Paddle."""

        BOOL = "bool"
        FP16 = "float16"
        FP32 = "float32"
        FP64 = "float64"
        INT32 = "int32"
        INT64 = "int64"


def get_cuda_device_count() -> int:
    """Return the number of GPUs visible to this process."""
    return torch.cuda.device_count()


if not TYPE_CHECKING:
    __getattr__ = missing("core")
