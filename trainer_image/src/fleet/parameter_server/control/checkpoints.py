"""Checkpoint calls of the control service, for client and server, and the encoding of streamed state.

A server's values, or its optimizers' state, travel as a stream of `StatePiece`. The tensors of a block's
state come first, followed by its entries as JSON, which refers to the tensors by name. An entry that is not a
tensor, such as a step count or None, therefore keeps its type.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
import torch
from torch import Tensor

from fleet.checkpoint import decode, encode
from fleet.errors import FleetError
from fleet.parameter_server.control.calls import CHUNK_BYTES, Pending, answer
from fleet.parameter_server.control.channel import ServerStub
from fleet.parameter_server.control.proto import control_pb2, control_pb2_grpc
from fleet.parameter_server.transport.arena import bytes_of, dtype_of

if TYPE_CHECKING:
    from fleet.parameter_server.server.shard_checkpointer import ShardCheckpointer

__all__ = [
    "CheckpointClient",
    "CheckpointServicer",
    "join_states",
    "join_values",
    "pieces_of_state",
    "pieces_of_tensor",
]

Reply = TypeVar("Reply")


class CheckpointClient:
    """A trainer's checkpoint calls to one server. Replies are futures, so calls can run concurrently.

    Parameters
    ----------
    stub : ServerStub
    trainer : Trainer
        The caller.
    describe : callable
        Converts a gRPC error to a FleetError.
    """

    def __init__(
        self,
        stub: ServerStub,
        trainer: control_pb2.Trainer,
        describe: Callable[[grpc.RpcError], FleetError],
    ) -> None:
        self._stub = stub
        self._trainer = trainer
        self._describe = describe

    def save(
        self,
        directory: str,
        save: str,
        step: int,
        part_bytes: int,
        timeout_seconds: float,
        *,
        incremental: bool = False,
    ) -> Pending[control_pb2.SaveReply]:
        """Ask the server to copy its shard and start writing the copy.

        The save includes the `part_bytes` bytes of trainer 0's part that `upload_part` has already sent.
        """
        request = control_pb2.SaveRequest(
            trainer=self._trainer,
            directory=directory,
            save=save,
            step=step,
            part_bytes=part_bytes,
            incremental=incremental,
        )
        return self._pending(self._stub.now.Save.future(request, timeout=timeout_seconds))

    def written(self, save: str, timeout_seconds: float) -> Pending[control_pb2.WrittenReply]:
        """Ask whether the files of a save are durable; if so, the reply has their records."""
        request = control_pb2.WrittenRequest(trainer=self._trainer, save=save)
        return self._pending(self._stub.now.Written.future(request, timeout=timeout_seconds))

    def commit(
        self, directory: str, manifest: str, timeout_seconds: float
    ) -> Pending[control_pb2.CommitReply]:
        """Ask the server to write the manifest or, if `manifest` is empty, to remove replaced files."""
        request = control_pb2.CommitRequest(trainer=self._trainer, directory=directory, manifest=manifest)
        return self._pending(self._stub.now.Commit.future(request, timeout=timeout_seconds))

    def numbers(
        self, directory: str, timeout_seconds: float, *, verify: bool = False, remove: Iterable[int] = ()
    ) -> Pending[control_pb2.CheckpointsReply]:
        """Remove numbered checkpoints; list the remaining ones and, with `verify`, the complete ones."""
        request = control_pb2.CheckpointsRequest(
            trainer=self._trainer, directory=directory, verify=verify, remove=remove
        )
        return self._pending(self._stub.now.Checkpoints.future(request, timeout=timeout_seconds))

    def load(self, directory: str, timeout_seconds: float, save: str = "") -> Pending[control_pb2.LoadReply]:
        """Ask the server to load a checkpoint or, once training has begun, to name the loaded one."""
        request = control_pb2.LoadRequest(trainer=self._trainer, directory=directory, save=save)
        return self._pending(self._stub.now.Load.future(request, timeout=timeout_seconds))

    def upload_part(
        self, save: str, offset: int, data: bytes, timeout_seconds: float
    ) -> Pending[control_pb2.PartReply]:
        """Upload a chunk of trainer 0's part for the next save."""
        request = control_pb2.PartRequest(trainer=self._trainer, save=save, offset=offset, data=data)
        return self._pending(self._stub.now.Part.future(request, timeout=timeout_seconds))

    def download_part(self, offset: int, timeout_seconds: float) -> Pending[control_pb2.FoundPartReply]:
        """Download a chunk of trainer 0's part of the checkpoint that the last `load` selected."""
        request = control_pb2.FoundPartRequest(trainer=self._trainer, offset=offset)
        return self._pending(self._stub.now.FoundPart.future(request, timeout=timeout_seconds))

    def set_status(self, step: int, part: bytes, timeout_seconds: float) -> Pending[control_pb2.StatusReply]:
        """Send this trainer's script status, which later checkpoints include."""
        request = control_pb2.StatusRequest(trainer=self._trainer, step=step, part=part)
        return self._pending(self._stub.now.Status.future(request, timeout=timeout_seconds))

    def _pending(self, future: "grpc.Future[Reply]") -> Pending[Reply]:
        return Pending(future, self._describe)


class CheckpointServicer(control_pb2_grpc.ParameterServerServicer):
    """The server's handlers for the calls of `CheckpointClient`, and for `ControlClient.write`.

    Each handler calls a method of `ShardCheckpointer`, and ends the gRPC call with a status if that fails.

    Parameters
    ----------
    checkpoints : ShardCheckpointer
    """

    def __init__(self, checkpoints: "ShardCheckpointer") -> None:
        self._checkpoints = checkpoints

    def Save(  # noqa: N802 - gRPC's name
        self, request: control_pb2.SaveRequest, context: grpc.ServicerContext
    ) -> control_pb2.SaveReply:
        """Copy the shard for a save, and start writing the copy."""
        return answer(context, lambda: self._checkpoints.save(request))

    def Written(  # noqa: N802 - gRPC's name
        self, request: control_pb2.WrittenRequest, context: grpc.ServicerContext
    ) -> control_pb2.WrittenReply:
        """Return the records of a save's files, or reply that the files are not written yet."""
        return answer(context, lambda: self._checkpoints.written(request))

    def Commit(  # noqa: N802 - gRPC's name
        self, request: control_pb2.CommitRequest, context: grpc.ServicerContext
    ) -> control_pb2.CommitReply:
        """Write the manifest of a save, or remove the files that the save replaced."""
        return answer(context, lambda: self._checkpoints.commit(request))

    def Checkpoints(  # noqa: N802 - gRPC's name
        self, request: control_pb2.CheckpointsRequest, context: grpc.ServicerContext
    ) -> control_pb2.CheckpointsReply:
        """Remove the requested numbered checkpoints of a folder; return the numbers of the others."""
        return answer(context, lambda: self._checkpoints.numbers(request))

    def Load(  # noqa: N802 - gRPC's name
        self, request: control_pb2.LoadRequest, context: grpc.ServicerContext
    ) -> control_pb2.LoadReply:
        """Load a checkpoint unless training has begun; return what is loaded, and the next step."""
        return answer(context, lambda: self._checkpoints.load(request))

    def Part(  # noqa: N802 - gRPC's name
        self, request: control_pb2.PartRequest, context: grpc.ServicerContext
    ) -> control_pb2.PartReply:
        """Store an uploaded chunk of trainer 0's part for the next save."""
        return answer(context, lambda: self._checkpoints.upload_part(request))

    def FoundPart(  # noqa: N802 - gRPC's name
        self, request: control_pb2.FoundPartRequest, context: grpc.ServicerContext
    ) -> control_pb2.FoundPartReply:
        """Return a chunk of trainer 0's part of the checkpoint that the last `Load` returned."""
        return answer(context, lambda: self._checkpoints.download_part(request))

    def Status(  # noqa: N802 - gRPC's name
        self, request: control_pb2.StatusRequest, context: grpc.ServicerContext
    ) -> control_pb2.StatusReply:
        """Store the script status of a trainer for later checkpoints."""
        return answer(context, lambda: self._checkpoints.set_status(request))

    def Write(  # noqa: N802 - gRPC's name
        self, request: control_pb2.WriteRequest, context: grpc.ServicerContext
    ) -> control_pb2.WriteReply:
        """Replace the value of a block."""
        return answer(context, lambda: self._checkpoints.write(request))


def pieces_of_tensor(block: int, name: str, tensor: Tensor) -> Iterator[control_pb2.StatePiece]:
    """Yield the messages that carry a tensor.

    Parameters
    ----------
    block : int
    name : str
        The tensor's name in the block's state; empty for the block's value.
    tensor : Tensor
        The tensor, which must be on the CPU.
    """
    data = bytes_of(tensor.contiguous())
    dtype = str(tensor.dtype).removeprefix("torch.")
    # An empty tensor, too, needs one message.
    for begin in range(0, max(len(data), 1), CHUNK_BYTES):
        yield control_pb2.StatePiece(
            block=block,
            name=name,
            dtype=dtype,
            shape=tensor.shape,
            data=bytes(data[begin : begin + CHUNK_BYTES]),
            last=begin + CHUNK_BYTES >= len(data),
        )


def pieces_of_state(block: int, state: Mapping[str, object]) -> Iterator[control_pb2.StatePiece]:
    """Return the messages that carry the optimizer state of a block.

    Parameters
    ----------
    block : int
    state : mapping of name to entry
        Tensors, and other values that `fleet.checkpoint.encode` accepts.

    Raises
    ------
    ConfigurationError
        An entry has an unsupported type; the message gives its path.
    """
    tensors: dict[str, Tensor] = {}
    # Not in the generator: an error must reach the caller before the first message is sent.
    entries = json.dumps({name: encode(entry, tensors, name) for name, entry in state.items()})
    return _pieces_of(block, tensors, entries)


def join_values(pieces: Iterable[control_pb2.StatePiece]) -> dict[int, Tensor]:
    """Join the messages of a stream of values; return the value of each block."""
    return {piece.block: tensor for piece, tensor in _tensors_in(pieces)}


def join_states(pieces: Iterable[control_pb2.StatePiece]) -> dict[int, dict[str, Any]]:
    """Join the messages of a stream of optimizer states; return the state of each block."""
    states: dict[int, dict[str, Any]] = {}
    tensors: dict[str, Tensor] = {}
    for piece, tensor in _tensors_in(pieces):
        if not piece.entries:
            tensors[piece.name] = tensor
            continue
        entries = json.loads(piece.entries)
        states[piece.block] = {name: decode(entry, tensors) for name, entry in entries.items()}
        tensors = {}
    return states


def _pieces_of(block: int, tensors: Mapping[str, Tensor], entries: str) -> Iterator[control_pb2.StatePiece]:
    for name, tensor in tensors.items():
        yield from pieces_of_tensor(block, name, tensor)
    yield control_pb2.StatePiece(block=block, entries=entries)


def _tensors_in(
    pieces: Iterable[control_pb2.StatePiece],
) -> Iterator[tuple[control_pb2.StatePiece, Tensor]]:
    """Yield each tensor with its last message, and an empty tensor with each message that has entries."""
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
