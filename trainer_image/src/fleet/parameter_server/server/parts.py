"""Trainer 0's part of checkpoints, as a server takes and gives it: in pieces, as it may be of any size."""

import threading
from collections.abc import Callable

from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.control.state_stream import PIECE_BYTES

__all__ = ["TrainerParts"]


class TrainerParts:
    """The part that arrives for the next save, and what each trainer may fetch. Any thread may call.

    Parameters
    ----------
    check_joined : callable
        Raises ConfigurationError where a call is not of a trainer in its present life.
    """

    def __init__(self, check_joined: Callable[[control_pb2.Trainer], None]) -> None:
        self._check_joined = check_joined
        self._lock = threading.Lock()
        self._save, self._arrived = "", bytearray()
        self._found: dict[int, bytes] = {}
        """What the checkpoint has that each trainer was told of last."""

    def receive(self, request: control_pb2.PartRequest) -> None:
        """Take the next piece for a save; the first one begins anew.

        Raises
        ------
        ConfigurationError
            It does not follow the one before.
        """
        self._check_joined(request.trainer)
        with self._lock:
            if not request.offset:
                self._save, self._arrived = request.save, bytearray()
            if (request.save, request.offset) != (self._save, len(self._arrived)):
                raise ConfigurationError(
                    f"a piece of the trainer's part of the save {request.save!r} begins at {request.offset}; "
                    f"expected one of {self._save!r} at {len(self._arrived)}: save again"
                )
            self._arrived += request.data

    def take(self, save: str, size: int) -> bytes | bytearray:
        """Return the part that has arrived for a save, and forget it; nothing for a size of 0.

        Raises
        ------
        FleetError
            It is of another save, or not whole.
        """
        if not size:
            return b""
        with self._lock:
            of, arrived = self._save, self._arrived
            self._save, self._arrived = "", bytearray()
        if (of, len(arrived)) != (save, size):
            raise FleetError(
                f"the trainer's part of the save {save!r} has {size} bytes, and {len(arrived)} have come of "
                f"{of!r}: save again"
            )
        return arrived

    def offer(self, trainer: int, part: bytes | None) -> int:
        """Let a trainer fetch a part, or none, in place of what it could before; return its size in bytes."""
        with self._lock:
            self._found[trainer] = part or b""
        return len(part or b"")

    def piece(self, request: control_pb2.FoundPartRequest) -> bytes:
        """Return the piece that begins at a place; nothing from the end on."""
        self._check_joined(request.trainer)
        with self._lock:
            part = self._found.get(request.trainer.id, b"")
        return part[request.offset : request.offset + PIECE_BYTES]
