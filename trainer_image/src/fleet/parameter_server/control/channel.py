"""Channels to a server's control service, secured by TLS and by proofs of the job's key."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Sequence
from typing import Any, Final

import grpc

from fleet.errors import ConfigurationError
from fleet.parameter_server.certificates import Certificates, Loaded
from fleet.parameter_server.control.guard import Prover
from fleet.parameter_server.control.proto import control_pb2_grpc
from fleet.parameter_server.transport.tls import TlsError, TlsSocket
from fleet.parameter_server.waits import split_endpoint

__all__ = ["ServerStub", "check_encrypts", "open_channel", "server_credentials"]

Options = Sequence[tuple[str, int | str]]

_CHANNEL_OPTIONS: Final = (
    # gRPC would use a proxy of the environment (http_proxy), which seldom reaches the pods of a job.
    ("grpc.enable_http_proxy", 0),
    # With gRPC's defaults, a channel would wait up to two minutes before it tries to reach a server that is
    # running again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # also an attempt's timeout; a busy server may need it
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Replies may exceed gRPC's default of 4 MiB: the reply to a reduction has up to 16 MiB.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
_LOOK_SECONDS: Final = 5.0
_TLS_RECORDS: Final = (b"\x15\x03", b"\x16\x03")
"""The first bytes of a TLS response: an alert or a handshake record."""


def open_channel(
    endpoint: str,
    prover: Prover | None,
    options: Options = (),
    certificates: Certificates | None = None,
) -> grpc.Channel:
    """Open a channel to a parameter server; each call carries a proof of the job's key, if there is one."""
    options = [*_CHANNEL_OPTIONS, *options]
    if certificates is None:
        channel = grpc.insecure_channel(endpoint, options=options)
    else:
        loaded = certificates.current()
        credentials = grpc.ssl_channel_credentials(loaded.authority, loaded.key, loaded.certificate)
        if certificates.server_name:
            options.append(("grpc.ssl_target_name_override", certificates.server_name))
        channel = grpc.secure_channel(endpoint, credentials, options=options)
    return channel if prover is None else grpc.intercept_channel(channel, prover)


def server_credentials(certificates: Certificates) -> grpc.ServerCredentials:
    """Return a server's TLS credentials, which load the current certificates for each connection."""
    known = certificates.current()

    def renewed() -> Any:  # returns None if nothing changed, which gRPC's type stubs do not allow
        nonlocal known
        if (loaded := certificates.current()) is known:
            return None
        known = loaded
        return _configuration(loaded)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(known), renewed, require_client_authentication=True
    )


def _configuration(loaded: Loaded) -> grpc.ServerCertificateConfiguration:
    pairs = [(loaded.key, loaded.certificate)]
    return grpc.ssl_server_certificate_configuration(pairs, root_certificates=loaded.authority)


class ServerStub:
    """A gRPC stub for a server's control service; each new call uses the current certificates.

    Parameters
    ----------
    endpoint : str
    prover : Prover, optional
        Proves each call if the job has a key.
    options : sequence of pairs
        Options of the channel.
    certificates : Certificates, optional
        The certificates for TLS.
    """

    def __init__(
        self,
        endpoint: str,
        prover: Prover | None,
        options: Options = (),
        certificates: Certificates | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._prover = prover
        self._options = options
        self._certificates = certificates
        self._opened_with: Loaded | None = None
        self._channels: list[grpc.Channel] = []
        self._lock = threading.Lock()
        self._stub = self._open()

    @property
    def now(self) -> control_pb2_grpc.ParameterServerStub:
        """The stub to use for the next call."""
        certificates = self._certificates
        with self._lock:
            if (
                certificates is not None
                and self._channels
                and certificates.current() is not self._opened_with
            ):
                self._stub = self._open()
            return self._stub

    def close(self) -> None:
        """Close the channel and cancel pending calls."""
        with self._lock:
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    def _open(self) -> control_pb2_grpc.ParameterServerStub:
        """Open a new channel. Pending calls continue on the previous one, which the next `_open` closes."""
        if self._certificates is not None:
            self._opened_with = self._certificates.current()
        self._channels.append(open_channel(self._endpoint, self._prover, self._options, self._certificates))
        for channel in self._channels[:-2]:
            channel.close()
        del self._channels[:-2]
        return control_pb2_grpc.ParameterServerStub(self._channels[-1])


def check_encrypts(endpoint: str, certificates: Certificates | None) -> None:
    """Raise an error if a server rejects calls because of TLS; gRPC itself does not report the reason.

    A server that does not listen or does not respond raises no error.

    Parameters
    ----------
    endpoint : str
    certificates : Certificates, optional
        The certificates of this process.

    Raises
    ------
    ConfigurationError
        Only one end has certificates, or one end rejects the other's certificate.
    """
    host, port = split_endpoint(endpoint)
    with contextlib.suppress(OSError):
        connected = socket.create_connection((host, port), timeout=_LOOK_SECONDS)
        problem = _why_plain(connected) if certificates is None else _why_tls(connected, certificates, host)
        if problem:
            raise ConfigurationError(f"parameter server {endpoint}: {problem}")


def _why_plain(connected: socket.socket) -> str:
    """Send a TLS ClientHello; return an error message if the server answers with TLS, otherwise ""."""
    context, leaving = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    context.check_hostname = False
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), leaving).do_handshake()
    with connected:
        connected.sendall(leaving.read())
        encrypts = connected.recv(2, socket.MSG_WAITALL) in _TLS_RECORDS
    return "it accepts only TLS: set FLEET_TLS_DIR for this process as well" if encrypts else ""


def _why_tls(connected: socket.socket, certificates: Certificates, host: str) -> str:
    """Perform a TLS handshake and read one byte; return an error message if the server rejects TLS."""
    try:
        with TlsSocket(connected, certificates, host) as encrypted:
            encrypted.handshake()
            encrypted.recv_into(bytearray(1))
    except TlsError as error:
        return str(error)
    return ""
