"""Places, Paddle's term for the devices on which a process computes."""

import os
from dataclasses import dataclass

from fleet.errors import ConfigurationError

__all__ = ["CPUPlace", "CUDAPlace", "Place", "check_place"]


@dataclass(frozen=True, slots=True)
class CPUPlace:
    """The CPU of this machine: Paddle's ``fluid.CPUPlace``."""

    @property
    def device(self) -> str:
        """The name of the torch device."""
        return "cpu"


@dataclass(frozen=True, slots=True)
class CUDAPlace:
    """A GPU of this machine: Paddle's ``fluid.CUDAPlace``.

    Attributes
    ----------
    device_id : int
        Its index among the visible GPUs (``CUDA_VISIBLE_DEVICES``), from 0.

    Notes
    -----
    Paddle's ``fluid.CUDAPlace``.
    """

    device_id: int = 0

    @property
    def device(self) -> str:
        """The name of the torch device."""
        return f"cuda:{self.device_id}"


Place = CPUPlace | CUDAPlace


def check_place(place: Place) -> None:
    """Raise an error if this process cannot see a place's GPU.

    Raises
    ------
    ConfigurationError
        The GPU is not visible; the message gives the number of visible GPUs.
    """
    if not isinstance(place, CUDAPlace):
        return
    import torch  # imported here: scripts may name a place before they import torch

    count = torch.cuda.device_count()
    if not 0 <= place.device_id < count:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        said = "" if visible is None else f" (CUDA_VISIBLE_DEVICES is {visible!r})"
        expected = f"a number from 0 to {count - 1}" if count else "fleet.CPUPlace()"
        raise ConfigurationError(
            f"place is CUDAPlace({place.device_id}), and PyTorch finds {count} GPUs on this machine{said}; "
            f"expected {expected}"
        )
