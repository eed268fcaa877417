"""What metrics share: how they get numbers from a script, and from the other trainers."""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fleet.errors import ConfigurationError

__all__ = ["Reduce", "flat"]

Reduce = Callable[[npt.NDArray[Any]], npt.NDArray[Any]]
"""Sums an array over the trainers."""


def flat(metric: str, what: str, values: Any) -> npt.NDArray[Any]:
    """Return a script's numbers in one dimension.

    Raises
    ------
    ConfigurationError
        They are no numbers.
    """
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        if values.is_floating_point():  # numpy has no bfloat16
            values = values.to(torch.promote_types(values.dtype, torch.float32))
        values = values.numpy()
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise ConfigurationError(f"{metric}: {what} are of type {array.dtype}, expected numbers")
    return array.reshape(-1)
