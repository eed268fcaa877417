"""The parts of a manifest that concern scheduling and networking."""

# No `from __future__ import annotations` here: pydantic reads the annotations when the class is made.
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StringConstraints

from fleet_operator.api.base import Labels, Model, ObjectName, Pods, Port, ResourceName

__all__ = ["Gang", "Network", "NodePool", "PortRange", "Scheduling", "Tls"]

ClassName = Annotated[str, StringConstraints(min_length=1, max_length=253)]


class NodePool(Model):
    """The nodes on which the pods run, and the devices of the trainers."""

    node_selector: Labels = Field(default={}, description="Added to all pods.")
    tolerations: tuple[dict[str, Any], ...] = Field(default=(), description="Added to all pods.")
    resource_name: ResourceName = Field(default="nvidia.com/gpu", description="What gpusPerTrainer counts.")
    gpus_per_trainer: Annotated[StrictInt, Field(ge=0, le=64)] = Field(
        default=0, description="Devices for the main container of each trainer."
    )
    shared_memory: Annotated[str, StringConstraints(pattern="^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$")] | None = Field(
        default=None,
        description="Size of /dev/shm in the trainers, for example 2Gi; it counts as memory of the pod."
        " Default: with devices or several slots as much as the pod may take, else the container runtime's"
        " 64 MiB, as with 0.",
    )


class Gang(StrEnum):
    """The gang scheduler that places the pods of a job together."""

    NONE = "None"
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"
    KUEUE = "Kueue"


class Scheduling(Model):
    """How pods are scheduled."""

    gang: Gang = Field(
        default=Gang.NONE,
        description="Volcano and Coscheduling: a PodGroup places the pods together. Kueue: a queue admits"
        " them together, and every restart is one of the whole job. All pods are then created at once,"
        " whatever startupPolicy says.",
    )
    queue: Annotated[str, StringConstraints(min_length=1, max_length=63)] | None = Field(
        default=None, description="The queue of Volcano or Kueue."
    )
    min_available: Pods | None = Field(
        default=None,
        description="How many pods must find a place together. Default: all.",
    )
    priority_class_name: ClassName | None = Field(
        default=None, description="The priority class of all pods whose template names none."
    )


class PortRange(Model):
    """Ports of a node, both ends included."""

    first: Port = Field(description="The first port.")
    last: Port = Field(description="The last port.")


class Tls(Model):
    """The certificates with which replicas encrypt their traffic and authenticate each other."""

    secret_name: ObjectName = Field(
        description="A Secret of the job's namespace, as cert-manager makes one. It has tls.crt, tls.key and"
        " ca.crt. Pods wait for it; the operator itself cannot read it."
    )
    server_name: ObjectName | None = Field(
        default=None,
        description="The name that the certificate of every parameter server has. Default: each has that of"
        " its host, NAME-pserver-INDEX.NAME.NAMESPACE.svc.",
    )


class Network(Model):
    """How the pods are reached."""

    host_network: StrictBool = Field(
        default=False, description="The pods share their node's network. Needs portRange."
    )
    port_range: PortRange | None = Field(
        default=None,
        description="With hostNetwork: each replica gets ports of its own out of it, so that two on one node"
        " do not clash.",
    )
    policy: StrictBool | None = Field(
        default=None,
        description="A NetworkPolicy admits only the job's own pods, and to the metrics port also the"
        " operator's namespace and whom its chart names. Unset: where the operator makes them, as its chart"
        " lets it unless told otherwise, and not with hostNetwork.",
    )
    tls: Tls | None = Field(
        default=None,
        description="Mutual TLS between the replicas, mode ParameterServer only.",
    )
