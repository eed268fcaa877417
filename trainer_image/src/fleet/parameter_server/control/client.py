"""A trainer's calls to the control service of one server."""

import json
import time
from collections.abc import Callable, Mapping
from typing import Final

import grpc

from fleet.errors import FleetError
from fleet.parameter_server.certificates import Certificates
from fleet.parameter_server.control.channel import ServerStub, check_encrypts
from fleet.parameter_server.control.checkpoints import CheckpointClient
from fleet.parameter_server.control.guard import MOST_TRIES, Prover
from fleet.parameter_server.control.pending import Pending
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.control.reduction import Contribution
from fleet.parameter_server.control.refusals import error_of
from fleet.parameter_server.control.streams import Stream
from fleet.parameter_server.waiting import FIRST_WORD_SECONDS

__all__ = ["ControlClient"]

_NEVER_AGAIN: Final = frozenset({"Heartbeat", "Norm"})
"""Calls that say nothing new when they come later, or are repeated by who makes them."""
_FRESH_SECONDS: Final = 20.0
"""How long a call may wait for its server before it is made anew: its proof holds for a while only."""
_LOOK_SECONDS: Final = 0.5


class ControlClient:
    """The control channel from one trainer to one server.

    Parameters
    ----------
    endpoint : str
        ``host:port`` of the server.
    trainer, attempt : int
        Who calls.
    retry_times : int
        How often a call that found nobody is made again, after ever longer pauses; four times at most.
        The servers take none of them twice.
    prover : Prover, optional
        Proves each call, where the job has a key.
    certificates : Certificates, optional
        With which calls are encrypted.
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
        self.checkpoints = CheckpointClient(self._stub, self._trainer, self._error)
        """The calls about checkpoints."""

    def join(
        self,
        job_name: str,
        job_uid: str,
        agreement: Mapping[str, str],
        timeout_seconds: float,
        waiting: Callable[[], object],
    ) -> control_pb2.JoinReply:
        """Ask to be admitted; `waiting` is called now and then while there is no answer.

        Raises
        ------
        ConfigurationError
            The server refuses, with its reason; or only one of both ends encrypts.
        PeerLostError
            There was no answer in time.
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
            future = self._stub.now.Join.future(
                request, timeout=min(left, _FRESH_SECONDS), wait_for_ready=True
            )
            pending = Pending(future, self._error)
            while not pending.arrives_within(_LOOK_SECONDS):
                waiting()
                if not looked and time.monotonic() - began >= FIRST_WORD_SECONDS:
                    looked = True
                    check_encrypts(self.endpoint, self._certificates)
            try:
                return future.result()
            except grpc.RpcError as error:
                waited = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if not waited or left <= _FRESH_SECONDS:
                    raise self._error(error) from error

    def completed(
        self, job_name: str, job_uid: str, life: str, timeout_seconds: float
    ) -> Pending[control_pb2.CompletedReply]:
        """Ask which trainers have completed in this training."""
        request = control_pb2.CompletedRequest(job_name=job_name, job_uid=job_uid, life=life)
        return Pending(self._stub.now.Completed.future(request, timeout=timeout_seconds), self._error)

    def heartbeat(self, timeout_seconds: float) -> "grpc.Future[control_pb2.HeartbeatReply]":
        """Send a sign of life; the reply comes as a future, so that many servers are called at once."""
        return self._stub.now.Heartbeat.future(
            control_pb2.HeartbeatRequest(trainer=self._trainer), timeout=timeout_seconds
        )

    def ask_steps_past(self, timeout_seconds: float) -> Pending[control_pb2.HeartbeatReply]:
        """Ask how far this trainer is past the others; an answer to a sign of life says it, too."""
        return Pending(self.heartbeat(timeout_seconds), self._error)

    def stats(self, timeout_seconds: float) -> "Pending[control_pb2.StatsReply]":
        """Ask what the server has done so far."""
        return Pending(
            self._stub.now.Stats.future(control_pb2.StatsRequest(), timeout=timeout_seconds), self._error
        )

    def barrier(
        self, passed: int, timeout_seconds: float, *, ending: bool = False
    ) -> control_pb2.BarrierReply:
        """Arrive at the barrier that follows `passed` others, or ask again whether it is passed.

        With `ending` it is the end of the training, which is passed once nobody trains any more.
        """
        request = control_pb2.BarrierRequest(trainer=self._trainer, passed=passed, ending=ending)
        try:
            return self._stub.now.Barrier(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise self._error(error) from error

    def state(self, *, values: bool = False) -> Stream[control_pb2.StatePiece]:
        """Ask for the server's optimizer state, or for its values, piece by piece."""
        call = self._stub.now.State(control_pb2.StateRequest(values=values))
        return Stream(call, self.endpoint, self._error)

    def reduce(self, passed: int, given: Contribution, timeout_seconds: float) -> control_pb2.ReduceReply:
        """Give this trainer's part of the reduction that follows `passed` others, or ask again for it."""
        request = control_pb2.ReduceRequest(
            trainer=self._trainer,
            passed=passed,
            operation=given.operation,
            dtype=given.dtype,
            shape=given.shape,
            data=given.data,
        )
        try:
            return self._stub.now.Reduce(request, timeout=timeout_seconds)
        except grpc.RpcError as error:
            raise self._error(error) from error

    def write(self, block: int, value: memoryview, timeout_seconds: float) -> Pending[control_pb2.WriteReply]:
        """Give the server a block's value in place of the one that it holds."""
        request = control_pb2.WriteRequest(trainer=self._trainer, block=block, value=bytes(value))
        return Pending(self._stub.now.Write.future(request, timeout=timeout_seconds), self._error)

    def close(self) -> None:
        """Close the channel."""
        self._stub.close()

    def _error(self, error: grpc.RpcError) -> FleetError:
        return error_of(self.endpoint, error)


def _retrying(retry_times: int) -> list[tuple[str, int | str]]:
    """Return the options of a channel that makes calls again which fail with UNAVAILABLE."""
    if retry_times == 0:
        return [("grpc.enable_retries", 0)]
    service = control_pb2.DESCRIPTOR.services_by_name["ParameterServer"]
    policy = {
        "name": [
            {"service": service.full_name, "method": method.name}
            for method in service.methods
            if method.name not in _NEVER_AGAIN
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
