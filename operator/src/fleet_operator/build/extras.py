"""What a job may have beside its pods and its Service, each only if it asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleet_operator.build.checkpoint import build_claims
from fleet_operator.build.disruption_budget import build_disruption_budget
from fleet_operator.build.gang import build_pod_group
from fleet_operator.build.network_policy import build_network_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """

    field: str
    manifest: Mapping[str, Any]
    while_held: bool = False
    after_end: bool = False


def build_extras(job: FleetJob, life: int) -> tuple[Extra, ...]:
    """Return what one life of a job needs to be there before its pods."""
    found = [
        Extra("spec.checkpoint.volumeClaimTemplate", claim, while_held=True, after_end=True)
        for claim in build_claims(job)
    ]
    if (policy := build_network_policy(job)) is not None:
        found.append(Extra("spec.network.policy", policy, while_held=True, after_end=True))
    if (budget := build_disruption_budget(job)) is not None:
        found.append(Extra("spec.pserver.podDisruptionBudget", budget))
    if (group := build_pod_group(job, life)) is not None:
        found.append(Extra("spec.scheduling.gang", group))
    return tuple(found)
