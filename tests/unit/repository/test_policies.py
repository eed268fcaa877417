"""The table of what jobs do has every policy that a FleetJob can ask for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support.behaviours import BEHAVIOURS
from tests.support.cluster_only import CLUSTER_ONLY

if TYPE_CHECKING:
    from collections.abc import Iterator

CRD = Path("crds/fleetjobs.fleetjob.dev.yaml")

# What says which job this is, and not what is to become of it.
THE_JOB = {"mode", "template", "syncMode", "pserver.replicas", "pserver.port", "pserver.template"}
THE_JOB |= {"trainer.replicas", "trainer.port", "trainer.template", "trainer.nprocPerNode"}


def asked(spec: Any, path: str = "") -> Iterator[str]:
    """Yield each field of a spec by its path, and each word that it chooses as ``path=word``."""
    if isinstance(spec, dict):
        for name, value in spec.items():
            below = f"{path}.{name}" if path else name
            yield below
            yield from asked(value, below)
    elif isinstance(spec, list):
        for each in spec:
            yield from asked(each, f"{path}[]")
    elif isinstance(spec, str):
        yield f"{path}={spec}"


def policies(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield each policy that the definition knows: fields down to the second level, and the words of each."""
    for name, each in schema.get("properties", {}).items():
        below = f"{path}.{name}" if path else name
        if below in THE_JOB:
            continue
        if each.get("type") == "object" and "properties" in each and not path:
            yield from policies(each, below)
        elif "enum" in each:
            yield from (f"{below}={word}" for word in each["enum"])
        elif each.get("type") == "array":
            yield below
            yield from policies(each.get("items", {}), f"{below}[]")
        else:
            yield below


def known() -> list[str]:
    [version] = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    return list(policies(version["schema"]["openAPIV3Schema"]["properties"]["spec"]))


SHOWN = {path for case in (*BEHAVIOURS, *CLUSTER_ONLY) for path in asked(case.spec)}


@pytest.mark.parametrize("policy", known())
def test_both_clusters_are_held_to_it(policy: str):
    assert policy in SHOWN, "add a case to tests/support/behaviours.py or cluster_only.py"


def test_the_policies_are_those_of_the_definition():
    assert {
        "successPolicy.type=Any",
        "runPolicy.cleanPodPolicy=None",
        "failurePolicy.rules[].onReasons",
    } <= set(known())
    assert {"suspend", "podGroupPolicy.kueue", "checkpoint.claimName"} <= set(known())


@pytest.mark.parametrize("fields", ["imagePullSecrets", "serviceAccountName"])
def test_both_clusters_are_held_to_what_a_template_says(fields: str):
    assert any(fields in case.pod for case in CLUSTER_ONLY)


def test_both_clusters_are_held_to_sidecars():
    assert any(case.sidecar is not None for case in CLUSTER_ONLY)
