"""Where the API server is and who we are: from inside a pod, or from a kubeconfig file."""

from __future__ import annotations

import base64
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fleet_operator.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Mapping

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class ConnectionSettingsError(OperatorError):
    """The API server cannot be reached with what was given; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach one API server. Tokens are kept out of what is printed.

    Attributes
    ----------
    server : str
        The address, as in ``https://10.0.0.1:443``, without a slash at its end.
    token_file : Path, optional
        Read again before it grows old: the kubelet replaces it every hour.
    """

    server: str
    namespace: str = "default"
    ca_data: str | None = None
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    client_certificate: str | None = None
    client_key: str | None = field(default=None, repr=False)
    verify: bool = True

    def bearer(self) -> str | None:
        """Return the token to send now, or None."""
        if self.token_file is not None:
            return self.token_file.read_text(encoding="utf-8").strip()
        return self.token

    def ssl_context(self) -> ssl.SSLContext:
        """Return what TLS connections to the server are made with."""
        context = ssl.create_default_context(cadata=self.ca_data)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.client_certificate and self.client_key:
            # The ssl module reads certificates from files only.
            with tempfile.NamedTemporaryFile("w", suffix=".pem") as file:
                file.write(f"{self.client_certificate}\n{self.client_key}\n")
                file.flush()
                context.load_cert_chain(file.name)
        return context


def connect(environ: Mapping[str, str], *, kubeconfig: Path | None = None) -> Connection:
    """Find the API server: the kubeconfig given, the pod we run in, or the user's kubeconfig.

    Parameters
    ----------
    environ : mapping
        Read for ``KUBERNETES_SERVICE_HOST``, ``KUBECONFIG`` and ``HOME``.
    kubeconfig : Path, optional
        Taken before anything else.

    Raises
    ------
    ConnectionSettingsError
        There is none, or it is not usable.
    """
    if kubeconfig is not None:
        return from_kubeconfig(kubeconfig)
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return from_pod(environ)
    if paths := environ.get("KUBECONFIG"):
        return from_kubeconfig(Path(paths.split(":")[0]))
    default = Path(environ.get("HOME") or Path.home()) / ".kube" / "config"
    if default.is_file():
        return from_kubeconfig(default)
    raise ConnectionSettingsError(
        "no API server: not in a pod (KUBERNETES_SERVICE_HOST is not set), KUBECONFIG is not set, and "
        f"{default} is not there; set KUBECONFIG to a kubeconfig file"
    )


def from_pod(environ: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Connection:
    """Connect as the service account of the pod that we run in."""
    host, port = environ["KUBERNETES_SERVICE_HOST"], environ.get("KUBERNETES_SERVICE_PORT", "443")
    try:
        return Connection(
            server=f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}",
            namespace=(folder / "namespace").read_text(encoding="utf-8").strip(),
            ca_data=(folder / "ca.crt").read_text(encoding="utf-8"),
            token_file=folder / "token",
        )
    except OSError as error:
        raise ConnectionSettingsError(
            f"in a pod, but its service account cannot be read: {error}; "
            "is automountServiceAccountToken false?"
        ) from error


def from_kubeconfig(path: Path) -> Connection:
    """Connect as a kubeconfig's current context says."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConnectionSettingsError(f"cannot read the kubeconfig {path}: {error}") from error
    if not isinstance(config, dict) or not config.get("current-context"):
        raise ConnectionSettingsError(f"the kubeconfig {path} has no current-context")
    context = _named(config, path, "contexts", "context", config["current-context"])
    cluster = _named(config, path, "clusters", "cluster", context.get("cluster"))
    user = _named(config, path, "users", "user", context.get("user"))
    for unsupported in ("exec", "auth-provider"):
        if unsupported in user:
            raise ConnectionSettingsError(
                f"the kubeconfig {path} gets its credentials from an {unsupported} plugin, which is not "
                "supported here; use a token, a tokenFile or a client certificate"
            )
    server = str(cluster.get("server") or "").rstrip("/")
    if not server:
        raise ConnectionSettingsError(
            f"the kubeconfig {path} has no server in its cluster {context.get('cluster')!r}"
        )
    token_file = user.get("tokenFile")
    return Connection(
        server=server,
        namespace=context.get("namespace") or "default",
        ca_data=_data(cluster, path, "certificate-authority"),
        token=user.get("token"),
        token_file=path.parent / token_file if token_file else None,
        client_certificate=_data(user, path, "client-certificate"),
        client_key=_data(user, path, "client-key"),
        verify=not cluster.get("insecure-skip-tls-verify", False),
    )


def _named(config: Mapping[str, Any], path: Path, plural: str, singular: str, name: object) -> dict[str, Any]:
    for entry in config.get(plural) or ():
        if entry.get("name") == name:
            return entry.get(singular) or {}
    raise ConnectionSettingsError(f"the kubeconfig {path} has nothing named {name!r} in its {plural}")


def _data(section: Mapping[str, Any], path: Path, name: str) -> str | None:
    """Return a certificate or key, given in place as base64 or as a file beside the kubeconfig."""
    try:
        if encoded := section.get(f"{name}-data"):
            return base64.b64decode("".join(encoded.split()), validate=True).decode()
        if file := section.get(name):
            return Path(path.parent, file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no such file; no base64, no text
        raise ConnectionSettingsError(
            f"the kubeconfig {path} has a {name} that cannot be read: {error}"
        ) from error
    return None
