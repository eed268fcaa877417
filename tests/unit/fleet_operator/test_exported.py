"""What other layers may rely on."""

import fleet_operator.api
import fleet_operator.build
import fleet_operator.errors
import fleet_operator.plan


def test_the_public_surface():
    assert {"FleetJob", "FleetJobStatus", "Role", "parse_job"} <= set(fleet_operator.api.__all__)
    assert fleet_operator.build.__all__ == [
        "ClusterHosts",
        "Extra",
        "Hosts",
        "ReplicaPorts",
        "Start",
        "build_extras",
        "build_pod",
        "build_service",
        "one_machine_sentence",
        "overwritten_sentence",
        "replica_ports",
        "role_env",
        "script_of",
        "told_ports",
        "unlaunched_sentence",
    ]
    assert fleet_operator.plan.__all__ == ["plan"]
    assert fleet_operator.errors.__all__ == ["InvalidJob", "OperatorError", "Problem"]


def test_all_that_is_exported_is_there():
    for module in (fleet_operator.api, fleet_operator.build, fleet_operator.errors, fleet_operator.plan):
        assert all(hasattr(module, name) for name in module.__all__)
