"""Trainer 0's part of checkpoints, as a trainer sends and fetches it: in pieces, as it may be of any size."""

from functools import partial
from typing import TYPE_CHECKING

from fleet.errors import FleetError
from fleet.parameter_server.control.client import ControlClient
from fleet.parameter_server.control.state_stream import PIECE_BYTES
from fleet.parameter_server.trainer.calls import ServerCalls

if TYPE_CHECKING:
    from fleet.parameter_server.control.pending import Pending
    from fleet.parameter_server.control.proto import control_pb2

__all__ = ["fetch_part", "send_part"]


def send_part(calls: ServerCalls, save: str, part: bytes) -> None:
    """Send the first server the part that its save of this name is to have.

    Raises
    ------
    FleetError
        The server refuses, or is not there any more.
    """
    for offset in range(0, len(part), PIECE_BYTES):
        calls.ask(0, partial(_send, save, offset, part[offset : offset + PIECE_BYTES]))


def fetch_part(calls: ServerCalls, server: int, size: int) -> bytes:
    """Return the part of the checkpoint that a server has told of, in as many bytes as it has said.

    Raises
    ------
    FleetError
        The server gives less, or is not there any more.
    """
    part = bytearray()

    def fetch(control: ControlClient, seconds: float) -> "Pending[control_pb2.FoundPartReply]":
        return control.checkpoints.found_part(len(part), seconds)

    while len(part) < size:
        data = calls.ask(server, fetch).data
        if not data:
            raise FleetError(
                f"parameter server {calls.controls[server].endpoint} gives {len(part)} bytes of the "
                f"trainer's part of its checkpoint, expected {size}: load it again"
            )
        part += data
    return bytes(part)


def _send(
    save: str, offset: int, data: bytes, control: ControlClient, seconds: float
) -> "Pending[control_pb2.PartReply]":
    return control.checkpoints.part(save, offset, data, seconds)
