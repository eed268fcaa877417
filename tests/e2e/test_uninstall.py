"""What `helm uninstall` leaves: nothing. Near the end by name, because the operator is gone after it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tests.support.e2e.release import GONE_SECONDS

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
    end = time.monotonic() + GONE_SECONDS  # the controllers delete the endpoints of Services a moment later
    while left := ours():
        assert time.monotonic() < end, left
        time.sleep(1)
