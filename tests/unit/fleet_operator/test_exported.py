"""What other layers may rely on."""

import inspect

import pytest

import fleet_operator.api
import fleet_operator.build
import fleet_operator.client
import fleet_operator.errors
import fleet_operator.plan
from fleet_operator.client import AsyncFleetJobClient, FleetJobClient


def test_the_public_surface():
    assert {"FleetJob", "FleetJobStatus", "Role", "parse_job"} <= set(fleet_operator.api.__all__)
    assert fleet_operator.build.__all__ == [
        "ClusterHosts",
        "Extra",
        "Hosts",
        "Peers",
        "PodBuilder",
        "ReplicaPorts",
        "Start",
        "assigned_ports",
        "build_extras",
        "build_pod",
        "build_service",
        "one_machine_sentence",
        "overwritten_sentence",
        "port_blocks",
        "replica_ports",
        "role_env",
        "script_of",
        "unlaunched_sentence",
    ]
    assert fleet_operator.client.__all__ == [
        "AsyncFleetJobClient",
        "ClusterRefusal",
        "FleetJobClient",
        "JobFailedError",
        "JobNotFoundError",
        "LogLine",
        "NotInTimeError",
    ]
    assert fleet_operator.plan.__all__ == ["plan"]
    assert fleet_operator.errors.__all__ == ["InvalidJob", "OperatorError", "Problem"]


def test_all_that_is_exported_is_there():
    modules = (
        fleet_operator.api,
        fleet_operator.build,
        fleet_operator.client,
        fleet_operator.errors,
        fleet_operator.plan,
    )
    for module in modules:
        assert all(hasattr(module, name) for name in module.__all__)


@pytest.mark.parametrize(
    "name", [name for name in vars(AsyncFleetJobClient) if not name.startswith("_") and name != "namespace"]
)
def test_both_clients_have_the_same_methods_with_the_same_parameters(name: str):
    both = (inspect.signature(getattr(client, name)) for client in (AsyncFleetJobClient, FleetJobClient))
    one, other = (list(signature.parameters.values()) for signature in both)
    assert one == other
