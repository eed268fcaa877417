"""TLS on a connected socket; one thread may send while another one receives.

Two threads must not use OpenSSL's state of a connection concurrently, and a thread that waits inside OpenSSL
would block the other one. So OpenSSL never uses the socket: it encrypts and decrypts in memory, under a lock.
A thread that waits in a blocking socket does not hold the lock. With a non-blocking socket, encrypted bytes
that the kernel does not accept are kept until `flush`.
"""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterable
from typing import Any, Final

from fleet.parameter_server.certificates import Certificates
from fleet.parameter_server.transport.sockets import ConnectionEndedError
from fleet.process.connections import own

__all__ = ["RECORD_BYTES", "TlsError", "TlsSocket", "explain"]

RECORD_BYTES: Final = 22
"""The overhead of a TLS 1.3 record: its header, its type and its tag."""

_CHUNK_BYTES: Final = 1 << 18
"""The maximum number of bytes encrypted or received in one call: the default size of a piece."""
_REASONS: Final = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it presents no certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "it demands a certificate and was given none",
    "TLSV1_ALERT_UNKNOWN_CA": "it refuses this process's certificate, which is of another authority",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it refuses this process's certificate, which has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it refuses this process's certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it refuses this process's certificate",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it refuses this process's certificate for its usages",
}
_NO_TLS: Final = frozenset(
    {
        "WRONG_VERSION_NUMBER",
        "HTTP_REQUEST",
        "UNKNOWN_PROTOCOL",
        "PACKET_LENGTH_TOO_LONG",
        "RECORD_LAYER_FAILURE",
    }
)


class TlsError(ConnectionError):
    """The peer cannot be reached over TLS; the message gives the reason."""


class TlsSocket(socket.socket):
    """A TLS connection that takes ownership of a connected socket.

    Call `handshake` first, and then only `recv_into` and `sendmsg`: the other methods of a socket would send
    and receive plaintext.

    Parameters
    ----------
    connected : socket.socket
        The connected TCP socket, which is unusable afterwards.
    certificates : Certificates
    host : str, optional
        The host that was dialled, which the server's certificate must name; None on the server.

    Raises
    ------
    OSError
        The connection has already broken.
    """

    def __init__(self, connected: socket.socket, certificates: Certificates, host: str | None = None) -> None:
        loaded, timeout_seconds = certificates.current(), connected.gettimeout()
        super().__init__(connected.family, connected.type, connected.proto, fileno=connected.detach())
        own(self)
        self.settimeout(timeout_seconds)
        self._lock = threading.Lock()
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._unsent = memoryview(b"")
        """Encrypted bytes that the kernel has not accepted."""
        self._scratch = memoryview(bytearray(_CHUNK_BYTES))
        if host is None:
            self._tls = loaded.server.wrap_bio(self._arrived, self._leaving, server_side=True)
        else:
            name = certificates.server_name or host
            self._tls = loaded.client.wrap_bio(self._arrived, self._leaving, server_hostname=name)

    def handshake(self) -> None:
        """Perform the TLS handshake and check the peer's certificate.

        Raises
        ------
        TlsError
            The other end presents no valid certificate, or does not speak TLS.
        OSError
            The connection ended, or the timeout expired.
        """
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                if not self._take():
                    raise ConnectionEndedError(
                        "it was closed at the other end during the TLS handshake"
                    ) from None
            except ssl.SSLError as error:
                with contextlib.suppress(OSError):
                    self._flush()  # sends the alert with the reason, unless the other end has gone
                raise TlsError(explain(error)) from error
            else:
                self._flush()
                return

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """Receive available bytes into a buffer; return their number, or 0 at the end of the connection."""
        del flags
        wanted = memoryview(buffer)[: nbytes or None]
        while True:
            received = self._decrypt(wanted)
            if received is not None:
                return received
            self._take()

    def sendmsg(  # type: ignore[override]  # what else the socket's own takes is for Unix sockets
        self, buffers: Iterable[Any]
    ) -> int:
        """Send bytes from the start of the buffers; return the number of bytes that were encrypted.

        Raises
        ------
        BlockingIOError
            Bytes of an earlier call have not been sent yet; see `flush`.
        """
        # First, so that at most one chunk of encrypted bytes is kept, however slowly the peer reads.
        self.flush()
        taken = 0
        with self._lock:
            for buffer in buffers:
                chunk = memoryview(buffer)[: _CHUNK_BYTES - taken]
                taken += self._tls.write(chunk) if len(chunk) else 0
                if taken == _CHUNK_BYTES:
                    break
            self._unsent = memoryview(self._leaving.read())
        with contextlib.suppress(BlockingIOError):
            self.flush()
        return taken

    def flush(self) -> None:
        """Send the encrypted bytes that have not been sent yet.

        Raises
        ------
        BlockingIOError
            The kernel does not accept all of them at present.
        """
        while self._unsent:
            self._unsent = self._unsent[super().send(self._unsent) :]

    def _decrypt(self, wanted: memoryview) -> int | None:
        """Decrypt received bytes; return None if more bytes must be received first."""
        count = 0
        with self._lock:
            try:
                while count < len(wanted):
                    # With a buffer, `read` returns the number of bytes, which the type stubs lack.
                    taken: Any = self._tls.read(len(wanted) - count, wanted[count:])
                    if not taken:
                        return count
                    count += taken
            except ssl.SSLWantReadError:
                return count or None
            # An end without close_notify is safe: frames announce the end of a session, so a cut connection
            # cannot feign it.
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return count
            except ssl.SSLError as error:
                raise TlsError(explain(error)) from error
        return count

    def _take(self) -> int:
        """Receive encrypted bytes; return their number, or 0 at the end."""
        count = super().recv_into(self._scratch)
        with self._lock:
            if count:
                self._arrived.write(self._scratch[:count])
            else:
                self._arrived.write_eof()
        return count

    def _flush(self) -> None:
        # Only during the handshake, when the socket still blocks, up to its timeout.
        super().sendall(self._leaving.read())


def explain(error: ssl.SSLError) -> str:
    """Describe a TLS error for the user, as precisely as OpenSSL reports it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused: {error.verify_message} (ca.crt in FLEET_TLS_DIR)"
    reason = error.reason or str(error)
    if reason in _NO_TLS:
        return "it does not speak TLS: give all replicas of the job FLEET_TLS_DIR, or none"
    return _REASONS.get(reason, f"TLS failed: {reason}")
