"""What `helm uninstall` leaves: nothing. The last file by name, because the operator is gone after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.support.e2e.kubectl import Kubectl
    from tests.support.e2e.release import Release

CLUSTER_WIDE = "customresourcedefinitions,clusterroles,clusterrolebindings"
DEFINITION = "customresourcedefinition.apiextensions.k8s.io/fleetjobs.fleetjob.dev"


def test_uninstalling_the_chart_leaves_nothing_behind(cluster: Kubectl, operator: Release):
    def ours() -> set[str]:
        everywhere = {name for name in cluster.names(CLUSTER_WIDE) if "fleet" in name}
        return everywhere | cluster.within(operator.namespace).inventory()

    assert {DEFINITION, f"deployment.apps/{operator.deployment}"} < ours()
    operator.uninstall()
    assert ours() == set()
