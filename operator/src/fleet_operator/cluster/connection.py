"""Where the API server is and who we are: from inside a pod, or from a kubeconfig file."""

from __future__ import annotations

import base64
import ssl
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from fleet_operator.cluster.credentials import ExecPlugin
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
    plugin : ExecPlugin, optional
        Asked for tokens instead.
    """

    server: str
    namespace: str = "default"
    ca_data: str | None = None
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    client_certificate: str | None = None
    client_key: str | None = field(default=None, repr=False)
    verify: bool = True
    tls_server_name: str | None = None
    plugin: ExecPlugin | None = None

    def bearer(self) -> str | None:
        """Return the token to send now, or None."""
        if self.token_file is not None:
            return self.token_file.read_text(encoding="utf-8").strip()
        if self.plugin is not None:
            return self.plugin.token()
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


def connect(environ: Mapping[str, str]) -> Connection:
    """Find the API server: that of the pod we run in, or of the user's kubeconfig.

    Parameters
    ----------
    environ : mapping
        Read for ``KUBERNETES_SERVICE_HOST``, ``KUBECONFIG`` and ``HOME``.

    Raises
    ------
    ConnectionSettingsError
        There is none, or it is not usable.
    """
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return from_pod(environ)
    return connect_user(environ)


def connect_user(
    environ: Mapping[str, str], *, kubeconfig: Path | None = None, context: str | None = None
) -> Connection:
    """Find the API server as kubectl does: a kubeconfig before the pod that we may run in.

    Parameters
    ----------
    environ : mapping
        Read for ``KUBECONFIG``, ``HOME`` and ``KUBERNETES_SERVICE_HOST``.
    kubeconfig : Path, optional
        The only file to look at.
    context : str, optional
        The context to take instead of the current one.

    Raises
    ------
    ConnectionSettingsError
        There is none, or it is not usable.
    """
    default = Path(environ.get("HOME") or Path.home()) / ".kube" / "config"
    listed = [Path(each) for each in environ.get("KUBECONFIG", "").split(":") if each]
    paths = [kubeconfig] if kubeconfig is not None else listed
    if not paths and default.is_file():
        paths = [default]
    if not paths and context is None and environ.get("KUBERNETES_SERVICE_HOST"):
        return from_pod(environ)
    if not paths:
        raise ConnectionSettingsError(
            "no API server: not in a pod (KUBERNETES_SERVICE_HOST is not set), KUBECONFIG is not set, and "
            f"{default} is not there; set KUBECONFIG to a kubeconfig file"
        )
    # As kubectl: of several files the first that has a name counts, and one that is not there is passed over.
    there = [path for path in paths if len(paths) == 1 or path.is_file()]
    return from_kubeconfig(*(there or paths[:1]), context=context)


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


def from_kubeconfig(*paths: Path, context: str | None = None) -> Connection:
    """Connect as the current context of some kubeconfigs says, or as the one that is named."""
    configs = [(path, _read(path)) for path in paths]
    current = context or next((each["current-context"] for _, each in configs if _has_context(each)), None)
    if current is None:
        raise ConnectionSettingsError(
            f"the kubeconfig {paths[0]} has no current-context; name one by --context"
        )
    _, chosen = _named(configs, "contexts", "context", current)
    beside_cluster, cluster = _named(configs, "clusters", "cluster", chosen.get("cluster"))
    beside_user, user = _named(configs, "users", "user", chosen.get("user"))
    if "auth-provider" in user:
        raise ConnectionSettingsError(
            f"the kubeconfig {beside_user} gets its credentials from an auth-provider, which Kubernetes has "
            "given up; use an exec plugin, a token, a tokenFile or a client certificate"
        )
    server = str(cluster.get("server") or "").rstrip("/")
    if not server:
        raise ConnectionSettingsError(
            f"the kubeconfig {beside_cluster} has no server in its cluster {chosen.get('cluster')!r}"
        )
    token_file = user.get("tokenFile")
    plugin = ExecPlugin(user["exec"], beside_user.parent) if "exec" in user else None
    certificate, key = (
        (_data(user, beside_user, "client-certificate"), _data(user, beside_user, "client-key"))
        if plugin is None
        else plugin.certificate()
    )
    return Connection(
        server=server,
        namespace=chosen.get("namespace") or "default",
        ca_data=_data(cluster, beside_cluster, "certificate-authority"),
        token=user.get("token"),
        token_file=beside_user.parent / token_file if token_file else None,
        client_certificate=certificate,
        client_key=key,
        verify=not cluster.get("insecure-skip-tls-verify", False),
        tls_server_name=cluster.get("tls-server-name"),
        plugin=plugin,
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConnectionSettingsError(f"cannot read the kubeconfig {path}: {error}") from error
    if not isinstance(config, dict):
        found = "nothing" if config is None else type(config).__name__
        raise ConnectionSettingsError(
            f"the kubeconfig {path} holds {found}, expected a mapping with clusters, users and contexts"
        )
    return config


def _has_context(config: Mapping[str, Any]) -> bool:
    return bool(config.get("current-context"))


def _named(
    configs: list[tuple[Path, dict[str, Any]]], plural: str, singular: str, name: object
) -> tuple[Path, dict[str, Any]]:
    known = []
    for path, config in configs:
        entries = config.get(plural) or []
        if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
            # Never the contents: they may be a secret.
            found = "something else" if isinstance(entries, list) else type(entries).__name__
            raise ConnectionSettingsError(
                f"the kubeconfig {path} holds {found} under {plural}, expected a list of mappings with a name"
                " each: write it by kubectl config"
            )
        for entry in entries:
            if entry.get("name") == name:
                return path, entry.get(singular) or {}
            known.append(str(entry.get("name")))
    there = f"there are {', '.join(known)}" if known else "there are none"
    path = configs[0][0]
    raise ConnectionSettingsError(
        f"the kubeconfig {path} has nothing named {name!r} in its {plural}: {there}"
    )


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
