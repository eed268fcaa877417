"""What a release consists of: SBOMs, a chart that names the published image, and signatures of digests."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
from pathlib import Path

import pytest
import yaml

from fleet_operator import __version__ as version
from tools import assets

pytestmark = [pytest.mark.programs, pytest.mark.timeout(200)]

REGISTRY = "registry.example.com/team"
HEX = "0123456789abcdef" * 4
STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >>"{noted}"
case "$(basename "$0") $1" in
  "docker inspect") for last; do :; done; echo "other/x@sha256:1"; echo "${{last%:*}}@sha256:{hex}" ;;
  "helm push") echo "Pushed: x"; echo "Digest: sha256:{hex}" ;;
esac
"""


def make(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart and the SBOMs, as `make` writes them."""
    assets.find(["helm"])  # else make would build it
    folder = tmp_path_factory.mktemp("dist")
    ended = make("chart", "sbom", f"WHEELS={folder}", f"REGISTRY={REGISTRY}")
    assert ended.returncode == 0, ended.stderr
    return folder


@pytest.mark.parametrize(("image", "part"), [("operator", "operator"), ("trainer", "trainer_image")])
def test_an_sbom_lists_what_the_lock_of_the_image_pins(dist: Path, image: str, part: str):
    sbom = json.loads((dist / f"fleet-{image}-{version}.cdx.json").read_text())
    assert sbom["bomFormat"] == "CycloneDX"
    assert sbom["metadata"]["component"]["name"] == f"fleet-{image}"
    listed = {(each["name"], each["version"]) for each in sbom["components"]}
    lock = (Path(part) / "requirements.lock").read_text()
    assert listed == set(re.findall(r"^([a-z0-9][\w.-]*)==([^\s\\;]+)", lock, re.MULTILINE))
    for each in sbom["components"]:
        hashes = [hashed["alg"] for reference in each["externalReferences"] for hashed in reference["hashes"]]
        assert set(hashes) == {"SHA-256"}, each["name"]


def test_the_chart_runs_the_image_of_its_registry(dist: Path):
    with tarfile.open(dist / f"fleet-operator-{version}.tgz") as chart:
        values = chart.extractfile("fleet-operator/values.yaml")
        assert values is not None
        image = yaml.safe_load(values)["image"]
    assert image["repository"] == f"{REGISTRY}/fleet-operator"
    helm = assets.find(["helm"])["helm"]
    shown = subprocess.run(
        [helm, "template", dist / f"fleet-operator-{version}.tgz", "--kube-version", assets.KUBERNETES],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert f'image: "{REGISTRY}/fleet-operator:{version}"' in shown.stdout


def test_what_is_pushed_is_signed_by_its_digest(dist: Path, tmp_path: Path):
    """Stand-ins of docker, helm and cosign log their arguments: there is no registry and no identity here."""
    noted = tmp_path / "noted"
    for name in ("docker", "cosign", "helm"):
        (tmp_path / name).write_text(STAND_IN.format(noted=noted, hex=HEX))
        (tmp_path / name).chmod(0o755)
    publish = Path("tools/release/publish.sh").resolve()
    images = [f"fleet-operator:{version}", f"fleet-trainer:{version}"]
    ended = subprocess.run(
        [publish, REGISTRY, version, dist, *images],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "COSIGN_FLAGS": "--key cosign.key"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    expected = []
    for image in images:
        name = image.partition(":")[0]
        digest, sbom = f"{REGISTRY}/{name}@sha256:{HEX}", dist / f"{name}-{version}.cdx.json"
        expected += [
            f"docker tag {image} {REGISTRY}/{image}",
            f"docker push {REGISTRY}/{image}",
            f"cosign sign --yes --key cosign.key {digest}",
            f"cosign attest --yes --key cosign.key --type cyclonedx --predicate {sbom} {digest}",
        ]
    expected += [
        f"helm push {dist}/fleet-operator-{version}.tgz oci://{REGISTRY}/charts",
        f"cosign sign --yes --key cosign.key {REGISTRY}/charts/fleet-operator@sha256:{HEX}",
    ]
    calls = noted.read_text().splitlines()
    assert [each for each in calls if not each.startswith("docker inspect")] == expected


@pytest.mark.parametrize(
    ("registry", "says"),
    [("", "make publish REGISTRY="), (REGISTRY, f"run 'make chart REGISTRY={REGISTRY}' first")],
    ids=["no-registry", "nothing-built"],
)
def test_nothing_is_pushed_before_everything_is_there(tmp_path: Path, registry: str, says: str):
    ended = make("publish", f"REGISTRY={registry}", f"WHEELS={tmp_path}", "DOCKER=false", "COSIGN=false")
    assert ended.returncode != 0
    assert says in ended.stderr


def test_every_file_of_a_release_is_signed(tmp_path: Path):
    noted = tmp_path / "noted"
    (tmp_path / "cosign").write_text(STAND_IN.format(noted=noted, hex=HEX))
    (tmp_path / "cosign").chmod(0o755)
    files = [tmp_path / f"x.{end}" for end in ("whl", "tar.gz", "tgz", "cdx.json")]
    for file in files:
        file.touch()
    ended = make("sign", f"WHEELS={tmp_path}", f"COSIGN={tmp_path / 'cosign'}")
    assert ended.returncode == 0, ended.stderr
    assert noted.read_text().splitlines() == [
        f"cosign sign-blob --yes --bundle {file}.sigstore.json {file}" for file in files
    ]
