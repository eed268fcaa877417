"""The ways in which a person and a pod log in, each used on a real API server."""

from __future__ import annotations

import base64
import itertools
import json
import os
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from fleet_operator.kubernetes.client import ApiClient
from fleet_operator.kubernetes.login import from_pod, from_pod_loaded
from tests.support.fleetjob import Fleetjob
from tests.support.tunnel import Tunnel

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.controlplane import ControlPlane

    Manifest = dict[str, Any]

KINDS = ("token", "token-file", "certificate", "certificate-data", "exec-token", "exec-certificate")
EXEC = "client.authentication.k8s.io/v1"


def token_of(control_plane: ControlPlane) -> str:
    """Return a token of an account that may do anything."""
    kubectl = control_plane.admin.kubectl
    kubectl("create", "serviceaccount", "somebody", "-n", "default", check=False)
    bound = ("--clusterrole=cluster-admin", "--serviceaccount=default:somebody")
    kubectl("create", "clusterrolebinding", "somebody", *bound, check=False)
    return kubectl("create", "token", "somebody", "-n", "default").strip()


def user(kind: str, control_plane: ControlPlane, folder: Path) -> Manifest:
    """Return a user of a kubeconfig with all permissions, who authenticates in one way."""
    mine = control_plane.authority.issue(folder / "mine", subject="/O=system:masters/CN=alice")
    token = token_of(control_plane)
    (folder / "token").write_text(f"{token}\n")
    pem = {name: (mine / file).read_text() for name, file in (("crt", "tls.crt"), ("key", "tls.key"))}
    given = {
        "exec-token": {"token": token},
        "exec-certificate": {"clientCertificateData": pem["crt"], "clientKeyData": pem["key"]},
    }
    answer = json.dumps({"apiVersion": EXEC, "kind": "ExecCredential", "status": given.get(kind, {})})
    program = folder / "sign-in"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    program.chmod(0o755)
    plugin = {"exec": {"apiVersion": EXEC, "command": "./sign-in", "interactiveMode": "Never"}}
    users: dict[str, Manifest] = {
        "token": {"token": token},
        "token-file": {"tokenFile": "token"},
        "certificate": {"client-certificate": "mine/tls.crt", "client-key": "mine/tls.key"},
        "certificate-data": {
            "client-certificate-data": base64.b64encode(pem["crt"].encode()).decode(),
            "client-key-data": base64.b64encode(pem["key"].encode()).decode(),
        },
        "exec-token": plugin,
        "exec-certificate": plugin,
    }
    return users[kind]


def write(path: Path, user: Manifest, cluster: Manifest) -> Path:
    config = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": user}],
    }
    path.write_text(yaml.safe_dump(config))
    return path


@pytest.mark.parametrize(
    ("kind", "proxy"),
    [
        *((kind, None) for kind in KINDS),
        *itertools.product(("token", "certificate"), ("http", "socks5")),
    ],
)
async def test_a_person_is_known(control_plane: ControlPlane, tmp_path: Path, kind: str, proxy: str | None):
    admin = control_plane.admin
    cluster = {"server": admin.server, "certificate-authority": str(admin.certificate)}
    async with AsyncExitStack() as stack:
        tunnel = await stack.enter_async_context(Tunnel().running())
        if proxy is not None:
            cluster["proxy-url"] = f"{proxy}://127.0.0.1:{tunnel.port}"
        config = write(tmp_path / "config", user(kind, control_plane, tmp_path), cluster)
        ended = await Fleetjob(config, "default")("status")
        assert (ended.status, ended.err) == (0, "")
        assert ended.out == "no FleetJob in namespace default\n"
        assert tunnel.asked == [admin.server.removeprefix("https://")] * (proxy is not None)


async def test_a_context_of_several_kubeconfigs_is_taken(control_plane: ControlPlane, tmp_path: Path):
    admin = control_plane.admin
    elsewhere = write(tmp_path / "elsewhere", {"token": "none"}, {"server": "https://127.0.0.1:1"})
    documents = yaml.safe_load(admin.kubeconfig.read_text())
    documents["contexts"][0] |= {"name": "real"}
    (tmp_path / "real").write_text(yaml.safe_dump(documents | {"current-context": "real"}))
    both = Fleetjob(elsewhere, "default")
    environ = {"KUBECONFIG": f"{elsewhere}{os.pathsep}{tmp_path / 'real'}"}
    known = await both.run("status", "--context", "real", environ=environ)
    assert (known.status, known.out) == (0, "no FleetJob in namespace default\n")
    away = await both.run("status", environ=environ)
    assert away.status == 1
    assert away.err.startswith("fleetjob: no answer from https://127.0.0.1:1: ")


async def test_an_authority_that_nobody_knows_is_refused_unless_told(
    control_plane: ControlPlane, tmp_path: Path
):
    given = {"token": token_of(control_plane)}
    cluster: Manifest = {"server": control_plane.admin.server}
    refused = await Fleetjob(write(tmp_path / "config", given, cluster), "default")("status")
    assert (refused.status, refused.out) == (1, "")
    assert "CERTIFICATE_VERIFY_FAILED" in refused.err
    cluster["insecure-skip-tls-verify"] = True
    taken = await Fleetjob(write(tmp_path / "config", given, cluster), "default")("status")
    assert (taken.status, taken.err) == (0, "")


@pytest.mark.parametrize("read", [from_pod, from_pod_loaded])
async def test_a_pod_is_known_by_its_account(control_plane: ControlPlane, tmp_path: Path, read: Any):
    host, _, port = control_plane.admin.server.removeprefix("https://").rpartition(":")
    for name, text in (("token", token_of(control_plane)), ("namespace", "default")):
        (tmp_path / name).write_text(f"{text}\n")
    (tmp_path / "ca.crt").write_bytes(control_plane.admin.certificate.read_bytes())
    connection = read({"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}, tmp_path)
    assert connection.namespace == "default"
    async with ApiClient(connection) as client:
        assert (await client.get("/api/v1/namespaces/default"))["metadata"]["name"] == "default"
