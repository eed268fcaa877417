"""Where a process computes: the places of the original."""

from dataclasses import dataclass

__all__ = ["CPUPlace", "CUDAPlace", "Place"]


@dataclass(frozen=True, slots=True)
class CPUPlace:
    """The processor of this machine.

    Notes
    -----
    The original's ``fluid.CPUPlace``.
    """

    @property
    def device(self) -> str:
        """The torch device's name."""
        return "cpu"


@dataclass(frozen=True, slots=True)
class CUDAPlace:
    """A GPU of this machine.

    Attributes
    ----------
    device_id : int
        Its number among the visible GPUs (``CUDA_VISIBLE_DEVICES``), from 0 on.

    Notes
    -----
    The original's ``fluid.CUDAPlace``.
    """

    device_id: int = 0

    @property
    def device(self) -> str:
        """The torch device's name."""
        return f"cuda:{self.device_id}"


Place = CPUPlace | CUDAPlace
