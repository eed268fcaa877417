"""Generates the list of fields that a pod template may have (``make pod-fields``).

The fields come from the OpenAPI document of an API server of the pinned version, which the tool starts. The
result is ``fleet_operator/manifests/pod_fields.json``, with which ``fleetjob validate`` finds misspelled
fields without a cluster. A test compares the file with the document of such an API server.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.controlplane import ControlPlane

if TYPE_CHECKING:
    from collections.abc import Mapping

FILE = Path(__file__).parent.parent / "operator/src/fleet_operator/manifests/pod_fields.json"
DOCUMENT = "/openapi/v3/api/v1"
ROOTS = ("PodSpec", "PersistentVolumeClaimSpec", "Toleration")
"""The Kubernetes types that a FleetJob contains."""

SCALARS = ("string", "integer", "number", "boolean")


def render(version: str, openapi: Mapping[str, Any]) -> str:
    """Return the content of the generated file.

    Parameters
    ----------
    version : str
        The version of the API server, such as v1.34.4.
    openapi : mapping
        The API server's response to a request for `DOCUMENT`.

    Returns
    -------
    str
        JSON. ``types`` contains the kind of each field of each type: a scalar, the name of another type,
        ``any``, or one of these in ``[…]`` for a list and in ``{…}`` for a map with arbitrary keys.
    """
    schemas: Mapping[str, Any] = openapi["components"]["schemas"]
    full = {_short(name): name for name in schemas}
    types: dict[str, dict[str, str]] = {}
    waiting = list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name in types:
            continue
        properties = schemas[full[name]].get("properties", {})
        types[name] = {field: _kind(node, schemas) for field, node in sorted(properties.items())}
        kinds = (kind.strip("[]{}") for kind in types[name].values())
        waiting += [kind for kind in kinds if kind not in (*SCALARS, "any")]
    lines = ",\n".join(
        f"  {json.dumps(name)}: {json.dumps(types[name], separators=(',', ':'))}" for name in sorted(types)
    )
    return f'{{"kubernetes": {json.dumps(version)}, "types": {{\n{lines}\n}}}}\n'


def _kind(node: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    if "allOf" in node:
        (node,) = node["allOf"]
    if "$ref" in node:
        name = node["$ref"].rpartition("/")[2]
        target = schemas[name]
        return _short(name) if "properties" in target else _kind(target, schemas)
    if "oneOf" in node or "type" not in node:
        return "any"  # a quantity, or a port by number or name
    if node["type"] == "array":
        return f"[{_kind(node['items'], schemas)}]"
    if node["type"] == "object":
        values = node.get("additionalProperties")
        return f"{{{_kind(values, schemas)}}}" if values else "any"
    return str(node["type"])


def _short(name: str) -> str:
    return name.rpartition(".")[2]


def main() -> int:
    """Start an API server and write the generated file."""
    with tempfile.TemporaryDirectory(prefix="pod-fields-") as folder:
        plane = ControlPlane(Path(folder) / "plane", nodes=0)
        plane.start()
        try:
            version, openapi = plane.admin.request("GET", "/version"), plane.admin.request("GET", DOCUMENT)
        finally:
            plane.stop()
    FILE.write_text(render(version["gitVersion"], openapi))
    return 0


if __name__ == "__main__":
    sys.exit(main())
