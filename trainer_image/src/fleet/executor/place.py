"""Where a process computes: the places of the original."""

from dataclasses import dataclass

__all__ = ["CPUPlace", "CUDAPlace", "Place"]


@dataclass(frozen=True, slots=True)
class CPUPlace:
    """The processor of this machine."""

    @property
    def device(self) -> str:
        """The torch device's name."""
        return "cpu"


@dataclass(frozen=True, slots=True)
class CUDAPlace:
    """A GPU of this machine, by its number among the visible ones."""

    device_id: int = 0

    @property
    def device(self) -> str:
        """The torch device's name."""
        return f"cuda:{self.device_id}"


Place = CPUPlace | CUDAPlace
