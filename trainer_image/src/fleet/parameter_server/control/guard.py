"""Authentication of control calls: accepts only replicas with the job's key, and the kubelet's probes.

The thread that accepts calls checks the proof in their metadata. A call without a valid proof gets the status
UNAUTHENTICATED from a separate thread, which does not read the message. Health/Check needs no proof. Its
message is not read either, because the answer does not depend on the message.
"""

import functools
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import grpc
from grpc_health.v1 import health_pb2

from fleet.wire.proof import CLOCK_SECONDS, NONCE_BYTES, ReplayWindow, make_proof, read_proof

__all__ = ["MOST_TRIES", "Guard", "Prover", "prover_of"]

MOST_TRIES: Final = 5
"""The maximum number of attempts that gRPC makes for a call; all of them send the same metadata."""
_METADATA: Final = "fleet-proof"
_CHECK: Final = "/grpc.health.v1.Health/Check"
_LOG_SECONDS: Final = 60.0
_SMALL_BYTES: Final = 16 << 20
"""The size limit of a message without tensors."""
_log = logging.getLogger(__name__)


class _Details(NamedTuple):
    """The details of a call, in the form that gRPC's interceptors expect."""

    method: str
    timeout: float | None
    metadata: tuple[tuple[str, str], ...]
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class Prover(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    """A client interceptor that adds a proof of the job's key to every call on a channel.

    Parameters
    ----------
    key : bytes
        The key of the job.
    server : int
        The index of the called server.
    """

    def __init__(self, key: bytes, server: int) -> None:
        self._key = key
        self._server = server

    def intercept_unary_unary(
        self, continuation: Callable[..., Any], client_call_details: Any, request: Any
    ) -> Any:
        """Make a call with a proof; return its reply or its stream of replies."""
        call = client_call_details
        proof = make_proof(
            self._key,
            self._server,
            call.method,
            seconds=time.time(),
            nonce=secrets.token_bytes(NONCE_BYTES),
        )
        metadata = (*(call.metadata or ()), (_METADATA, proof.to_text()))
        details = _Details(
            call.method, call.timeout, metadata, call.credentials, call.wait_for_ready, call.compression
        )
        return continuation(details, request)

    intercept_unary_stream = intercept_unary_unary


def prover_of(key: bytes, server: int) -> Prover | None:
    """Return an interceptor that adds proofs to calls to a server, or None if the job has no key."""
    return Prover(key, server) if key else None


class Guard(grpc.ServerInterceptor):
    """A server interceptor that admits calls with a valid proof and assigns them to thread pools.

    Parameters
    ----------
    key : bytes
        The key of the job; if empty, any host that can reach this server may call it.
    server : int
        The index of this server.
    pools : mapping of method name to executor
        Executors for the calls that must not wait for other calls, including ``Check``.
    large : collection of str
        The methods whose messages carry tensors, which have no limit of their own.
    serving : callable
        Returns whether the server accepts calls; this is the answer to probes.
    proved : callable
        Called with gRPC's name for the peer of each admitted call.
    """

    def __init__(
        self,
        key: bytes,
        server: int,
        pools: Mapping[str, ThreadPoolExecutor],
        large: frozenset[str],
        serving: Callable[[], bool],
        proved: Callable[[str], None],
    ) -> None:
        self._key = key
        self._server = server
        self._pools = pools
        self._large = large
        self._proved = proved
        self._window = ReplayWindow(MOST_TRIES)
        self._logged_at = float("-inf")
        # As streams, although the calls are not: gRPC then does not read a message before the handler asks
        # for it.
        self._refused: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(
            _Pooled(pools["Check"], _refuse)
        )
        check = functools.partial(_health, serving)
        self._check: grpc.RpcMethodHandler[Any, Any] = grpc.stream_unary_rpc_method_handler(
            _Pooled(pools["Check"], check),
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )

    def intercept_service(
        self, continuation: Callable[..., Any], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Return the handler for a call, without blocking."""
        method = handler_call_details.method
        if method == _CHECK:
            return self._check
        if self._key and not self._proves(method, handler_call_details.invocation_metadata):
            return self._refused
        handler, name = continuation(handler_call_details), method.rpartition("/")[2]
        if handler is None:
            return None
        most_bytes = None if name in self._large else _SMALL_BYTES
        return _bounded(handler, self._pools.get(name), most_bytes, self._proved)

    def _proves(self, method: str, metadata: Any) -> bool:
        """Return whether the metadata contains a valid proof that has not been used too often."""
        now = time.time()
        for name, text in metadata or ():
            if name == _METADATA and isinstance(text, str):
                proof = read_proof(text, self._key, self._server, method, seconds=now)
                if proof is not None and self._window.admits(proof, now):
                    return True
        self._log_refusal(method)
        return False

    def _log_refusal(self, method: str) -> None:
        """Log a refused call, at most once a minute because an unauthenticated host may call often."""
        now = time.monotonic()
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            _log.warning(
                "refused a call of %s without a valid proof of the job's key (FLEET_JOB_KEY); if the caller "
                "is a replica, it has another key, or its clock differs by more than %g s",
                method.rpartition("/")[2][:64],
                CLOCK_SECONDS,
            )


def _refuse(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:  # noqa: ARG001 - not read
    context.abort(grpc.StatusCode.UNAUTHENTICATED, "")


def _health(
    serving: Callable[[], bool],
    requests: Iterator[Any],  # noqa: ARG001 - not read
    context: grpc.ServicerContext,  # noqa: ARG001 - gRPC's signature
) -> health_pb2.HealthCheckResponse:
    status = health_pb2.HealthCheckResponse
    return status(status=status.SERVING if serving() else status.NOT_SERVING)


class _Pooled:
    """A handler with its own thread pool, which gRPC reads from the attribute `experimental_thread_pool`."""

    def __init__(self, pool: ThreadPoolExecutor, behavior: Callable[..., Any]) -> None:
        self.experimental_thread_pool = pool
        self._behavior = behavior

    def __call__(self, request: Any, context: grpc.ServicerContext) -> Any:
        return self._behavior(request, context)


def _bounded(
    handler: Any, pool: ThreadPoolExecutor | None, most_bytes: int | None, proved: Callable[[str], None]
) -> Any:
    """Return a handler that runs in a given thread pool and rejects messages that are too large."""
    answer = handler.unary_stream if handler.response_streaming else handler.unary_unary
    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )

    def decode(message: bytes) -> Any:
        if most_bytes is not None and len(message) > most_bytes:
            raise ValueError(f"a message of {len(message)} bytes, expected {most_bytes} at most")
        return handler.request_deserializer(message)

    def behavior(request: Any, context: grpc.ServicerContext) -> Any:
        proved(context.peer())
        return answer(request, context)

    return make(
        _Pooled(pool, behavior) if pool is not None else behavior, decode, handler.response_serializer
    )
