"""Where programs are found; nothing is downloaded or built for that."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tools import assets
from tools.assets import lookup, programs

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.bare_machine import BareMachine

pytestmark = pytest.mark.timeout(30)


def test_the_assets_folder_comes_before_the_path(tmp_path: Path, machine: BareMachine):
    mine = machine.put_program("etcd", "etcd Version: 3.6.9", tmp_path / "assets")
    machine.put_program("etcd", "etcd Version: 3.6.5")
    machine.environ["KUBEBUILDER_ASSETS"] = str(tmp_path / "assets")
    assert assets.find(["etcd"], machine.environ) == {"etcd": mine}


@pytest.mark.parametrize(
    ("name", "prints", "will_do"),
    [
        ("kube-apiserver", "Kubernetes v1.34.0", True),
        ("kube-apiserver", "Kubernetes v1.33.4", False),
        ("kube-apiserver", "Kubernetes v11.34.1", False),
        ("kubectl", "Client Version: v1.34.4", True),
        ("kubectl", "Client Version: v1.3.4", False),
        ("etcd", "etcd Version: 3.5.21", False),
        ("helm", "v3.10.0+gce66412", True),
        ("helm", "v4.0.0", False),
        ("kind", "kind v0.20.0 go1.26.8 linux/amd64", True),
        ("kwok", "kwok version v0.8.1 go1.26.8 (linux/amd64)", True),
        ("kwok", "something else", False),
    ],
)
def test_which_versions_will_do(machine: BareMachine, name: str, prints: str, will_do: bool):
    path = machine.put_program(name, prints)
    assert lookup.installed(name, machine.environ) == (path if will_do else None)


@pytest.mark.parametrize(
    ("listed", "will_do"),
    [("sigs.k8s.io/kueue\tv0.19.3", True), ("sigs.k8s.io/kueue\tv0.18.1", False), ("", False)],
)
def test_a_program_that_cannot_say_its_version_is_known_by_gos_build_information(
    machine: BareMachine, listed: str, will_do: bool
):
    path = machine.put_program("kueue", "no version")
    path.write_bytes(f"\x7fELF\0path\tsigs.k8s.io/kueue/cmd/kueue\nmod\t{listed}\th1:sum=\n".encode())
    assert lookup.installed("kueue", machine.environ) == (path if will_do else None)
    path.write_bytes(b"")
    assert lookup.installed("kueue", machine.environ) is None


def test_programs_that_take_long_to_build_are_got_by_those_who_name_them(machine: BareMachine):
    assert {"kueue", "coscheduling"} == set(programs.PROGRAMS) - set(programs.USUAL)
    with pytest.raises(assets.MissingError, match=r"kueue 0\.19: .* run `python -m tools\.assets kueue`"):
        assets.find(["kueue"], machine.environ)


def test_what_is_nowhere_is_named_at_once_and_never_built(machine: BareMachine):
    machine.put_go()
    machine.put_program("kubectl", "Client Version: v1.34.4")
    with pytest.raises(assets.AssetError, match=r"^etcd 3\.6, kwok 0\.8: neither in .*; run `make assets`"):
        assets.find(["etcd", "kubectl", "kwok"], machine.environ)
    assert not machine.builds


def test_an_unknown_name_is_refused(machine: BareMachine):
    with pytest.raises(assets.AssetError, match="no such program: minikube; there are actionlint, cosch"):
        assets.find(["minikube"], machine.environ)


def test_the_pinned_versions_are_those_of_the_go_modules():
    for folder, module, version in (
        ("k8s", "k8s.io/kubernetes", programs.KUBERNETES),
        ("etcd", "go.etcd.io/etcd/server/v3", programs.ETCD),
    ):
        text = (lookup.GO_MODULES / folder / "go.mod").read_text()
        assert re.search(rf"^require {re.escape(module)} v{re.escape(version)}$", text, re.MULTILINE)
