"""The headless Service that gives each replica its name."""

import pytest

from fleet_operator.build import build_service
from tests.support import jobs


def test_a_whole_service():
    assert build_service(jobs.job()) == {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": "digits",
            "namespace": "default",
            "labels": {"fleetjob.dev/job-name": "digits", "app.kubernetes.io/managed-by": "fleet-operator"},
            "ownerReferences": [
                {
                    "apiVersion": "fleetjob.dev/v1alpha1",
                    "kind": "FleetJob",
                    "name": "digits",
                    "uid": "11111111-1111-4111-8111-111111111111",
                    "controller": True,
                    "blockOwnerDeletion": True,
                }
            ],
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"fleetjob.dev/job-name": "digits"},
            "ports": [
                {"name": "pserver", "port": 6174, "targetPort": 6174, "protocol": "TCP"},
                {"name": "metrics", "port": 6180, "targetPort": 6180, "protocol": "TCP"},
            ],
        },
    }


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        pytest.param(jobs.manifest(pserver={"port": 7000}), ("pserver", 7000), id="servers-listen"),
        pytest.param(
            jobs.collective_manifest(trainer={"port": 7001}), ("trainer", 7001), id="trainers-listen"
        ),
    ],
)
def test_the_port_is_that_of_the_role_that_listens(document, expected):
    port = build_service(jobs.job(document))["spec"]["ports"][0]
    assert (port["name"], port["port"]) == expected
