"""What a job may have beside its pods and its Service: what it asks for, and its NetworkPolicy."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from fleet_operator.api.names import ANNOTATION_MADE_FROM
from fleet_operator.build.checkpoint import build_claims
from fleet_operator.build.disruption_budget import build_disruption_budget
from fleet_operator.build.gang import build_pod_group
from fleet_operator.build.network_policy import (
    asks_for_network_policy,
    build_network_policy,
    wants_network_policy,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleet_operator.api import FleetJob

__all__ = ["Extra", "build_extras"]


@dataclass(frozen=True, slots=True)
class Extra:
    """One object, and what of the job asks for it.

    Attributes
    ----------
    field : str
        The field of the manifest that asks for it.
    manifest : mapping
        The object.
    while_held : bool
        Whether it stays while no pod of the job is to run.
    after_end : bool
        Whether it stays when the job has finished.
    by_default : bool
        Whether the job does not ask for it, and does without it where the operator cannot make it.
    """

    field: str
    manifest: Mapping[str, Any]
    while_held: bool = False
    after_end: bool = False
    by_default: bool = False

    @property
    def made_from(self) -> str | None:
        """What tells the object from one that an older job or operator wanted; claims have nothing."""
        said: str | None = self.manifest["metadata"].get("annotations", {}).get(ANNOTATION_MADE_FROM)
        return said


def build_extras(
    job: FleetJob, life: int, *, readers: Sequence[Mapping[str, Any]] = (), metrics_open: bool = False
) -> tuple[Extra, ...]:
    """Return what one life of a job needs to be there before its pods.

    Parameters
    ----------
    job : FleetJob
        The job.
    life : int
        How often all of its replicas were started anew.
    readers : sequence of mapping
        Who beside the job's own pods may read its metrics, as peers of a NetworkPolicy.
    metrics_open : bool
        Whether everybody may, where the job does not ask for a NetworkPolicy.
    """
    found = [
        Extra("spec.checkpoint.volumeClaimTemplate", claim, while_held=True, after_end=True)
        for claim in build_claims(job)
    ]
    if wants_network_policy(job):
        asked = asks_for_network_policy(job)
        policy = _signed(build_network_policy(job, readers if asked or not metrics_open else None))
        found.append(
            Extra("spec.network.policy", policy, while_held=True, after_end=True, by_default=not asked)
        )
    if (budget := build_disruption_budget(job)) is not None:
        found.append(Extra("spec.pserver.podDisruptionBudget", _signed(budget)))
    if (group := build_pod_group(job, life)) is not None:
        found.append(Extra("spec.scheduling.gang", _signed(group)))
    return tuple(found)


def _signed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Note in an object what it is made from.

    The objects themselves would not tell: an API server adds defaults to them, webhooks change them, and
    people do.
    """
    digest = sha256(json.dumps(manifest["spec"], sort_keys=True).encode()).hexdigest()[:16]
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_MADE_FROM: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}
