"""Where the API server is and who we are; the account of the pod that we run in. `login` is for people."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fleet_operator.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ConnectionSettingsError(OperatorError):
    """The API server cannot be reached with what was given; the message says what is wrong with it."""


def _nobody() -> None:
    """Send no Authorization header."""


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach one API server. Credentials are kept out of what is printed.

    Attributes
    ----------
    server : str
        The address, as in ``https://10.0.0.1:443``, without a slash at its end.
    namespace : str
        The namespace that is meant where none is named.
    authorization : callable
        Returns the Authorization header to send now, or None. It reads a file or runs a program where what
        it returned before has grown old, and raises OSError or ConnectionSettingsError if that fails.
    tls : SSLContext, optional
        What TLS connections are made with; aiohttp's own if absent.
    tls_server_name : str, optional
        The name that the server's certificate must have, if it is not the address's.
    proxy : str, optional
        The URL of a proxy: http, https, socks4 or socks5.
    """

    server: str
    namespace: str = "default"
    authorization: Callable[[], str | None] = field(default=_nobody, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    tls_server_name: str | None = None
    proxy: str | None = field(default=None, repr=False)


def from_pod(environ: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Connection:
    """Connect as the service account of the pod that we run in, whose token the kubelet replaces every hour.

    Raises
    ------
    ConnectionSettingsError
        The account's files are not there, or hold no certificate.
    """
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    token = folder / "token"
    try:
        return Connection(
            server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
            namespace=(folder / "namespace").read_text(encoding="utf-8").strip(),
            authorization=lambda: f"Bearer {token.read_text(encoding='utf-8').strip()}",
            tls=ssl.create_default_context(cadata=(folder / "ca.crt").read_text(encoding="utf-8")),
        )
    except OSError as error:
        raise ConnectionSettingsError(
            f"in a pod, but its service account cannot be read: {error}; "
            "is automountServiceAccountToken false?"
        ) from error
