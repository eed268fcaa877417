"""A trainer's calls about checkpoints, to one server."""

from collections.abc import Callable, Iterable

import grpc

from fleet.errors import FleetError
from fleet.parameter_server.control.channel import ServerStub
from fleet.parameter_server.control.pending import Pending
from fleet.parameter_server.control.proto import control_pb2

__all__ = ["CheckpointClient"]


class CheckpointClient:
    """Asks a server to save and to load; each reply is awaited apart, so that all servers work at once.

    Parameters
    ----------
    stub : ServerStub
    trainer : Trainer
        Who calls.
    describe : callable
        Makes our error of gRPC's.
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
    ) -> "Pending[control_pb2.SaveReply]":
        """Ask the server to copy what it holds, and to begin to write its files of a checkpoint.

        With so many bytes of the trainer's own part, which `part` has brought.
        """
        request = control_pb2.SaveRequest(
            trainer=self._trainer,
            directory=directory,
            save=save,
            step=step,
            part_bytes=part_bytes,
            incremental=incremental,
        )
        return Pending(self._stub.now.Save.future(request, timeout=timeout_seconds), self._describe)

    def part(
        self, save: str, offset: int, data: bytes, timeout_seconds: float
    ) -> "Pending[control_pb2.PartReply]":
        """Send a piece of the trainer's own part of the next save."""
        request = control_pb2.PartRequest(trainer=self._trainer, save=save, offset=offset, data=data)
        return Pending(self._stub.now.Part.future(request, timeout=timeout_seconds), self._describe)

    def found_part(self, offset: int, timeout_seconds: float) -> "Pending[control_pb2.FoundPartReply]":
        """Ask for a piece of the trainer's part of the checkpoint that `load` has found last."""
        request = control_pb2.FoundPartRequest(trainer=self._trainer, offset=offset)
        return Pending(self._stub.now.FoundPart.future(request, timeout=timeout_seconds), self._describe)

    def hand_in(self, step: int, part: bytes, timeout_seconds: float) -> "Pending[control_pb2.StatusReply]":
        """Say how far this trainer's script has come, for the checkpoints that follow."""
        request = control_pb2.StatusRequest(trainer=self._trainer, step=step, part=part)
        return Pending(self._stub.now.Status.future(request, timeout=timeout_seconds), self._describe)

    def written(self, save: str, timeout_seconds: float) -> "Pending[control_pb2.WrittenReply]":
        """Ask whether a save's files are on the disk, and which they are."""
        request = control_pb2.WrittenRequest(trainer=self._trainer, save=save)
        return Pending(self._stub.now.Written.future(request, timeout=timeout_seconds), self._describe)

    def commit(
        self, directory: str, manifest: str, timeout_seconds: float
    ) -> "Pending[control_pb2.CommitReply]":
        """Ask for the manifest; with none, that what it has replaced be removed."""
        request = control_pb2.CommitRequest(trainer=self._trainer, directory=directory, manifest=manifest)
        return Pending(self._stub.now.Commit.future(request, timeout=timeout_seconds), self._describe)

    def load(
        self, directory: str, timeout_seconds: float, save: str = ""
    ) -> "Pending[control_pb2.LoadReply]":
        """Ask the server to load a checkpoint unless training has begun, or only what it has loaded."""
        request = control_pb2.LoadRequest(trainer=self._trainer, directory=directory, save=save)
        return Pending(self._stub.now.Load.future(request, timeout=timeout_seconds), self._describe)

    def numbers(
        self, directory: str, timeout_seconds: float, *, verify: bool = False, remove: Iterable[int] = ()
    ) -> "Pending[control_pb2.CheckpointsReply]":
        """Ask for the numbers of a folder's checkpoints, and which are whole; some are removed first."""
        request = control_pb2.CheckpointsRequest(
            trainer=self._trainer, directory=directory, verify=verify, remove=remove
        )
        return Pending(self._stub.now.Checkpoints.future(request, timeout=timeout_seconds), self._describe)
