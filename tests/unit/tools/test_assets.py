from __future__ import annotations

import os
import re
import threading
from pathlib import Path

import pytest

from tools import assets

pytestmark = pytest.mark.timeout(30)


def program(folder: Path, name: str, prints: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{prints}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    """An environment in which nothing is found, and in which building leaves its mark only."""
    shell = str(Path("/bin/sh").resolve().parent)
    return {"HOME": str(tmp_path / "home"), "PATH": f"{tmp_path / 'path'}{os.pathsep}{shell}"}


def fake_go(tmp_path: Path, *, version: str = "go1.26.8", fails: bool = False) -> None:
    """Put a `go` on PATH that "builds" scripts, and notes each build."""
    folder = tmp_path / "path"
    folder.mkdir(exist_ok=True)
    go = folder / "go"
    go.write_text(
        f"""#!/bin/sh
if [ "$1" = version ]; then echo "go version {version} linux/amd64"; exit 0; fi
echo "$@" >> {tmp_path}/builds
{"echo no such module; exit 1" if fails else ""}
out=$GOBIN/kwok
while [ $# -gt 0 ]; do if [ "$1" = -o ]; then out=$2; fi; shift; done
printf '#!/bin/sh\\n' > "$out"
chmod +x "$out"
"""
    )
    go.chmod(0o755)


def builds(tmp_path: Path) -> list[str]:
    path = tmp_path / "builds"
    return path.read_text().splitlines() if path.exists() else []


def test_the_assets_folder_comes_before_the_path(tmp_path: Path, environ: dict[str, str]):
    mine = program(tmp_path / "assets", "etcd", "etcd Version: 3.6.9")
    program(tmp_path / "path", "etcd", "etcd Version: 3.6.5")
    environ["KUBEBUILDER_ASSETS"] = str(tmp_path / "assets")
    assert assets.find(["etcd"], environ) == {"etcd": mine}


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
def test_which_versions_will_do(
    tmp_path: Path, environ: dict[str, str], name: str, prints: str, will_do: bool
):
    path = program(tmp_path / "path", name, prints)
    assert assets.installed(name, environ) == (path if will_do else None)


def test_what_is_nowhere_is_built_once(
    tmp_path: Path, environ: dict[str, str], capsys: pytest.CaptureFixture[str]
):
    fake_go(tmp_path)
    for _ in range(2):
        (path,) = assets.find(["kwok"], environ).values()
        assert path == tmp_path / "home" / ".cache" / "fleetjob" / "bin" / "kwok"
        assert os.access(path, os.X_OK)
    assert len(builds(tmp_path)) == 1
    assert f"sigs.k8s.io/kwok/cmd/kwok@v{assets.KWOK}" in builds(tmp_path)[0]
    assert "building kwok" in capsys.readouterr().err


def test_the_users_cache_folder_counts(tmp_path: Path, environ: dict[str, str]):
    fake_go(tmp_path)
    environ["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    assert assets.find(["etcd"], environ)["etcd"].parent == tmp_path / "cache" / "fleetjob" / "bin"


def test_a_program_is_built_again_when_what_it_is_built_from_has_changed(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
):
    fake_go(tmp_path)
    assets.find(["kwok"], environ)
    newer = assets.Program("0.9.0", 2, ("--version",), "sigs.k8s.io/kwok/cmd/kwok@v0.9.0")
    monkeypatch.setattr(assets, "PROGRAMS", {"kwok": newer})
    assets.find(["kwok"], environ)
    assert len(builds(tmp_path)) == 2


def test_two_that_ask_at_once_make_one_build(tmp_path: Path, environ: dict[str, str]):
    fake_go(tmp_path)
    asking = [threading.Thread(target=assets.find, args=(["kwok"], environ)) for _ in range(3)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    assert len(builds(tmp_path)) == 1


def test_a_build_that_fails_says_what_go_said(tmp_path: Path, environ: dict[str, str]):
    fake_go(tmp_path, fails=True)
    with pytest.raises(assets.AssetError, match=r"could not build kwok(.|\n)*no such module"):
        assets.find(["kwok"], environ)


def test_without_go_the_error_gives_the_ways_out(environ: dict[str, str]):
    with pytest.raises(
        assets.AssetError, match=r"Go 1\.26.*or put etcd 3\.6 on PATH or in KUBEBUILDER_ASSETS"
    ):
        assets.find(["etcd"], {**environ, "PATH": "/nowhere"})


def test_an_old_go_is_refused(tmp_path: Path, environ: dict[str, str]):
    fake_go(tmp_path, version="go1.21.0")
    with pytest.raises(assets.AssetError, match=r"go1\.21\.0.* is too old"):
        assets.find(["kwok"], environ)


def test_an_unknown_name_is_refused(environ: dict[str, str]):
    with pytest.raises(assets.AssetError, match="no such program: minikube; there are etcd"):
        assets.find(["minikube"], environ)


def test_the_pinned_versions_are_those_of_the_go_modules():
    for folder, module, version in (
        ("k8s", "k8s.io/kubernetes", assets.KUBERNETES),
        ("etcd", "go.etcd.io/etcd/server/v3", assets.ETCD),
    ):
        text = (assets.GO_MODULES / folder / "go.mod").read_text()
        assert re.search(rf"^require {re.escape(module)} v{re.escape(version)}$", text, re.MULTILINE)
