from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from fleet_operator.cluster.connection import (
    Connection,
    ConnectionSettingsError,
    connect,
    connect_user,
    from_kubeconfig,
    from_pod,
)

if TYPE_CHECKING:
    from pathlib import Path


def kubeconfig(
    folder: Path,
    *,
    user: dict[str, Any] | None = None,
    verify: bool = True,
    server: str | None = "https://10.0.0.1:6443/",
) -> Path:
    path = folder / "config"
    cluster = {"server": server} | ({} if verify else {"insecure-skip-tls-verify": True})
    config = {
        "current-context": "here",
        "contexts": [
            {"name": "elsewhere", "context": {"cluster": "x", "user": "x"}},
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
        ],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user or {"token": "secret"}}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


def test_a_kubeconfigs_current_context_counts(tmp_path: Path):
    found = from_kubeconfig(kubeconfig(tmp_path))
    assert (found.server, found.namespace, found.bearer()) == ("https://10.0.0.1:6443", "team", "secret")
    assert found.verify


def test_certificates_come_in_place_or_from_files_beside_the_kubeconfig(tmp_path: Path):
    (tmp_path / "key.pem").write_text("the key")
    encoded = base64.b64encode(b"the certificate").decode()
    found = from_kubeconfig(
        kubeconfig(tmp_path, user={"client-certificate-data": encoded, "client-key": "key.pem"})
    )
    assert (found.client_certificate, found.client_key) == ("the certificate", "the key")


def test_a_token_file_is_read_each_time(tmp_path: Path):
    found = from_kubeconfig(kubeconfig(tmp_path, user={"tokenFile": "token"}))
    for token in ("one", "two"):
        (tmp_path / "token").write_text(f"{token}\n")
        assert found.bearer() == token


def test_verification_is_switched_off_only_when_told(tmp_path: Path):
    assert not from_kubeconfig(kubeconfig(tmp_path, verify=False)).verify


def test_secrets_are_not_shown():
    shown = repr(Connection("https://a", token="secret", client_key="private"))
    assert "secret" not in shown
    assert "private" not in shown


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        pytest.param("current-context: a\n", "nothing named 'a' in its contexts", id="no-such-context"),
        pytest.param("{}", "has no current-context", id="no-context"),
        pytest.param("a: [", "cannot read the kubeconfig", id="no-yaml"),
        pytest.param("a: 2026-02-30", "cannot read the kubeconfig", id="a-date-that-is-none"),
        pytest.param(
            "current-context: a\ncontexts: {a: b}\n",
            "holds dict under contexts, expected a list of mappings",
            id="a-map",
        ),
        pytest.param("", "holds nothing, expected a mapping with clusters", id="empty"),
        pytest.param("- a", "holds list, expected a mapping with clusters", id="a-list"),
    ],
)
def test_a_kubeconfig_that_is_of_no_use_says_why(tmp_path: Path, content: str, expected: str):
    path = tmp_path / "config"
    path.write_text(content)
    with pytest.raises(ConnectionSettingsError, match=expected):
        from_kubeconfig(path)


@pytest.mark.parametrize(
    ("user", "expected"),
    [
        pytest.param(
            {"client-key": "gone.key"}, "has a client-key that cannot be read: .*gone.key", id="file"
        ),
        pytest.param({"client-key-data": "%"}, "has a client-key that cannot be read", id="no-base64"),
    ],
)
def test_a_certificate_or_key_that_cannot_be_read_says_so(
    tmp_path: Path, user: dict[str, str], expected: str
):
    with pytest.raises(ConnectionSettingsError, match=expected):
        from_kubeconfig(kubeconfig(tmp_path, user=user))


def test_a_cluster_without_a_server_says_so(tmp_path: Path):
    with pytest.raises(ConnectionSettingsError, match="has no server in its cluster"):
        from_kubeconfig(kubeconfig(tmp_path, server=None))


def test_a_plugin_that_kubernetes_has_given_up_is_refused_by_name(tmp_path: Path):
    path = kubeconfig(tmp_path, user={"auth-provider": {"name": "gcp"}})
    with pytest.raises(ConnectionSettingsError, match="an auth-provider, which Kubernetes has given up"):
        from_kubeconfig(path)


def test_a_program_gives_the_token(tmp_path: Path):
    program = tmp_path / "sign-in"
    program.write_text('#!/bin/sh\necho \'{"status": {"token": "from the program"}}\'\n')
    program.chmod(0o755)
    found = from_kubeconfig(kubeconfig(tmp_path, user={"exec": {"command": "./sign-in"}}))
    assert found.bearer() == "from the program"


def test_a_context_can_be_named_and_several_kubeconfigs_are_one(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = kubeconfig(tmp_path / "a")
    second = tmp_path / "b" / "config"
    second.write_text(
        yaml.safe_dump(
            {
                "contexts": [{"name": "there", "context": {"cluster": "far", "user": "u", "namespace": "n"}}],
                "clusters": [{"name": "far", "cluster": {"server": "https://far"}}],
            }
        )
    )
    environ = {"KUBECONFIG": f"{first}:{tmp_path / 'absent'}:{second}"}
    found = connect_user(environ, context="there")
    assert (found.server, found.namespace, found.bearer()) == ("https://far", "n", "secret")
    assert connect_user(environ).server == "https://10.0.0.1:6443"
    with pytest.raises(ConnectionSettingsError, match="nothing named 'nowhere' in its contexts: there are"):
        connect_user(environ, context="nowhere")


def test_a_person_in_a_pod_is_asked_for_no_kubeconfig(tmp_path: Path):
    environ = {"HOME": str(tmp_path), "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    with pytest.raises(ConnectionSettingsError, match="in a pod, but its service account cannot be read"):
        connect_user(environ)
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path / ".kube")
    assert connect_user(environ).namespace == "team"


@pytest.mark.parametrize(
    ("host", "expected"), [("10.96.0.1", "https://10.96.0.1:443"), ("fd00::1", "https://[fd00::1]:443")]
)
def test_in_a_pod_the_service_account_is_used(tmp_path: Path, host: str, expected: str):
    for name in ("namespace", "ca.crt", "token"):
        (tmp_path / name).write_text(f"the {name}\n")
    found = from_pod({"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": "443"}, tmp_path)
    assert (found.server, found.namespace) == (expected, "the namespace")
    assert (found.ca_data, found.bearer()) == ("the ca.crt\n", "the token")


def test_in_a_pod_without_a_service_account_the_error_says_so(tmp_path: Path):
    with pytest.raises(ConnectionSettingsError, match="automountServiceAccountToken"):
        from_pod({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, tmp_path / "nothing")


def test_which_kubeconfig_counts(tmp_path: Path):
    with pytest.raises(ConnectionSettingsError, match="set KUBECONFIG to a kubeconfig file"):
        connect({"HOME": str(tmp_path)})
    (tmp_path / ".kube").mkdir()
    kubeconfig(tmp_path / ".kube")
    assert connect({"HOME": str(tmp_path)}).namespace == "team"
    (tmp_path / "other").mkdir()
    other = kubeconfig(tmp_path / "other", user={"token": "other"})
    environ = {"HOME": str(tmp_path), "KUBECONFIG": f"{other}:/nowhere"}
    assert connect(environ).bearer() == "other"
    assert connect_user(environ, kubeconfig=tmp_path / ".kube" / "config").bearer() == "secret"
