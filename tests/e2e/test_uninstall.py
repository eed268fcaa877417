"""What `helm uninstall` leaves: nothing. The last file by name, because the operator is gone after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.e2e.kubectl import Kubectl
    from tests.support.e2e.release import Release

CLUSTER_WIDE = ("customresourcedefinitions", "clusterroles", "clusterrolebindings")


def test_uninstalling_the_chart_leaves_nothing_behind(cluster: Kubectl, operator: Release):
    def ours() -> set[str]:
        return {name for kind in CLUSTER_WIDE for name in cluster.names(kind) if "fleet" in name} | {
            name for name in cluster.within(operator.namespace).inventory() if operator.name in name
        }

    assert {"customresourcedefinitions/fleetjobs.fleetjob.dev"} < ours()
    operator.uninstall()
    assert ours() == set()
