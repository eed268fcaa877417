"""Calls from a parameter server to its peers, to send them parts of gradient norms."""

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import grpc

from fleet.errors import ConfigurationError, FleetError, PeerLostError, RemoteProtocolError
from fleet.parameter_server.certificates import certificates_of
from fleet.parameter_server.control.channel import ServerStub
from fleet.parameter_server.control.guard import prover_of
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.shard import NormPart
from fleet.plan.job import ServerPlan

if TYPE_CHECKING:
    from fleet.role_maker import JobIdentity

__all__ = ["PeerServers"]

_FRESH_SECONDS: Final = 20.0
"""The time after which a call is repeated, because its proof of the job's key expires."""


class PeerServers:
    """A client for the other servers of the job. No method blocks; a callback reports failures.

    Parameters
    ----------
    plan : ServerPlan
        The plan of this server, with the endpoints of the others.
    job : JobIdentity
    settings : Settings
    on_failure : callable
        Called from any thread when a server refuses a call or does not answer it before the deadline.
    """

    def __init__(
        self,
        plan: ServerPlan,
        job: "JobIdentity",
        settings: Settings,
        on_failure: Callable[[FleetError], None],
    ) -> None:
        self._plan = plan
        self._job = job
        self._settings = settings
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._certificates = certificates_of(settings)
        self._stubs: dict[int, ServerStub] = {}
        self._closed = False

    def send(self, part: NormPart, servers: Sequence[int]) -> None:
        """Send this server's part of a norm to the servers with these indexes."""
        deadline = time.monotonic() + self._settings.deadline_seconds
        for server in servers:
            self._call(part, server, deadline)

    def close(self) -> None:
        """Cancel unfinished calls and stop reporting failures."""
        with self._lock:
            self._closed = True
            stubs, self._stubs = list(self._stubs.values()), {}
        for stub in stubs:
            stub.close()

    def _call(self, part: NormPart, server: int, deadline: float) -> None:
        request = control_pb2.NormRequest(
            job_name=self._job.name,
            job_uid=self._job.uid,
            fingerprint=self._plan.fingerprint,
            server=part.server,
            step=part.step,
            key=part.key,
            sums=dict(part.sums),
        )
        # Also for the call itself: on a channel that `close` has closed, gRPC raises ValueError.
        with self._lock:
            if self._closed:
                return
            if server not in self._stubs:
                prover = prover_of(self._job.key, server)
                self._stubs[server] = ServerStub(
                    self._plan.endpoints[server], prover, certificates=self._certificates
                )
            remaining = min(_FRESH_SECONDS, max(0.1, deadline - time.monotonic()))
            future = self._stubs[server].now.Norm.future(request, timeout=remaining, wait_for_ready=True)
        # Without the lock: if the call has ended already, gRPC runs `_done` here, which takes the lock for
        # its next call.
        future.add_done_callback(partial(self._done, part, server, deadline))

    def _done(
        self, part: NormPart, server: int, deadline: float, future: "grpc.Future[control_pb2.NormReply]"
    ) -> None:
        if self._closed or future.cancelled() or (error := future.exception()) is None:
            return
        code = error.code() if isinstance(error, grpc.RpcError) else None
        details = error.details() if isinstance(error, grpc.RpcError) else str(error)
        endpoint, about = self._plan.endpoints[server], part.key or "all gradients"
        sentence = f"the norm of {about} at step {part.step}: parameter server {endpoint}"
        away = code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        if away and time.monotonic() < deadline:
            self._call(part, server, deadline)  # with `wait_for_ready` the call waits for the server
        elif away:
            self._on_failure(
                PeerLostError(
                    f"{sentence} did not accept the part of {self._plan.endpoint} within "
                    f"{self._settings.deadline_seconds:g} s (FLAGS_rpc_deadline); it has vanished for good"
                )
            )
        elif code is grpc.StatusCode.FAILED_PRECONDITION:
            self._on_failure(ConfigurationError(f"{sentence} refused: {details}"))
        else:
            self._on_failure(RemoteProtocolError(f"{sentence} failed a call: {details}"))
