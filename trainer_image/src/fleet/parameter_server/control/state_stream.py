"""What a server holds as messages: its blocks' values, or their optimizers' state; and back.

A state's tensors travel first; its entries then come as JSON that names them, so that whatever else an
optimizer keeps, a count or None, arrives as what it was.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from fleet.checkpoint import decode, encode
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.transport.arena import bytes_of, dtype_of

__all__ = ["PIECE_BYTES", "join_states", "join_values", "pieces_of_state", "pieces_of_tensor"]

PIECE_BYTES: Final = 1 << 20
"""So much of a tensor or a file travels in a message."""


def pieces_of_tensor(block: int, name: str, tensor: Tensor) -> Iterator[control_pb2.StatePiece]:
    """Iterate over the messages that carry a tensor.

    Parameters
    ----------
    block : int
    name : str
        The tensor's in the block's state; empty for the block's value.
    tensor : Tensor
        Of the CPU.
    """
    data = bytes_of(tensor.contiguous())
    dtype = str(tensor.dtype).removeprefix("torch.")
    for begin in range(0, max(len(data), 1), PIECE_BYTES):
        yield control_pb2.StatePiece(
            block=block,
            name=name,
            dtype=dtype,
            shape=tensor.shape,
            data=bytes(data[begin : begin + PIECE_BYTES]),
            last=begin + PIECE_BYTES >= len(data),
        )


def pieces_of_state(block: int, state: Mapping[str, object]) -> Iterator[control_pb2.StatePiece]:
    """Return the messages that carry the state of a block's optimizer.

    Parameters
    ----------
    block : int
    state : mapping of name to entry
        Tensors, and what `fleet.checkpoint.encode` takes beside.

    Raises
    ------
    ConfigurationError
        There is something else in it; the message says where.
    """
    tensors: dict[str, Tensor] = {}
    entries = json.dumps({name: encode(entry, tensors, name) for name, entry in state.items()})
    return _pieces_of(block, tensors, entries)


def _pieces_of(block: int, tensors: Mapping[str, Tensor], entries: str) -> Iterator[control_pb2.StatePiece]:
    for name, tensor in tensors.items():
        yield from pieces_of_tensor(block, name, tensor)
    yield control_pb2.StatePiece(block=block, entries=entries)


def join_values(pieces: Iterable[control_pb2.StatePiece]) -> dict[int, Tensor]:
    """Return the values that servers have sent, one server after the other, by block."""
    return {piece.block: tensor for piece, tensor in _ends(pieces)}


def join_states(pieces: Iterable[control_pb2.StatePiece]) -> dict[int, dict[str, Any]]:
    """Return the optimizers' state that servers have sent, one server after the other, by block."""
    states: dict[int, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    for piece, tensor in _ends(pieces):
        if not piece.entries:
            tensors[piece.name] = tensor
            continue
        entries = json.loads(piece.entries)
        states[piece.block] = {name: decode(entry, tensors) for name, entry in entries.items()}
        tensors = {}
    return states


def _ends(
    pieces: Iterable[control_pb2.StatePiece],
) -> Iterator[tuple[control_pb2.StatePiece, Tensor]]:
    """Iterate over the last piece of each tensor, with the tensor; over entries with an empty one."""
    data = bytearray()
    for piece in pieces:
        data += piece.data
        if piece.last:
            tensor = torch.empty(tuple(piece.shape), dtype=dtype_of(piece.dtype))
            bytes_of(tensor)[:] = data
            yield piece, tensor
            data.clear()
        elif piece.entries:
            yield piece, torch.empty(0)
