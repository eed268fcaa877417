"""The kinds of objects that a job may have beside its pods and its Service, and what switches each on.

The operator may neither see nor make them unless the chart gives it the right to: `Settings.features` names
those for which it has.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["FEATURES", "Resource"]


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
