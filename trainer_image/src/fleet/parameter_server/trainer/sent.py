"""A gradient that has left: its bytes, and what tells whether it is still what it was then."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import Parameter

from fleet.parameter_server.trainer.marks import Mark, covers_all, is_sampled, version_of
from fleet.parameter_server.transport.arena import Arena, Extent, bytes_of

__all__ = ["Recorder", "SentGradient"]


@dataclass(slots=True)
class SentGradient:
    """A gradient that has left, or would have."""

    gradient: Tensor
    version: int
    address: int
    carried: Tensor
    """Whose memory is sent: the gradient itself, or its copy in memory that a socket can read."""
    payload: memoryview
    """The bytes of `carried`."""
    mark: Mark | None
    """Of the payload; None where a comparison would cost a copy or keep a device waiting."""

    @property
    def unchanged(self) -> bool:
        """Whether the gradient is still what it was, as far as its version, its address and the mark tell."""
        if version_of(self.gradient) != self.version or self.gradient.data_ptr() != self.address:
            return False
        if self.mark is None:
            return True
        present = self.payload
        if self.carried is not self.gradient:
            present = bytes_of(self.gradient.detach().cpu().contiguous())
        return self.mark.matches(present)


class Recorder:
    """Describes gradients as they are now, with their bytes where they can be sent from.

    Parameters
    ----------
    parameters : mapping of name to Parameter
        Whose gradients they are.
    """

    def __init__(self, parameters: Mapping[str, Parameter]) -> None:
        self.round = 0
        """How many steps have been made."""
        self._parameters = parameters
        self._staging: Arena[str] | None = None

    def record(self, name: str, gradient: Tensor, *, marked: bool) -> SentGradient:
        """Describe the gradient of a parameter; with a mark of its bytes where `marked` and affordable."""
        carried = gradient
        if gradient.device.type != "cpu" or not gradient.is_contiguous():
            carried = self._stage(name, gradient)
        payload, mark = bytes_of(carried), None
        if marked and (is_sampled if carried is gradient else covers_all)(self.round):
            mark = Mark.of(payload, self.round)
        return SentGradient(gradient, version_of(gradient), gradient.data_ptr(), carried, payload, mark)

    def _stage(self, name: str, gradient: Tensor) -> Tensor:
        """Copy a gradient that no socket can read into memory that it can."""
        if self._staging is None:
            self._staging = Arena(
                {
                    each: Extent(parameter.dtype, tuple(parameter.shape))
                    for each, parameter in self._parameters.items()
                },
                pinned=gradient.is_cuda,
            )
        return self._staging[name].copy_(gradient.detach())
