"""Reads the API server's address and the credentials from the pod's service account or a kubeconfig.

Users log in by any method that a kubeconfig supports, through the loader of the `kubernetes` package. This
large package is imported only for a login, and the operator's image does not have it, because a service
account needs no loader. The loader differs from kubectl in ways that this module corrects:

- It uses the current context of the last of several files, whereas kubectl uses that of the first.
- It resolves a user's relative paths against the file that defines the cluster.
- After a credential program fails, it only logs the error and continues unauthenticated.
- Its errors quote the whole entry of a kubeconfig, secrets and all.
- It reads a token file only once, and never requests a new certificate from a program.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import logging
import os
import ssl
import tempfile
import threading
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fleet_operator.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")

LOGIN_SECONDS = 120.0
"""How long a login may take: a credential program may wait for a person to sign in."""

EARLY = timedelta(seconds=60)
"""How long before its expiry a credential is renewed."""

CHANGING = {"auth-provider", "client-certificate", "tokenFile"}
"""The fields of a kubeconfig user whose files other programs may change, so each header is loaded anew."""

DIRECT = "localhost,127.0.0.0/8,::1"
"""The hosts for which the environment's proxies are ignored, as in kubectl."""

SOCKS_PORT = 1080
"""The default port of a SOCKS proxy."""

OLDEST = 37
"""The first major version of the `kubernetes` package that supports proxy-url."""


class ConnectionSettingsError(OperatorError):
    """The connection settings for the API server are invalid; the message gives the reason."""


def _nobody() -> None:
    """Return None as the credentials, so that no Authorization header is sent."""


@dataclass(frozen=True, slots=True)
class Connection:
    """The settings for a connection to an API server; their repr hides the credentials.

    Attributes
    ----------
    server : str
        The address, as in ``https://10.0.0.1:443``, without a slash at its end.
    namespace : str
        The default namespace.
    authorization : callable
        Returns the current Authorization header, or None. It reads a file or runs a program if the previous
        header has expired, and raises OSError or ConnectionSettingsError if that fails.
    tls : SSLContext, optional
        The TLS context; aiohttp's own if absent.
    tls_server_name : str, optional
        The name in the server's certificate, if it differs from the address.
    proxy : str, optional
        The URL of a proxy: http, https, socks4 or socks5.
    """

    server: str
    namespace: str = "default"
    authorization: Callable[[], str | None] = field(default=_nobody, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    tls_server_name: str | None = None
    proxy: str | None = field(default=None, repr=False)


def account_reference(connection: Connection) -> dict[str, Any] | None:
    """Return an owner reference to our service account, or None if we have none in our namespace.

    The name and uid are in the token that the API server issued for the account. They are read without
    verification, because an owner reference grants nothing.
    """
    _, _, token = (connection.authorization() or "").partition(" ")
    _, _, rest = token.partition(".")
    payload = rest.partition(".")[0]
    try:
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        told = claims["kubernetes.io"]
        namespace, account = told["namespace"], told["serviceaccount"]
        reference = {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "name": account["name"],
            "uid": account["uid"],
        }
    except (ValueError, KeyError, TypeError):  # the token of a person, or an opaque one
        return None
    return reference if namespace == connection.namespace else None


def from_pod(environ: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Connection:
    """Return the connection settings of our pod's service account, whose token the kubelet renews every hour.

    Raises
    ------
    ConnectionSettingsError
        The account's files are missing, or hold no certificate.
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


def connect(environ: Mapping[str, str]) -> Connection:
    """Return the operator's connection settings, from the pod's environment or else the kubeconfig.

    Raises
    ------
    ConnectionSettingsError
        No connection settings exist, or they are not usable.
    """
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return from_pod(environ)
    return connect_user(environ)


def connect_user(
    environ: Mapping[str, str], *, kubeconfig: Path | None = None, context: str | None = None
) -> Connection:
    """Return a user's connection settings, from the kubeconfig or else the pod's environment.

    Parameters
    ----------
    environ : mapping
        Read for ``KUBECONFIG``, ``HOME`` and ``KUBERNETES_SERVICE_HOST``. Credential programs and proxies
        have the environment of this process.
    kubeconfig : Path, optional
        The only file to read.
    context : str, optional
        The context to use instead of the current one.

    Raises
    ------
    ConnectionSettingsError
        No connection settings exist, or they are not usable.
    """
    default = Path(environ.get("HOME") or Path.home()) / ".kube" / "config"
    paths = [Path(each) for each in environ.get("KUBECONFIG", "").split(os.pathsep) if each]
    if kubeconfig is not None:
        paths = [kubeconfig]
    elif not paths and default.is_file():
        paths = [default]
    if paths:
        return from_kubeconfig(*paths, context=context)
    if context is None and environ.get("KUBERNETES_SERVICE_HOST"):
        # The operator's image has no loader, but users may run commands in it.
        there = importlib.util.find_spec("kubernetes") is not None
        return from_pod_loaded(environ) if there else from_pod(environ)
    raise ConnectionSettingsError(
        "no API server: not in a pod (KUBERNETES_SERVICE_HOST is not set), KUBECONFIG is not set, and "
        f"{default} is not there; set KUBECONFIG to a kubeconfig file"
    )


def from_pod_loaded(environ: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> Connection:
    """Return the service account's connection settings, as the Kubernetes client library loads them."""
    from kubernetes.config.incluster_config import InClusterConfigLoader

    def loader(_: str) -> Any:
        return InClusterConfigLoader(folder / "token", folder / "ca.crt", environ=environ)

    shown = "the login as the pod's service account"
    with _explained(f"{shown} failed:", "is automountServiceAccountToken false?"):
        namespace = (folder / "namespace").read_text(encoding="utf-8").strip()
    return _Login(shown, loader, {"tokenFile": folder / "token"}).connection(namespace)


def from_kubeconfig(*paths: Path, context: str | None = None) -> Connection:
    """Return the connection settings of a kubeconfig context, by default the current one.

    Raises
    ------
    ConnectionSettingsError
        The files are unusable, a program returned no credentials, or the loader is not installed.
    """
    joined = os.pathsep.join(map(str, paths))
    if not any(path.exists() for path in paths):
        raise ConnectionSettingsError(f"cannot read the kubeconfig {joined}: there is no such file")
    try:
        from kubernetes import __version__ as version
        from kubernetes.config.kube_config import KubeConfigLoader, KubeConfigMerger
    except ImportError:
        version = ""
    if int(version.partition(".")[0] or 0) < OLDEST:
        raise ConnectionSettingsError(
            f"a kubeconfig is read by the package kubernetes, of which {version or 'none'} is installed: "
            f"pip install 'kubernetes>={OLDEST}'"
        )
    with _explained(f"cannot read the kubeconfig {joined}:"):
        merged = KubeConfigMerger(joined)
        named = (each.get("current-context") for each in merged.config_files.values())
        context = context or next(filter(None, named), None)
        for kind in ("clusters", "contexts", "users"):
            for entry in merged.config.value[kind]:
                _settle(entry, kind)
    if context is None:
        raise ConnectionSettingsError(
            f"the kubeconfig {joined} has no current-context; name one by --context"
        )
    chosen = _entry(merged.config, "context", context)
    cluster = _entry(merged.config, "cluster", chosen.get("cluster"))
    user = _entry(merged.config, "user", chosen["user"]) if chosen.get("user") else {}
    if user.get("as"):
        raise ConnectionSettingsError(
            f"the user of context {context} in the kubeconfig {joined} acts as {user['as']!r}, which is not "
            "supported: take a context whose user has the rights itself"
        )
    if not cluster.get("server"):
        raise ConnectionSettingsError(
            f"the kubeconfig {joined} has no server in its cluster {chosen.get('cluster')!r}"
        )

    def loader(folder: str) -> Any:
        return KubeConfigLoader(
            merged.config,
            active_context=context,
            config_base_path=None,
            config_persister=merged.save_changes,
            temp_file_path=folder,
        )

    login = _Login(f"the login by the kubeconfig {joined}, context {context},", loader, user)
    return login.connection(chosen.get("namespace") or "default", cluster.get("tls-server-name"))


class _Login:
    """A login to the API server, with its header, proxy and TLS context, that is renewed when it expires.

    Parameters
    ----------
    shown : str
        The name of the login in error messages.
    loader : callable
        Creates a loader of the package, which writes certificates into the given folder.
    user : mapping
        The kubeconfig's user.
    """

    def __init__(self, shown: str, loader: Callable[[str], Any], user: Mapping[str, Any]) -> None:
        self._shown, self._loader, self._user = shown, loader, user
        self._tls: ssl.SSLContext | None = None
        self._configuration: Any = None
        self._expiry: datetime | None = None
        self._proxy: str | None = None
        self._log_in()

    def connection(self, namespace: str, tls_server_name: str | None = None) -> Connection:
        """Return the connection settings of this login."""
        if tls_server_name is not None and (self._proxy or "").startswith("socks"):
            raise ConnectionSettingsError(
                f"{self._shown} has both a tls-server-name and a proxy of kind SOCKS, which do not go "
                "together: give the server by a name that its certificate has"
            )
        return Connection(
            self._configuration.host, namespace, self._header, self._tls, tls_server_name, self._proxy
        )

    def _header(self) -> str | None:
        ends = self._expiry is not None and self._expiry - EARLY <= datetime.now(UTC)
        if ends or CHANGING & self._user.keys():
            self._log_in()
        header = self._configuration.api_key.get("BearerToken")
        return None if header is None else " ".join(header.split())  # a token's file ends with a newline

    def _log_in(self) -> None:
        """Run the loader in a thread that can be abandoned if a credential program hangs."""
        done: Future[None] = Future()

        def work() -> None:
            try:
                self._load()
                done.set_result(None)
            except BaseException as error:  # noqa: BLE001 the waiting caller raises it
                done.set_exception(error)

        threading.Thread(target=work, name="log in", daemon=True).start()
        try:
            done.result(LOGIN_SECONDS)
        except TimeoutError:
            raise ConnectionSettingsError(
                f"{self._shown} has not ended within {LOGIN_SECONDS:g} s; sign in by its own program first"
            ) from None

    def _load(self) -> None:
        from kubernetes.client import Configuration

        configuration = Configuration()
        hint = (self._user.get("exec") or {}).get("installHint") or "sign in again, or take another --context"
        # The ssl module reads keys only from files. The loader's files are deleted immediately afterwards.
        with (
            tempfile.TemporaryDirectory(prefix="fleetjob-") as folder,
            _explained(f"{self._shown} failed:", hint if "exec" in self._user else None),
        ):
            loader = self._loader(folder)
            loader.load_and_set(configuration)
            if "auth-provider" in self._user and not configuration.api_key:
                raise ConnectionSettingsError(
                    f"{self._shown} has its credentials from the auth-provider "
                    f"{self._user['auth-provider'].get('name')!r}, which gave none, and which Kubernetes has "
                    "given up; use an exec plugin, a token or a client certificate"
                )
            if self._tls is None:
                self._tls = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
                if not configuration.verify_ssl:
                    self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
                self._proxy = _proxy(configuration, getattr(loader, "proxy", None))
            if configuration.cert_file:
                self._tls.load_cert_chain(configuration.cert_file, configuration.key_file)
        self._configuration, self._expiry = configuration, getattr(loader, "expiry", None)


def _proxy(configuration: Any, given: str | None) -> str | None:
    """Return the URL of the proxy for a server, from the kubeconfig or else the environment, or None."""
    from kubernetes.client.rest import should_bypass_proxies

    direct = f"{configuration.no_proxy or ''},{DIRECT}"
    proxy = given or (None if should_bypass_proxies(configuration.host, direct) else configuration.proxy)
    if not proxy:
        return None
    scheme, _, rest = proxy.rpartition("://")
    # With SOCKS, the proxy resolves the host name, as with kubectl.
    scheme = {"": "http", "socks4a": "socks4", "socks5h": "socks5"}.get(scheme, scheme)
    if scheme not in ("http", "https", "socks4", "socks5"):
        raise ConnectionSettingsError(
            f"{configuration.host} has a proxy of kind {scheme!r}, expected http, https or socks5"
        )
    try:
        address = urlsplit(f"{scheme}://{rest}")
        usable, port = bool(address.hostname), address.port
    except ValueError:
        usable, port = False, None
    if not usable:
        raise ConnectionSettingsError(
            f"{configuration.host} has a proxy whose address cannot be used; expected {scheme}://HOST:PORT"
        )
    if scheme.startswith("socks") and importlib.util.find_spec("aiohttp_socks") is None:
        raise ConnectionSettingsError(
            f"{configuration.host} has a proxy of kind SOCKS, which needs: pip install aiohttp-socks"
        )
    if scheme.startswith("socks") and port is None:
        rest = f"{rest.rstrip('/')}:{SOCKS_PORT}"
    return f"{scheme}://{rest}"


def _settle(entry: Any, kind: str) -> None:
    """Hide a kubeconfig entry's content in error messages, and resolve the entry's relative paths."""
    found = entry.value
    entry.name = f"{kind} {found.get('name')} of {entry.path}"
    user = found.get("user")
    if kind != "users" or not isinstance(user, dict):
        return
    folder = Path(entry.path).absolute().parent
    user = user | {
        name: str(folder / user[name])
        for name in ("client-certificate", "client-key", "tokenFile")
        if user.get(name)
    }
    plugin = user.get("exec")
    if plugin and os.sep in str(plugin.get("command")):
        user["exec"] = plugin | {"command": str(folder / plugin["command"])}
    entry.value = found | {"user": user}


def _entry(config: Any, kind: str, name: object) -> Any:
    """Return the context, cluster or user with this name, or raise an error that lists the known names."""
    known = {each.value.get("name"): each.value.get(kind) for each in config.value[f"{kind}s"]}
    if name not in known:
        there = f"there are {', '.join(map(str, known))}" if known else "there are none"
        raise ConnectionSettingsError(
            f"the kubeconfig {config.path} has nothing named {name!r} in its {kind}s: {there}"
        )
    return known[name] or {}


@contextlib.contextmanager
def _explained(shown: str, hint: str | None = None) -> Iterator[None]:
    """Convert the loader's exceptions and the messages that it logs to one ConnectionSettingsError."""
    told: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.name == "root":
                told.append(record.getMessage())

    listener, root, cause = Listener(), logging.getLogger(), None
    root.addHandler(listener)
    try:
        yield
    except ConnectionSettingsError:
        raise
    except Exception as error:  # noqa: BLE001 the loader's own, and those of HTTP, OAuth, YAML, files and JSON
        bare = isinstance(error, LookupError | TypeError | AttributeError)  # unclear without the type's name
        told.append(f"{type(error).__name__}: {error}" if bare else str(error))
        cause = error
    finally:
        root.removeHandler(listener)
    if told:
        sentence = f"{shown} {'; '.join(filter(None, (*told, hint)))}"
        raise ConnectionSettingsError(" ".join(sentence.split())) from cause
