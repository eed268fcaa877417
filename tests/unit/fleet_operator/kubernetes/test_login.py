"""Every way to log in that a kubeconfig knows, each tried on a server that speaks TLS and tells who came."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import ssl
import subprocess
import sys
import tempfile
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from fleet_operator.kubernetes import client as client_module
from fleet_operator.kubernetes import login as module
from fleet_operator.kubernetes.client import ApiClient, ApiError
from fleet_operator.kubernetes.login import (
    Connection,
    ConnectionSettingsError,
    account_reference,
    connect,
    connect_user,
    from_kubeconfig,
    from_pod,
    from_pod_loaded,
)
from tests.support.certificates import Authority, make_authority
from tests.support.tunnel import Tunnel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    Manifest = dict[str, Any]

pytestmark = pytest.mark.timeout(30)


POD = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "KUBERNETES_SERVICE_PORT": "443"}


def account(folder: Path) -> Path:
    for name in ("namespace", "token"):
        (folder / name).write_text(f"the {name}\n")
    (folder / "ca.crt").write_bytes(make_authority(folder / "authority").certificate.read_bytes())
    return folder


def test_credentials_are_not_shown():
    shown = repr(Connection("https://a", authorization=lambda: "secret", proxy="http://me:password@proxy"))
    assert "secret" not in shown
    assert "password" not in shown


@pytest.mark.parametrize(
    ("host", "expected"), [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_in_a_pod_the_service_account_is_used(tmp_path: Path, host: str, expected: str):
    found = from_pod(POD | {"KUBERNETES_SERVICE_HOST": host}, account(tmp_path))
    assert (found.server, found.namespace) == (expected, "the namespace")
    assert found.tls is not None
    assert len(found.tls.get_ca_certs()) == 1
    assert found.authorization() == "Bearer the token"
    (tmp_path / "token").write_text("the next\n")
    assert found.authorization() == "Bearer the next"


@pytest.mark.parametrize(
    ("claims", "is_ours"),
    [
        ({"namespace": "fleet-system", "serviceaccount": {"name": "fleet", "uid": "5"}}, True),
        ({"namespace": "default", "serviceaccount": {"name": "fleet", "uid": "5"}}, False),
        ({"namespace": "fleet-system"}, False),
        ("a person", False),
    ],
)
def test_a_token_names_a_service_account_of_the_operators_namespace(claims: Any, is_ours: bool):
    payload = base64.urlsafe_b64encode(json.dumps({"kubernetes.io": claims}).encode()).decode().rstrip("=")
    connection = Connection("https://10.0.0.1", "fleet-system", lambda: f"Bearer e30.{payload}.c2ln")
    expected = {"apiVersion": "v1", "kind": "ServiceAccount", "name": "fleet", "uid": "5"}
    assert account_reference(connection) == (expected if is_ours else None)


@pytest.mark.parametrize("header", [None, "Bearer opaque", "Bearer a.b!.c", "Basic dXNlcjpwYXNz"])
def test_another_credential_names_no_service_account(header: str | None):
    assert account_reference(Connection("https://10.0.0.1", "fleet-system", lambda: header)) is None


def test_in_a_pod_without_a_service_account_the_error_says_so(tmp_path: Path):
    with pytest.raises(ConnectionSettingsError, match="automountServiceAccountToken"):
        from_pod(POD, tmp_path / "nothing")


def test_a_certificate_that_is_none_is_told_in_a_sentence(tmp_path: Path):
    (account(tmp_path) / "ca.crt").write_text("none")
    with pytest.raises(ConnectionSettingsError, match=r"its service account cannot be read: .*certificate"):
        from_pod(POD, tmp_path)


NAME = "kubernetes.example"
"""In the server's certificate; no resolver knows it, but the proxies of these tests do."""


class Site:
    """A server that tells whoever comes by which header and which certificate they came."""

    def __init__(self, authority: Authority, folder: Path) -> None:
        self.authority = authority
        made = authority.issue(folder / "server", ("IP:127.0.0.1", f"DNS:{NAME}"))
        self._tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.certificate)
        self._tls.load_cert_chain(made / "tls.crt", made / "tls.key")
        self._tls.verify_mode = ssl.CERT_OPTIONAL
        self.port = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Site]:
        application = web.Application()
        application.router.add_get("/who", self._answer)
        server = TestServer(application, host="127.0.0.1", scheme="https")
        await server.start_server(ssl=self._tls)
        assert server.port is not None
        self.port = server.port
        try:
            yield self
        finally:
            await server.close()

    async def _answer(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        certificate = request.transport.get_extra_info("peercert")
        serial = certificate["serialNumber"] if certificate else None
        return web.json_response({"header": request.headers.get("Authorization"), "serial": serial})

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def cluster(self) -> Manifest:
        return {"server": self.server, "certificate-authority": str(self.authority.certificate)}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with Site(make_authority(tmp_path / "authority"), tmp_path).running() as running:
        yield running


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def write(path: Path, user: Manifest, cluster: Manifest, **context: str) -> Path:
    """Write a kubeconfig of one context, `here`."""
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", **context}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(config))
    return path


async def who(connection: Connection) -> Manifest:
    async with ApiClient(connection) as client:
        return await client.get("/who")


def encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def serial(certificate: Path) -> str:
    shown = subprocess.run(
        ["openssl", "x509", "-in", certificate, "-noout", "-serial"],
        capture_output=True,
        check=True,
        text=True,
    )
    return shown.stdout.strip().partition("=")[2]


def says(folder: Path, status: Any, *, first: str = "") -> Manifest:
    """Write a program that gives credentials and counts how often; return a kubeconfig's `exec` for it."""
    version = "client.authentication.k8s.io/v1"
    answer = json.dumps({"apiVersion": version, "kind": "ExecCredential", "status": status})
    program = folder / "sign-in"
    program.write_text(f"#!/bin/sh\necho asked >>{folder}/asked\n{first}\ncat <<'END'\n{answer}\nEND\n")
    program.chmod(0o755)
    return {"apiVersion": version, "command": "./sign-in", "interactiveMode": "Never"}


def asked(folder: Path) -> int:
    return len((folder / "asked").read_text().splitlines())


def in_minutes(minutes: float) -> str:
    return (datetime.now(UTC) + timedelta(minutes=minutes)).strftime("%Y-%m-%dT%H:%M:%SZ")


@pytest.mark.parametrize(
    ("user", "header"),
    [
        pytest.param({"token": "t"}, "Bearer t", id="token"),
        pytest.param({"tokenFile": "token"}, "Bearer from the file", id="file-of-a-token"),
        pytest.param({"username": "me", "password": "p"}, "Basic bWU6cA==", id="password"),
        pytest.param({}, None, id="nobody"),
    ],
)
async def test_headers(site: Site, tmp_path: Path, user: Manifest, header: str | None):
    (tmp_path / "token").write_text("from the file\n")
    found = from_kubeconfig(write(tmp_path / "config", user, site.cluster))
    assert await who(found) == {"header": header, "serial": None}


@pytest.mark.parametrize("in_place", [False, True])
async def test_a_clients_certificate_comes_in_place_or_from_files_beside_the_kubeconfig(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_place: bool
):
    mine, left = site.authority.issue(tmp_path / "mine"), tmp_path / "temporary"
    left.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(left))
    user = {"client-certificate": "mine/tls.crt", "client-key": "mine/tls.key"}
    cluster = {"server": site.server, "certificate-authority": "mine/ca.crt"}
    if in_place:
        user = {f"{name}-data": encoded(tmp_path / file) for name, file in user.items()}
        cluster |= {"certificate-authority-data": encoded(mine / "ca.crt")}
        del cluster["certificate-authority"]
    found = from_kubeconfig(write(tmp_path / "config", user, cluster))
    assert await who(found) == {"header": None, "serial": serial(mine / "tls.crt")}
    if not in_place:
        site.authority.issue(mine)  # as whoever renews it does
        assert await who(found) == {"header": None, "serial": serial(mine / "tls.crt")}
    assert list(left.iterdir()) == []  # no key stays on the disk


async def test_an_unknown_authority_is_refused_unless_told(site: Site, tmp_path: Path):
    with pytest.raises(ApiError, match="CERTIFICATE_VERIFY_FAILED"):
        await who(from_kubeconfig(write(tmp_path / "config", {"token": "t"}, {"server": site.server})))
    trusting = {"server": site.server, "insecure-skip-tls-verify": True}
    found = await who(from_kubeconfig(write(tmp_path / "config", {"token": "t"}, trusting)))
    assert found["header"] == "Bearer t"


async def test_a_servers_name_may_be_another_than_its_address(site: Site, tmp_path: Path):
    cluster = site.cluster | {"tls-server-name": "elsewhere.example"}
    with pytest.raises(ApiError, match=r"not valid for 'elsewhere\.example'"):
        await who(from_kubeconfig(write(tmp_path / "config", {"token": "t"}, cluster)))
    cluster["tls-server-name"] = NAME
    assert (await who(from_kubeconfig(write(tmp_path / "config", {"token": "t"}, cluster))))["header"]


@pytest.mark.parametrize("scheme", ["http", "socks5", "socks5h"])
async def test_a_proxy_of_the_kubeconfig_is_gone_through(site: Site, tmp_path: Path, scheme: str):
    async with Tunnel().running() as tunnel:
        server = f"https://{NAME}:{site.port}"
        cluster = site.cluster | {"server": server, "proxy-url": f"{scheme}://127.0.0.1:{tunnel.port}"}
        found = from_kubeconfig(write(tmp_path / "config", {"token": "t"}, cluster))
        assert await who(found) == {"header": "Bearer t", "serial": None}
        assert tunnel.asked == [f"{NAME}:{site.port}"]


def test_a_proxy_of_kind_socks_has_the_usual_port_where_none_is_given(tmp_path: Path):
    cluster = {"server": "https://10.0.0.1", "proxy-url": "socks5://10.0.0.2"}
    assert from_kubeconfig(write(tmp_path / "config", {}, cluster)).proxy == "socks5://10.0.0.2:1080"


@pytest.mark.parametrize(("no_proxy", "through"), [("", True), (".example", False), (NAME, False)])
async def test_a_proxy_of_the_environment_is_gone_through_where_it_is_meant(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_proxy: str, through: bool
):
    async with Tunnel().running() as tunnel:
        monkeypatch.setenv("HTTPS_PROXY", f"127.0.0.1:{tunnel.port}")
        monkeypatch.setenv("NO_PROXY", no_proxy)
        far = site.cluster | {"server": f"https://{NAME}:{site.port}"}
        found = from_kubeconfig(write(tmp_path / "config", {"token": "t"}, far))
        assert found.proxy == (f"http://127.0.0.1:{tunnel.port}" if through else None)
        if through:
            await who(found)
        # What is on this machine is reached without.
        await who(from_kubeconfig(write(tmp_path / "config", {"token": "t"}, site.cluster)))
        assert tunnel.asked == [f"{NAME}:{site.port}"] * through


@pytest.mark.parametrize("scheme", ["http", "socks5"])
async def test_a_proxy_that_is_away_is_told(site: Site, tmp_path: Path, scheme: str):
    async with Tunnel().running() as tunnel:
        away = f"{scheme}://me:secret@127.0.0.1:{tunnel.port}"
    found = from_kubeconfig(write(tmp_path / "config", {"token": "t"}, site.cluster | {"proxy-url": away}))
    with pytest.raises(
        ApiError, match=r"no answer from https://127\S+ through the proxy 127\.0\.0\.1:"
    ) as raised:
        await who(found)
    assert "secret" not in str(raised.value)


async def test_a_program_gives_a_token_and_is_asked_again_once_it_ends(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client_module, "TOKEN_SECONDS", 0.0)
    plugin = says(tmp_path, {"token": "one", "expirationTimestamp": in_minutes(30)})
    found = from_kubeconfig(write(tmp_path / "config", {"exec": plugin}, site.cluster))
    async with ApiClient(found) as client:
        assert (await client.get("/who"))["header"] == "Bearer one"
        assert asked(tmp_path) == 1
        monkeypatch.setattr(module, "EARLY", timedelta(minutes=31))
        says(tmp_path, {"token": "two", "expirationTimestamp": in_minutes(60)})
        assert (await client.get("/who"))["header"] == "Bearer two"
        assert (await client.get("/who"))["header"] == "Bearer two"
        assert asked(tmp_path) == 2
        # One that fails now is no end: whoever watches asks again.
        monkeypatch.setattr(module, "EARLY", timedelta(minutes=61))
        says(tmp_path, {"token": "three"}, first="echo the site is away >&2; exit 3")
        with pytest.raises(ApiError, match=r"returned 3. the site is away; sign in again") as raised:
            await client.get("/who")
        assert (raised.value.status, raised.value.reason) == (0, "NoToken")
        says(tmp_path, {"token": "three"})
        assert (await client.get("/who"))["header"] == "Bearer three"


async def test_a_program_gives_a_certificate_and_is_asked_for_another_once_it_ends(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def gives(name: str, minutes: float) -> Manifest:
        made = site.authority.issue(tmp_path / name)
        pem = [(made / file).read_text() for file in ("tls.crt", "tls.key")]
        status = dict(zip(("clientCertificateData", "clientKeyData"), pem, strict=True))
        return says(tmp_path, status | {"expirationTimestamp": in_minutes(minutes)})

    plugin = gives("one", 30)
    found = from_kubeconfig(write(tmp_path / "config", {"exec": plugin}, site.cluster))
    assert await who(found) == {"header": None, "serial": serial(tmp_path / "one" / "tls.crt")}
    gives("two", 60)
    monkeypatch.setattr(module, "EARLY", timedelta(minutes=31))
    assert await who(found) == {"header": None, "serial": serial(tmp_path / "two" / "tls.crt")}


async def test_arguments_and_environment_reach_a_program(site: Site, tmp_path: Path):
    plugin = says(tmp_path, {"token": "t"}, first='[ "$1 $WHO" = "login me" ] || exit 1')
    plugin |= {"args": ["login"], "env": [{"name": "WHO", "value": "me"}]}
    found = from_kubeconfig(write(tmp_path / "config", {"exec": plugin}, site.cluster))
    assert (await who(found))["header"] == "Bearer t"


async def test_a_file_of_a_token_is_read_again(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client_module, "TOKEN_SECONDS", 0.0)
    token = tmp_path / "token"
    token.write_text("one\n")
    async with ApiClient(
        from_kubeconfig(write(tmp_path / "config", {"tokenFile": "token"}, site.cluster))
    ) as client:
        assert (await client.get("/who"))["header"] == "Bearer one"
        token.write_text("two\n")
        assert (await client.get("/who"))["header"] == "Bearer two"
        token.unlink()
        with pytest.raises(ApiError, match=r"context here, failed: .*No such file"):
            await client.get("/who")


async def test_several_kubeconfigs_are_one_and_the_first_that_says_something_counts(
    site: Site, tmp_path: Path
):
    # The files that a user names are beside the file that names the user, whose cluster may be elsewhere.
    (tmp_path / "b").mkdir()
    plugin = says(tmp_path / "b", {"token": "of the program"})
    (tmp_path / "b" / "token").write_text("of the file\n")
    first = write(tmp_path / "a" / "config", {"token": "t"}, site.cluster, namespace="team")
    second = tmp_path / "b" / "config"
    users = {"u": {"token": "shadowed"}, "v": {"exec": plugin}, "w": {"tokenFile": "token"}}
    second.write_text(
        yaml.safe_dump(
            {
                "current-context": "v",
                "contexts": [
                    {"name": name, "context": {"cluster": "c", "user": name, "namespace": "n"}}
                    for name in users
                ],
                "users": [{"name": name, "user": user} for name, user in users.items()],
            }
        )
    )
    environ = {"KUBECONFIG": os.pathsep.join(map(str, (first, tmp_path / "absent", second)))}
    here = connect_user(environ)
    assert (here.namespace, (await who(here))["header"]) == ("team", "Bearer t")
    expected = {"u": "Bearer t", "v": "Bearer of the program", "w": "Bearer of the file"}
    for context, header in expected.items():
        there = connect_user(environ, context=context)
        assert (there.namespace, (await who(there))["header"]) == ("n", header)
    with pytest.raises(
        ConnectionSettingsError, match=r"nothing named 'nowhere' in its contexts: there are here, u, v, w$"
    ):
        connect_user(environ, context="nowhere")


async def test_which_kubeconfig_counts(site: Site, tmp_path: Path):
    with pytest.raises(ConnectionSettingsError, match="set KUBECONFIG to a kubeconfig file"):
        connect({"HOME": str(tmp_path)})
    at_home = write(tmp_path / ".kube" / "config", {"token": "home"}, site.cluster)
    other = write(tmp_path / "config", {"token": "other"}, site.cluster)
    home = {"HOME": str(tmp_path)}
    named = home | {"KUBECONFIG": f"{other}{os.pathsep}/nowhere"}
    in_a_pod = home | {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    for found, header in (
        (connect(home), "Bearer home"),
        (connect(named), "Bearer other"),
        (connect_user(named, kubeconfig=at_home), "Bearer home"),
        (connect_user(in_a_pod), "Bearer home"),
    ):
        assert (await who(found))["header"] == header


async def test_in_a_pod_the_service_account_is_read_by_the_loader(site: Site, tmp_path: Path):
    folder = tmp_path / "account"
    folder.mkdir()
    environ = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(site.port)}
    with pytest.raises(ConnectionSettingsError, match=r"account failed: .*automountServiceAccountToken"):
        from_pod_loaded(environ, folder)
    for name, text in (("token", "of the pod\n"), ("namespace", "team\n")):
        (folder / name).write_text(text)
    (folder / "ca.crt").write_bytes(site.authority.certificate.read_bytes())
    found = from_pod_loaded(environ, folder)
    assert (found.namespace, found.server) == ("team", site.server)
    assert (await who(found))["header"] == "bearer of the pod"
    (folder / "token").write_text("of the next hour\n")
    assert (await who(found))["header"] == "bearer of the next hour"


@pytest.mark.parametrize("there", [True, False])
def test_a_person_in_a_pod_needs_no_kubeconfig_and_no_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: bool
):
    if not there:
        monkeypatch.setitem(sys.modules, "kubernetes", None)
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    environ = {"HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    with pytest.raises(ConnectionSettingsError, match="automountServiceAccountToken"):
        connect_user(environ | {"KUBERNETES_SERVICE_PORT": "443"})


@pytest.mark.parametrize("installed", ["none", "36.0.3"])
def test_a_kubeconfig_without_the_loader_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: str
):
    if installed == "none":
        for name in [each for each in sys.modules if each.partition(".")[0] == "kubernetes"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "kubernetes", None)
    else:
        monkeypatch.setattr("kubernetes.__version__", installed)
    path = write(tmp_path / "config", {"token": "t"}, {"server": "https://10.0.0.1"})
    with pytest.raises(
        ConnectionSettingsError, match=f"{installed} is installed: pip install 'kubernetes>=37'"
    ):
        from_kubeconfig(path)


def test_a_proxy_of_kind_socks_without_its_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    cluster = {"server": "https://10.0.0.1", "proxy-url": "socks5://10.0.0.2:1080"}
    with pytest.raises(ConnectionSettingsError, match="kind SOCKS, which needs: pip install aiohttp-socks"):
        from_kubeconfig(write(tmp_path / "config", {"token": "t"}, cluster))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param("current-context: a\n", "nothing named 'a' in its contexts: there are none", id="empty"),
        pytest.param("{}", "has no current-context; name one by --context", id="no-context"),
        pytest.param("a: [", "cannot read the kubeconfig .*flow node .* line 1, column 5", id="no-yaml"),
        pytest.param("a: 2026-02-30", "cannot read the kubeconfig .*day", id="a-date-that-is-none"),
        pytest.param("contexts: {a: {token: secret}}", "cannot read the kubeconfig", id="a-map"),
        pytest.param("contexts: [secret]", "cannot read the kubeconfig", id="a-list-of-words"),
        pytest.param("contexts: secret", "cannot read the kubeconfig", id="a-word"),
        pytest.param("", "cannot read the kubeconfig .*is empty", id="nothing"),
        pytest.param("- secret", "cannot read the kubeconfig", id="a-list"),
    ],
)
def test_a_kubeconfig_that_is_of_no_use_says_why(tmp_path: Path, content: str, expected: str):
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(ConnectionSettingsError, match=expected) as raised:
        from_kubeconfig(path)
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_kubeconfig_that_is_not_there_says_so(tmp_path: Path):
    with pytest.raises(ConnectionSettingsError, match=r"/config: there is no such file$"):
        from_kubeconfig(tmp_path / "config")


@pytest.mark.parametrize(
    ("user", "cluster", "expected"),
    [
        pytest.param({}, {}, "has no server in its cluster 'c'", id="no-server"),
        pytest.param(
            {"client-certificate": "gone.crt"},
            None,
            "File does not exist: /.*/gone.crt",
            id="no-file",
        ),
        pytest.param({"client-certificate-data": "bm9uZQ=="}, None, r"failed: \[SSL\]", id="no-certificate"),
        pytest.param({"client-certificate-data": "bm9uZ"}, None, "failed: Invalid base64", id="no-base64"),
        pytest.param(
            {"auth-provider": {"name": "azure"}},
            None,
            "from the auth-provider 'azure', which gave none, and which Kubernetes has given up; use an exec",
            id="auth-provider",
        ),
        pytest.param(
            {"exec": {"apiVersion": "v1", "command": "absent", "installHint": "get it\nfrom the cloud"}},
            None,
            "failed: .*No such file.*'absent'; get it from the cloud$",
            id="no-program",
        ),
        pytest.param(
            {"exec": {"command": "absent", "env": [{"value": "secret"}]}},
            None,
            "missing key 'apiVersion'; sign in again, or take another --context$",
            id="a-program-without-a-version",
        ),
        pytest.param(
            {"exec": {"apiVersion": "v1", "command": "absent", "env": [{"value": "secret"}]}},
            None,
            "Expected key name in users u of /.*/env/0; sign in",
            id="a-variable-without-a-name",
        ),
        pytest.param(
            {"token": "secret", "as": "jane"}, None, "acts as 'jane', which is not supported", id="as-another"
        ),
        pytest.param(
            {}, {"proxy-url": "gopher://p"}, "has a proxy of kind 'gopher', expected http", id="strange-proxy"
        ),
        *(
            pytest.param(
                {}, {"proxy-url": each}, "a proxy whose address cannot be used; expected http", id=each
            )
            for each in ("http://p:port", "p:70000", "http://", "http://[::1")
        ),
        pytest.param(
            {},
            {"proxy-url": "socks5://p", "tls-server-name": "a.example"},
            "has both a tls-server-name and a proxy of kind SOCKS",
            id="a-name-through-socks",
        ),
        pytest.param({}, {"certificate-authority-data": "bm9uZQ=="}, r"failed: \[X509", id="no-authority"),
    ],
)
def test_a_login_that_is_of_no_use_says_why(
    tmp_path: Path, user: Manifest, cluster: Manifest | None, expected: str
):
    whole = {} if cluster == {} else {"server": "https://10.0.0.1", **(cluster or {})}
    with pytest.raises(ConnectionSettingsError, match=expected) as raised:
        from_kubeconfig(write(tmp_path / "config", user, whole))
    assert "secret" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("status", "first", "said"),
    [
        pytest.param({}, "echo who are you >&2; exit 3", "returned 3. who are you; sign in", id="it-fails"),
        pytest.param({}, "echo hello; exit", "failed to decode process output", id="it-says-something-else"),
        pytest.param({}, "", "missing token or clientCertificateData", id="it-gives-nothing"),
        pytest.param({"clientCertificateData": "c"}, "", "missing clientKeyData", id="it-gives-no-key"),
        pytest.param(
            {"token": "secret", "expirationTimestamp": "soon"},
            "",
            "Invalid RFC3339 datetime: 'soon'",
            id="it-gives-no-time",
        ),
    ],
)
def test_a_program_that_gives_no_credentials_is_told_of(
    tmp_path: Path, status: Manifest, first: str, said: str
):
    path = write(
        tmp_path / "config", {"exec": says(tmp_path, status, first=first)}, {"server": "https://10.0.0.1"}
    )
    with pytest.raises(ConnectionSettingsError, match=f"config, context here, failed: .*{said}") as raised:
        from_kubeconfig(path)
    assert "secret" not in str(raised.value)


async def test_a_program_that_does_not_end_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(module, "LOGIN_SECONDS", 0.2)
    os.mkfifo(tmp_path / "never")
    plugin = says(tmp_path, {"token": "t"}, first=f"read line <{tmp_path}/never")
    path = write(tmp_path / "config", {"exec": plugin}, {"server": "https://10.0.0.1"})
    with pytest.raises(ConnectionSettingsError, match=r"has not ended within 0\.2 s; sign in by its own"):
        await asyncio.to_thread(from_kubeconfig, path)
    (tmp_path / "never").write_text("\n")  # so that the program ends with the test


def test_nothing_is_imported_for_what_needs_no_kubeconfig(tmp_path: Path):
    """The package has 2,700 modules, and takes longer to import than all else of `fleetjob --help`."""
    code = (
        "import sys, fleet_operator.cli.app, fleet_operator.cli.command, fleet_operator.client.session\n"
        "from fleet_operator.kubernetes.login import connect\n"
        "import contextlib, fleet_operator.errors as errors\n"
        "with contextlib.suppress(errors.OperatorError):\n"
        "    connect({'KUBERNETES_SERVICE_HOST': '10.96.0.1'})\n"
        "print([each for each in sys.modules if each.partition('.')[0] in ('kubernetes', 'aiohttp_socks')])\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert printed.stdout == "[]\n"
