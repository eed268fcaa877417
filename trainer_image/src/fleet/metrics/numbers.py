"""The numbers of ``all_reduce_worker``, whichever `fleet` carries them."""

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fleet.errors import ConfigurationError

__all__ = ["OPERATIONS", "check_operation", "like", "numbers_of"]

OPERATIONS: Final = ("sum", "min", "max")


def check_operation(mode: object) -> None:
    """Refuse what is no operation on numbers."""
    if mode not in OPERATIONS:
        raise ConfigurationError(f"all_reduce_worker: mode is {mode!r}; expected {', '.join(OPERATIONS)}")


def numbers_of(values: Any) -> npt.NDArray[Any]:
    """Return the numbers that a trainer gives to ``all_reduce_worker``, as an array.

    Raises
    ------
    ConfigurationError
        They are none, of a type that numpy lacks, or no array.
    """
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"all_reduce_worker: {error}; convert it, to float32 for instance"
        ) from error
    if array.dtype.kind not in "biufc":
        raise ConfigurationError(f"all_reduce_worker got {array.dtype}; expected numbers")
    return array.astype(np.int64) if array.dtype.kind == "b" else array


def like(values: Any, numbers: npt.NDArray[Any], output: npt.NDArray[Any] | None) -> Any:
    """Return combined numbers in the form in which a trainer gave its own; `output` receives them too."""
    if output is not None:
        output[...] = numbers
    return torch.from_numpy(numbers.copy()).to(values.device) if isinstance(values, Tensor) else numbers
