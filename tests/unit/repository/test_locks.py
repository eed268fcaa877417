"""What is installed anywhere is what requirements.lock names, pinned by hash, from no particular address."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

WHOLE = Path("requirements.lock")
PARTS = [
    Path("operator/requirements.lock"),
    Path("trainer_image/requirements.lock"),
    Path("tools/bootstrap.lock"),
]
FRAMEWORKS = Path("tests/frameworks.lock")
OLDEST = Path("tests/oldest.lock")
TORCHREC = Path("tests/torchrec.lock")
KFP = Path("tests/kfp.lock")
SITE = Path("docs/requirements.lock")
MERMAID = Path("docs/mermaid.lock")


def pins(lock: Path) -> dict[str, frozenset[str]]:
    """Return the hashes of each ``name==version`` of a lock file."""
    entries = re.findall(r"^([a-z0-9][\w.-]*==[^\s\\;]+)(.*(?:\n    .*)*)", lock.read_text(), re.MULTILINE)
    return {name: frozenset(re.findall(r"--hash=(sha256:[0-9a-f]{64})", rest)) for name, rest in entries}


@pytest.mark.parametrize("lock", [WHOLE, *PARTS, FRAMEWORKS, OLDEST, TORCHREC, KFP, SITE, MERMAID], ids=str)
def test_every_pin_has_hashes_and_no_address(lock):
    found = pins(lock)
    assert found
    assert [name for name, hashes in found.items() if not hashes] == []
    assert not re.search(r"https?://|--(extra-)?index|--find-links", lock.read_text())


@pytest.mark.parametrize("lock", PARTS, ids=str)
def test_a_part_pins_what_the_whole_pins(lock):
    whole = pins(WHOLE)
    assert {name: hashes for name, hashes in pins(lock).items() if whole.get(name) != hashes} == {}


def test_other_frameworks_are_tried_with_what_the_whole_pins_and_are_no_part_of_it():
    whole, tried = pins(WHOLE), pins(FRAMEWORKS)
    names = {pin.partition("==")[0] for pin in whole}
    assert names.isdisjoint({"lightning", "accelerate"})
    shared = {pin: hashes for pin, hashes in tried.items() if pin.partition("==")[0] in names}
    assert {pin: hashes for pin, hashes in shared.items() if whole.get(pin) != hashes} == {}


def test_torchrec_is_tried_with_the_oldest_packages_and_the_fbgemm_of_its_version_without_cuda():
    oldest, tried = pins(OLDEST), pins(TORCHREC)
    names = {pin.partition("==")[0] for pin in oldest}
    shared = {pin: hashes for pin, hashes in tried.items() if pin.partition("==")[0] in names}
    assert {pin: hashes for pin, hashes in shared.items() if oldest.get(pin) != hashes} == {}
    versions = dict(pin.split("==") for pin in tried)
    assert versions["torchrec"] == versions["fbgemm-gpu-cpu"]
    assert "fbgemm-gpu" not in versions


def test_the_operators_image_holds_neither_torch_nor_the_kubernetes_client():
    names = {name.partition("==")[0] for name in pins(Path("operator/requirements.lock"))}
    assert names.isdisjoint({"torch", "kubernetes"})
    assert {"kopf", "aiohttp"} <= names
    # On uvloop a TLS connection that aiohttp gives up while it is made may leave its file descriptor in use
    # (MagicStack/uvloop 471, 646, 653); tests/controlplane/test_cut_off.py fails there.
    assert "uvloop" not in names


@pytest.mark.parametrize("lock", [WHOLE, *PARTS], ids=str)
def test_nothing_brings_opentelemetry(lock):
    assert not [name for name in pins(lock) if name.startswith("opentelemetry")]


@pytest.mark.parametrize("part", ["operator", "trainer_image"])
def test_the_oldest_packages_that_are_tried_are_the_oldest_that_are_taken(part: str):
    tried = dict(pin.split("==") for pin in pins(OLDEST))
    project = tomllib.loads((Path(part) / "pyproject.toml").read_text())["project"]
    asked = [Requirement(each) for each in project["dependencies"]]
    taken = {each.name: spec.version for each in asked for spec in each.specifier if spec.operator == ">="}
    assert len(taken) == len(asked)
    assert {name: Version(tried[name]) for name in taken} == {
        name: Version(oldest) for name, oldest in taken.items()
    }


def imports(module: Path) -> set[str]:
    """Return the packages that a module imports as soon as it is imported."""
    found = set[str]()
    for statement in ast.parse(module.read_text()).body:
        if isinstance(statement, ast.Import):
            found |= {each.name.partition(".")[0] for each in statement.names}
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None:
            found.add(statement.module.partition(".")[0])
    return found


def test_tests_with_the_oldest_packages_import_no_others():
    (listed,) = re.findall(r"^OLDEST := ((?:.*\\\n)*.*)$", Path("Makefile").read_text(), re.MULTILINE)
    words = listed.replace("\\\n", " ").split()
    ignored = [word.partition("=")[2] for word in words if word.startswith("--ignore")]
    pinned = {pin.partition("==")[0] for pin in pins(OLDEST)} | {"fleet-operator", "fleet-trainer"}
    others = {
        package
        for package, names in packages_distributions().items()
        if pinned.isdisjoint(map(canonicalize_name, names))
    }
    assert "tensorboard" in others
    tested = [path for word in words if word.startswith("tests/") for path in Path(word).rglob("test_*.py")]
    assert len(tested) > 100
    for path in tested:
        if not any(path.is_relative_to(each) or path.match(each) for each in ignored):
            assert imports(path) & others == set(), f"{path}: leave it out in the Makefile's OLDEST"
