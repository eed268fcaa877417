"""Pure: builds the manifests of a job's pods, Service and other objects."""

from fleet_operator.build.commands import one_machine_sentence, script_of, unlaunched_sentence
from fleet_operator.build.env import Start, overwritten_sentence, role_env
from fleet_operator.build.extras import Extra, build_extras
from fleet_operator.build.pod import build_pod
from fleet_operator.build.ports import ReplicaPorts, replica_ports, told_ports
from fleet_operator.build.service import ClusterHosts, Hosts, build_service

__all__ = [
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
