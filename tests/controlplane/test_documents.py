"""The manifests in README.md and docs/, created on a real API server."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support.documents import PAGES, Block, blocks
from tests.support.jobs import manifest

if TYPE_CHECKING:
    from tests.support.controlplane import ControlPlane

SHOWN = [each for page in PAGES for each in blocks(page) if each.language == "yaml"]
ELSEWHERE = ("cert-manager.io/",)
"""Kinds of other projects, which this API server does not know."""


def whole(shown: dict[str, Any]) -> dict[str, Any]:
    """Return a complete manifest for a fragment: a FleetJob that contains the fragment."""
    if "kind" in shown:
        return shown
    if "env" in shown:
        template = manifest()["spec"]["template"]
        template["spec"]["containers"][0] |= shown
        shown = {"template": template}
    spec = shown.get("spec", shown)
    job = manifest()
    [container] = job["spec"]["template"]["spec"]["containers"]
    for part in (spec, *(spec[role] for role in ("pserver", "trainer") if role in spec)):
        pods = part.get("template", {}).get("spec")
        if pods is not None:  # a piece shows of a container only what it adds
            pods["containers"] = [container | each for each in pods.get("containers", [{}])]
    for role in ("pserver", "trainer"):
        if role in spec:
            spec[role] = job["spec"][role] | spec[role]
    job["spec"] |= spec
    return job


def name(shown: Block) -> str:
    return f"{shown.page}: {shown.section}"


@pytest.mark.parametrize("shown", SHOWN, ids=name)
def test_the_api_server_takes_every_manifest_of_the_pages(control_plane: ControlPlane, shown: Block):
    for document in yaml.safe_load_all(shown.code):
        if document.get("apiVersion", "").startswith(ELSEWHERE):
            continue
        created = control_plane.admin.kubectl(
            *("create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-"),
            stdin=json.dumps(whole(document)),
        )
        assert json.loads(created)["metadata"]["name"]
