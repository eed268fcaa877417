"""Channels to the control service of a server: how calls prove themselves, and what encrypts them."""

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
from fleet.parameter_server.waiting import split_endpoint

__all__ = ["ServerStub", "check_encrypts", "open_channel", "server_credentials"]

Options = Sequence[tuple[str, int | str]]

_CHANNEL_OPTIONS: Final = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2000),  # how long a try may take: a busy server's greeting too
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
)
_LOOK_SECONDS: Final = 5.0
_TLS_RECORDS: Final = (b"\x15\x03", b"\x16\x03")
"""How TLS answers a greeting: with an alert, or with its own."""


def open_channel(
    endpoint: str,
    prover: Prover | None,
    options: Options = (),
    certificates: Certificates | None = None,
) -> grpc.Channel:
    """Open a channel to a parameter server; its calls prove that they come from a replica of the job."""
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
    """Return the credentials of a server: each connection gets the certificates of its time."""
    known = certificates.current()

    def renewed() -> Any:  # the stubs know no None, which leaves all as it is
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
    """The control service of a server, over a channel with the certificates of the time of each call.

    Parameters
    ----------
    endpoint : str
    prover : Prover, optional
        Proves each call, where the job has a key.
    options : sequence of pairs
        Of the channel.
    certificates : Certificates, optional
        With which it is encrypted.
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
        """The stub for the next call."""
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
        """Close the channel; calls under way are cancelled."""
        with self._lock:
            channels, self._channels = self._channels, []
        for channel in channels:
            channel.close()

    def _open(self) -> control_pb2_grpc.ParameterServerStub:
        """Open a channel. The one before stays for its calls, until there is another one after it."""
        if self._certificates is not None:
            self._opened_with = self._certificates.current()
        self._channels.append(open_channel(self._endpoint, self._prover, self._options, self._certificates))
        for channel in self._channels[:-2]:
            channel.close()
        del self._channels[:-2]
        return control_pb2_grpc.ParameterServerStub(self._channels[-1])


def check_encrypts(endpoint: str, certificates: Certificates | None) -> None:
    """Find out why a server that listens takes no calls: gRPC itself only says that it is not reached.

    A server that is not there, or says nothing, is none of the cases.

    Parameters
    ----------
    endpoint : str
    certificates : Certificates, optional
        Those of this process.

    Raises
    ------
    ConfigurationError
        One of both ends has certificates and the other one none, or either refuses the other's.
    """
    host, port = split_endpoint(endpoint)
    with contextlib.suppress(OSError):
        connected = socket.create_connection((host, port), timeout=_LOOK_SECONDS)
        problem = _why_plain(connected) if certificates is None else _why_tls(connected, certificates, host)
        if problem:
            raise ConfigurationError(f"parameter server {endpoint}: {problem}")


def _why_plain(connected: socket.socket) -> str:
    """Greet as TLS does: who answers so expects it."""
    context, leaving = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    context.check_hostname = False
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), leaving).do_handshake()
    with connected:
        connected.sendall(leaving.read())
        encrypts = connected.recv(2, socket.MSG_WAITALL) in _TLS_RECORDS
    return "it speaks TLS only: give this process FLEET_TLS_DIR as well" if encrypts else ""


def _why_tls(connected: socket.socket, certificates: Certificates, host: str) -> str:
    """Greet, and hear a word: who takes the certificate says one at once, by HTTP/2's rules."""
    try:
        with TlsSocket(connected, certificates, host) as encrypted:
            encrypted.handshake()
            encrypted.recv_into(bytearray(1))
    except TlsError as error:
        return str(error)
    return ""
