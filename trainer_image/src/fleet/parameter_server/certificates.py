"""TLS certificates from ``FLEET_TLS_DIR``, for mutual authentication and encryption between replicas.

``tls.crt``, ``tls.key`` and ``ca.crt`` are reloaded when they change, so a job need not restart when they are
renewed: later connections use the new files. If the new files are unusable, a warning is logged and the old
certificates stay in use.
"""

import logging
import ssl
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from fleet.errors import ConfigurationError

if TYPE_CHECKING:
    from fleet.parameter_server.settings import Settings

__all__ = ["Certificates", "Loaded", "certificates_of"]

_CERTIFICATE: Final = "tls.crt"
_KEY: Final = "tls.key"
_AUTHORITY: Final = "ca.crt"
_LEADS: Final = "as cert-manager writes it to a Secret of type kubernetes.io/tls"
_log = logging.getLogger(__name__)

Version = tuple[tuple[str, int, int], ...]
"""A version of the certificate files: the resolved path, modification time and size of each."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """TLS contexts made from one version of the certificate files."""

    certificate: bytes
    key: bytes = field(repr=False)
    authority: bytes
    server: ssl.SSLContext
    """The context for accepted connections; the authority must have issued the peer's certificate."""
    client: ssl.SSLContext
    """The context for outgoing connections, which also checks the host name in the peer's certificate."""


class Certificates:
    """The certificates in a directory, reloaded when their files change.

    Parameters
    ----------
    folder : Path
    server_name : str
        The name in every server's certificate; empty if each certificate names the host of its server.
    """

    def __init__(self, folder: Path, server_name: str = "") -> None:
        self.server_name = server_name
        self._folder = folder
        self._lock = threading.Lock()
        self._version: Version | None = None
        self._loaded: Loaded | None = None

    def current(self) -> Loaded:
        """Return TLS contexts for the current files; the object stays the same until the files change.

        Raises
        ------
        ConfigurationError
            No usable files have been found yet; the message names the file and gives a remedy.
        """
        with self._lock:
            while (version := self._look()) != self._version or self._loaded is None:
                self._version = version
                try:
                    self._loaded = self._load()
                except ConfigurationError as error:
                    if self._look() != version:
                        continue  # the files were replaced while being read, so old and new ones may be mixed
                    if self._loaded is None:
                        raise
                    _log.warning("%s. The previous certificates stay in use", error)
            return self._loaded

    def _look(self) -> Version:
        version = []
        for name in (_CERTIFICATE, _KEY, _AUTHORITY):
            path = (self._folder / name).resolve()
            try:
                found = path.stat()
            except OSError:
                version.append((str(path), 0, -1))
            else:
                version.append((str(path), found.st_mtime_ns, found.st_size))
        return tuple(version)

    def _load(self) -> Loaded:
        read = {name: self._read(name) for name in (_CERTIFICATE, _KEY, _AUTHORITY)}
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        server.verify_mode = ssl.CERT_REQUIRED
        server.num_tickets = 0  # no session resumption: each connection is authenticated
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            self._fill(context)
        self._check(server, client)
        return Loaded(read[_CERTIFICATE], read[_KEY], read[_AUTHORITY], server, client)

    def _read(self, name: str) -> bytes:
        try:
            return (self._folder / name).read_bytes()
        except PermissionError as error:
            self._refuse(
                name,
                "cannot be read by this process's user",
                "a file that it can read: in a pod, give the securityContext a runAsUser or fsGroup that "
                "can read it",
                error,
            )
        except OSError as error:
            self._refuse(name, f"cannot be read: {error.strerror}", f"a file in PEM, {_LEADS}", error)

    def _fill(self, context: ssl.SSLContext) -> None:
        try:
            context.load_verify_locations(self._folder / _AUTHORITY)
        except (OSError, ssl.SSLError) as error:
            self._refuse(_AUTHORITY, "holds no certificate", f"the authority's, in PEM, {_LEADS}", error)
        try:
            context.load_cert_chain(self._folder / _CERTIFICATE, self._folder / _KEY, password=_no_password)
        except _EncryptedError as error:
            self._refuse(_KEY, "is encrypted", "a key without a passphrase", error)
        except (OSError, ssl.SSLError) as error:
            if "KEY_VALUES_MISMATCH" in str(error):
                self._refuse(
                    _KEY,
                    f"is not the key of {_CERTIFICATE}",
                    "a certificate and a key that belong together",
                    error,
                )
            self._refuse(
                _CERTIFICATE, f"and {_KEY} hold no certificate with its key", f"both in PEM, {_LEADS}", error
            )

    def _check(self, server: ssl.SSLContext, client: ssl.SSLContext) -> None:
        """Perform a TLS handshake in memory, to find errors that would also occur with a peer."""
        client.check_hostname = False  # the host is not known before a connection is opened
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = [client.wrap_bio(back, there), server.wrap_bio(there, back, server_side=True)]
        # Two calls for each end complete a handshake of TLS 1.3.
        for end in (*ends, *ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                self._refuse(
                    _CERTIFICATE,
                    f"is refused with {_AUTHORITY}: {error.verify_message}",
                    f"a currently valid certificate, issued by {_AUTHORITY}, for both ends (server auth and "
                    "client auth, if it lists usages); issue a new one",
                    error,
                )
            except ssl.SSLError as error:
                self._refuse(
                    _CERTIFICATE, f"cannot be used: {error.reason}", "a certificate for TLS 1.3", error
                )
        client.check_hostname = True

    def _refuse(self, name: str, found: str, expected: str, error: Exception) -> NoReturn:
        raise ConfigurationError(
            f"{self._folder / name} (FLEET_TLS_DIR) {found}; expected {expected}"
        ) from error


class _EncryptedError(Exception):
    """The private key has a passphrase, so OpenSSL would prompt for it on the terminal."""


def _no_password() -> str:
    raise _EncryptedError


def certificates_of(settings: "Settings") -> Certificates | None:
    """Return the certificates that the settings name, or None if connections are not encrypted.

    Raises
    ------
    ConfigurationError
        The certificates cannot be used.
    """
    if not settings.tls_dir:
        return None
    certificates = Certificates(Path(settings.tls_dir), settings.tls_server_name)
    certificates.current()
    return certificates
