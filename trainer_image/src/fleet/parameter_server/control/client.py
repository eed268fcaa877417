"""A trainer's client for the control service of one server."""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import grpc

from fleet.parameter_server.certificates import Certificates
from fleet.parameter_server.control.calls import Pending, Stream, error_of
from fleet.parameter_server.control.channel import ServerStub, check_encrypts
from fleet.parameter_server.control.checkpoints import CheckpointClient
from fleet.parameter_server.control.guard import MOST_TRIES, Prover
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.control.reduction import Contribution
from fleet.parameter_server.waits import FIRST_WORD_SECONDS
from fleet.plan.placement import Part, Placement

__all__ = ["ControlClient", "read_placement"]

_NO_RETRY: Final = frozenset({"Heartbeat", "Norm"})
"""Calls that gRPC must not retry: a late heartbeat is useless, and `PeerServers` itself retries norms."""
_FRESH_SECONDS: Final = 20.0
"""The time for which a call may wait for its server before the call is repeated with a fresh proof."""
_LOOK_SECONDS: Final = 0.5


class ControlClient:
    """A trainer's control channel to one server.

    Parameters
    ----------
    endpoint : str
        ``host:port`` of the server.
    trainer, attempt : int
        The id and the attempt of the calling trainer.
    retry_times : int
        The number of retries of an unanswered call, at most four, with exponential backoff. The servers
        recognize repeated calls.
    prover : Prover, optional
        Proves each call if the job has a key.
    certificates : Certificates, optional
        The certificates for TLS.
    """

    def __init__(
        self,
        endpoint: str,
        trainer: int,
        attempt: int,
        retry_times: int = 3,
        prover: Prover | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._trainer = control_pb2.Trainer(id=trainer, attempt=attempt)
        self._certificates = certificates
        self._stub = ServerStub(endpoint, prover, _retrying(retry_times), certificates)
        self._describe = partial(error_of, endpoint)
        self.checkpoints = CheckpointClient(self._stub, self._trainer, self._describe)
        """The client for checkpoint calls."""

    def join(
        self,
        job_name: str,
        job_uid: str,
        agreement: Mapping[str, str],
        timeout_seconds: float,
        waiting: Callable[[], object],
    ) -> control_pb2.JoinReply:
        """Ask the server to admit this trainer; call `waiting` repeatedly until the reply arrives.

        Raises
        ------
        ConfigurationError
            The server refuses the trainer, and the message gives the reason; or only one end uses TLS.
        PeerLostError
            The server did not answer in time.
        """
        request = control_pb2.JoinRequest(
            job_name=job_name,
            job_uid=job_uid,
            trainer=self._trainer,
            agreement=dict(agreement),
        )
        began, looked = time.monotonic(), False
        deadline = began + timeout_seconds
        while True:
            left = max(0.0, deadline - time.monotonic())
            # Without `wait_for_ready`, gRPC fails the call as soon as it finds that no server is listening.
            future = self._stub.now.Join.future(
                request, timeout=min(left, _FRESH_SECONDS), wait_for_ready=True
            )
            pending = Pending(future, self._describe)
            while not pending.arrives_within(_LOOK_SECONDS):
                waiting()
                if not looked and time.monotonic() - began >= FIRST_WORD_SECONDS:
                    looked = True
                    check_encrypts(self.endpoint, self._certificates)
            try:
                return future.result()
            except grpc.RpcError as error:
                timed_out = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if not timed_out or left <= _FRESH_SECONDS:
                    raise self._describe(error) from error

    def completed(
        self, job_name: str, job_uid: str, life: str, timeout_seconds: float
    ) -> Pending[control_pb2.CompletedReply]:
        """Ask which trainers have completed in this training run."""
        request = control_pb2.CompletedRequest(job_name=job_name, job_uid=job_uid, life=life)
        return Pending(self._stub.now.Completed.future(request, timeout=timeout_seconds), self._describe)

    def heartbeat(self, timeout_seconds: float) -> "grpc.Future[control_pb2.HeartbeatReply]":
        """Send a heartbeat; return the reply as a future, so that calls can run concurrently."""
        return self._stub.now.Heartbeat.future(
            control_pb2.HeartbeatRequest(trainer=self._trainer), timeout=timeout_seconds
        )

    def ask_steps_past(self, timeout_seconds: float) -> Pending[control_pb2.HeartbeatReply]:
        """Send a heartbeat to ask how many steps this trainer has run after the others completed."""
        return Pending(self.heartbeat(timeout_seconds), self._describe)

    def stats(self, timeout_seconds: float) -> "Pending[control_pb2.StatsReply]":
        """Request the server's progress and traffic statistics."""
        return Pending(
            self._stub.now.Stats.future(control_pb2.StatsRequest(), timeout=timeout_seconds), self._describe
        )

    def barrier(
        self, passed: int, timeout_seconds: float, *, ending: bool = False
    ) -> control_pb2.BarrierReply:
        """Arrive at the barrier that follows `passed` earlier ones; call again until it completes.

        With `ending`, the barrier is the end of training, which is passed once every trainer has run its last
        step.
        """
        request = control_pb2.BarrierRequest(trainer=self._trainer, passed=passed, ending=ending)
        return Pending(
            self._stub.now.Barrier.future(request, timeout=timeout_seconds), self._describe
        ).result()

    def state(self, *, values: bool = False) -> Stream[control_pb2.StatePiece]:
        """Request the server's optimizer state or values as a stream."""
        call = self._stub.now.State(control_pb2.StateRequest(values=values))
        return Stream(call, self.endpoint, self._describe)

    def reduce(self, passed: int, given: Contribution, timeout_seconds: float) -> control_pb2.ReduceReply:
        """Contribute to the reduction that follows `passed` earlier ones; call again until it completes."""
        request = control_pb2.ReduceRequest(
            trainer=self._trainer,
            passed=passed,
            operation=given.operation,
            dtype=given.dtype,
            shape=given.shape,
            data=given.data,
        )
        return Pending(
            self._stub.now.Reduce.future(request, timeout=timeout_seconds), self._describe
        ).result()

    def write(self, block: int, value: memoryview, timeout_seconds: float) -> Pending[control_pb2.WriteReply]:
        """Ask the server to replace its value of a block."""
        request = control_pb2.WriteRequest(trainer=self._trainer, block=block, value=bytes(value))
        return Pending(self._stub.now.Write.future(request, timeout=timeout_seconds), self._describe)

    def close(self) -> None:
        """Close the channel."""
        self._stub.close()


def _retrying(retry_times: int) -> list[tuple[str, int | str]]:
    """Return the channel options with which gRPC retries calls that fail with UNAVAILABLE."""
    if retry_times == 0:
        return [("grpc.enable_retries", 0)]
    service = control_pb2.DESCRIPTOR.services_by_name["ParameterServer"]
    policy = {
        "name": [
            {"service": service.full_name, "method": method.name}
            for method in service.methods
            if method.name not in _NO_RETRY
        ],
        "retryPolicy": {
            "maxAttempts": min(retry_times + 1, MOST_TRIES),
            "initialBackoff": "0.2s",
            "maxBackoff": "2s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        },
    }
    return [("grpc.service_config", json.dumps({"methodConfig": [policy]}))]


def read_placement(message: control_pb2.Placement) -> Placement:
    """Decode the placement of a server's blocks."""
    parts = (
        Part(part.block, part.name, part.index, part.param, part.dtype, part.begin, tuple(part.shape))
        for part in message.parts
    )
    return Placement(tuple(parts), message.version)
