"""FleetJob manifests for tests: two basic ones, with functions to change any field."""

from __future__ import annotations

import copy
from typing import Any

from fleet_operator.api import FleetJob, parse_job

__all__ = ["Manifest", "at", "collective_manifest", "job", "manifest", "template"]

Manifest = dict[str, Any]


def template(**spec: Any) -> Manifest:
    container = {"name": "fleet", "image": "example.com/trainer:1", "command": ["python", "train.py"]}
    return {"spec": {"containers": [container], **spec}}


def manifest(name: str = "digits", pservers: int = 2, trainers: int = 2, **spec: Any) -> Manifest:
    """Return the manifest of a parameter-server job; keyword arguments set fields of its spec."""
    return {
        "apiVersion": "fleetjob.dev/v1alpha1",
        "kind": "FleetJob",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "mode": "ParameterServer",
            "template": template(),
            "pserver": {"replicas": pservers},
            "trainer": {"replicas": trainers},
            **spec,
        },
    }


def collective_manifest(name: str = "digits", trainers: int = 2, **spec: Any) -> Manifest:
    """Return the manifest of a collective job."""
    document = manifest(name, trainers=trainers, **{"mode": "Collective", **spec})
    del document["spec"]["pserver"]
    return document


def job(document: Manifest | None = None, **metadata: Any) -> FleetJob:
    """Return a parsed job that has a uid, as from an API server."""
    document = copy.deepcopy(document or manifest())
    document["metadata"] |= {"uid": "11111111-1111-4111-8111-111111111111", **metadata}
    return parse_job(document)


def at(path: str, value: Any, base: Manifest | None = None) -> Manifest:
    """Return a copy of a manifest with one field set, or removed if the value is `...`."""
    document = copy.deepcopy(base or manifest())
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    at: Any = document
    for part in parents:
        at = at.setdefault(part, {}) if isinstance(part, str) else at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value
    return document
