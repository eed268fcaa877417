"""Pure functions that build the manifests of a job's pods, Service and other objects."""

from fleet_operator.build.commands import one_machine_sentence, script_of, unlaunched_sentence
from fleet_operator.build.env import Peers, Start, overwritten_sentence, role_env
from fleet_operator.build.extras import Extra, build_extras
from fleet_operator.build.pod import PodBuilder, build_pod
from fleet_operator.build.ports import ReplicaPorts, assigned_ports, port_blocks, replica_ports
from fleet_operator.build.service import ClusterHosts, Hosts, build_service

__all__ = [
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
