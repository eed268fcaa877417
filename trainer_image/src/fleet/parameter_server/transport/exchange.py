"""Memory that a trainer shares with one server of its host: its gradients there, the server's values here.

A gradient may be overwritten once the server needs it no more. That is so when the block was answered since,
by an answer that was given after the server had taken the gradient: before, a mode may still have to sum it,
and it may have to be sent again. A gradient that comes earlier travels over the socket, behind its frame's
header, as between two hosts; the server's receiving thread then writes it where the one before lay.
"""

from collections.abc import Mapping, Sequence

from fleet.errors import LocalProtocolError
from fleet.parameter_server.transport.shared_memory import SharedBlocks, copy_bytes

__all__ = ["Exchange"]


class Exchange:
    """Both memories, as a trainer sees them.

    Parameters
    ----------
    block_bytes : mapping of int to int
        The blocks of the server.

    Raises
    ------
    OSError
        This system has no such memory, or none is left.
    """

    def __init__(self, block_bytes: Mapping[int, int]) -> None:
        self._block_bytes = block_bytes
        self._gradients = SharedBlocks.create(block_bytes)
        self._values: SharedBlocks | None = None
        self._sent: dict[int, int] = {}
        """By block the number of the frame that its last gradient was."""
        self._answered: dict[int, int] = {}
        """By block how many frames the server had taken when it answered last."""

    @property
    def descriptor(self) -> int:
        """The descriptor of the gradients' memory."""
        return self._gradients.descriptor

    def map_values(self, descriptors: Sequence[int]) -> None:
        """Map the server's values, unless they are; see `SharedBlocks.receive`.

        Raises
        ------
        OSError
            They cannot be mapped, or their descriptor did not come: a system may keep it back.
        """
        if self._values is not None:
            return
        if not descriptors:
            raise OSError("the descriptor of the server's memory did not come with its greeting")
        self._values = SharedBlocks.receive(descriptors[0], self._block_bytes, writable=False)

    def put(self, block: int, gradient: memoryview) -> bool:
        """Copy a gradient to where the server finds it, and return whether that could be done.

        Not where the one before may still be needed, nor if it does not fit: as a payload of its frame it is
        refused by name.
        """
        place = self._gradients[block]
        if len(gradient) != len(place) or self._answered.get(block, 0) < self._sent.get(block, 0):
            return False
        copy_bytes(gradient, place)
        return True

    def sent(self, block: int, frame: int) -> None:
        """Note which frame of the session tells of a block's gradient, or carries it."""
        self._sent[block] = frame

    def answered(self, block: int, taken: int) -> None:
        """Note an answer to a block, and how many frames the server had taken before it."""
        self._answered[block] = taken

    def value(self, block: int) -> memoryview:
        """Return where a block's value lies in the server's memory; only once that is mapped."""
        if self._values is None:
            raise LocalProtocolError("no values are shared")
        return self._values[block]
