"""The calls about checkpoints, and about values that a script writes, as a server answers them."""

from typing import TYPE_CHECKING

import grpc

from fleet.parameter_server.control.proto import control_pb2, control_pb2_grpc
from fleet.parameter_server.control.refusals import answer

if TYPE_CHECKING:
    from fleet.parameter_server.server.checkpoints import ServerCheckpoints

__all__ = ["CheckpointServicer"]


class CheckpointServicer(control_pb2_grpc.ParameterServerServicer):
    """Translates these calls; holds no state.

    Parameters
    ----------
    checkpoints : ServerCheckpoints
    """

    def __init__(self, checkpoints: "ServerCheckpoints") -> None:
        self._checkpoints = checkpoints

    def Save(  # noqa: N802 - the service's name
        self, request: control_pb2.SaveRequest, context: grpc.ServicerContext
    ) -> control_pb2.SaveReply:
        """Begin a save; say how many steps of each trainer are in the copy, and what was saved before."""
        return answer(context, lambda: self._checkpoints.save(request))

    def Part(  # noqa: N802 - the service's name
        self, request: control_pb2.PartRequest, context: grpc.ServicerContext
    ) -> control_pb2.PartReply:
        """Take a piece of the trainer's own part of the next save."""
        answer(context, lambda: self._checkpoints.parts.receive(request))
        return control_pb2.PartReply()

    def FoundPart(  # noqa: N802 - the service's name
        self, request: control_pb2.FoundPartRequest, context: grpc.ServicerContext
    ) -> control_pb2.FoundPartReply:
        """Give a piece of what the checkpoint has of trainer 0 that was found last."""
        data = answer(context, lambda: self._checkpoints.parts.piece(request))
        return control_pb2.FoundPartReply(data=data)

    def Status(  # noqa: N802 - the service's name
        self, request: control_pb2.StatusRequest, context: grpc.ServicerContext
    ) -> control_pb2.StatusReply:
        """Take what a trainer says of itself."""
        answer(context, lambda: self._checkpoints.hand_in(request))
        return control_pb2.StatusReply()

    def Written(  # noqa: N802 - the service's name
        self, request: control_pb2.WrittenRequest, context: grpc.ServicerContext
    ) -> control_pb2.WrittenReply:
        """Say what a save has written, once that is on the disk."""
        written = answer(context, lambda: self._checkpoints.written(request))
        files = [file.to_json() for file in written or ()]
        return control_pb2.WrittenReply(done=written is not None, files=files)

    def Commit(  # noqa: N802 - the service's name
        self, request: control_pb2.CommitRequest, context: grpc.ServicerContext
    ) -> control_pb2.CommitReply:
        """Make what was written a checkpoint, or remove what that has replaced."""
        answer(context, lambda: self._checkpoints.commit(request))
        return control_pb2.CommitReply()

    def Load(  # noqa: N802 - the service's name
        self, request: control_pb2.LoadRequest, context: grpc.ServicerContext
    ) -> control_pb2.LoadReply:
        """Load a checkpoint, and say what is loaded."""
        return answer(context, lambda: self._checkpoints.load(request))

    def Checkpoints(  # noqa: N802 - the service's name
        self, request: control_pb2.CheckpointsRequest, context: grpc.ServicerContext
    ) -> control_pb2.CheckpointsReply:
        """Say which checkpoints a folder has."""
        return answer(context, lambda: self._checkpoints.numbers(request))

    def Write(  # noqa: N802 - the service's name
        self, request: control_pb2.WriteRequest, context: grpc.ServicerContext
    ) -> control_pb2.WriteReply:
        """Take a block's value."""
        answer(context, lambda: self._checkpoints.write(request))
        return control_pb2.WriteReply()
