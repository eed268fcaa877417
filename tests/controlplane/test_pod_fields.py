"""`fleetjob validate` knows the same fields of pods as the API server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tools import pod_fields

if TYPE_CHECKING:
    from tests.support.controlplane import ControlPlane


def test_the_committed_fields_are_those_of_the_pinned_api_server(control_plane: ControlPlane):
    version, openapi = (
        control_plane.admin.request("GET", path) for path in ("/version", pod_fields.DOCUMENT)
    )
    assert pod_fields.FILE.read_text() == pod_fields.render(version["gitVersion"], openapi), (
        "pod_fields.json is out of date: make pod-fields"
    )
