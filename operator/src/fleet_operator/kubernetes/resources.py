"""The kinds of objects that a job has, where the API server has them, and what switches each on.

Every job has pods and a Service. What else a job may have, the operator may neither see nor make unless the
chart gives it the right to: `Settings.features` names those for which it has.
"""

from __future__ import annotations

from typing import NamedTuple

from fleet_operator.api.names import API_VERSION, PLURAL

__all__ = ["FEATURES", "KINDS", "PODS", "RESOURCES", "SERVICES", "Resource", "collection"]

PODS, SERVICES = "pods", "services"


class Resource(NamedTuple):
    """One kind of object of the API server."""

    api_version: str
    kind: str
    plural: str

    @property
    def key(self) -> str:
        """What it is called where a plural alone would be ambiguous, as kubectl does."""
        group = self.api_version.rpartition("/")[0]
        return f"{self.plural}.{group}" if group else self.plural

    @property
    def base(self) -> str:
        """The path of its API."""
        return f"/apis/{self.api_version}" if "/" in self.api_version else f"/api/{self.api_version}"


FEATURES = {
    "checkpointClaims": Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims"),
    "networkPolicies": Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    "podDisruptionBudgets": Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
    "volcano": Resource("scheduling.volcano.sh/v1beta1", "PodGroup", "podgroups"),
    "coscheduling": Resource("scheduling.x-k8s.io/v1alpha1", "PodGroup", "podgroups"),
}
"""By the name of the chart's value that switches it on."""


RESOURCES = {each.key: each for each in FEATURES.values()}
KINDS = {PODS: "Pod", SERVICES: "Service"} | {key: each.kind for key, each in RESOURCES.items()}
"""By what a kind of object is called here: a plural, or the key of a `Resource`."""


def collection(resource: str, namespace: str | None) -> str:
    """Return the path of a collection, of one namespace or of all of them.

    `resource` is ``fleetjobs`` or one of `KINDS`; every other plural is taken to be of the core API.
    """
    if (known := RESOURCES.get(resource)) is not None:
        base, plural = known.base, known.plural
    else:
        base, plural = f"/apis/{API_VERSION}" if resource == PLURAL else "/api/v1", resource
    return f"{base}/{plural}" if namespace is None else f"{base}/namespaces/{namespace}/{plural}"
