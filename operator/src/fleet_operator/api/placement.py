"""The parts of a manifest that concern devices, scheduling and networking."""

# No `from __future__ import annotations` here: pydantic reads the annotations when the class is made.
from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StringConstraints

from fleet_operator.api.base import (
    MAX_SECONDS,
    Labels,
    Model,
    ObjectName,
    Pods,
    Port,
    ResourceName,
)

__all__ = [
    "CoschedulingPolicy",
    "Devices",
    "Gang",
    "KueuePolicy",
    "Network",
    "NetworkPolicy",
    "NetworkPolicyType",
    "PodGroupPolicy",
    "PortRange",
    "Scheduling",
    "Tls",
    "VolcanoPolicy",
]

ClassName = Annotated[str, StringConstraints(min_length=1, max_length=253)]
QueueName = Annotated[str, StringConstraints(min_length=1, max_length=63)]
_MIN_MEMBER = (
    "How many pods must be scheduled together. Default: all; with syncMode Async or HalfAsync and"
    " minReplicas, the servers and minReplicas trainers."
)


class Devices(Model):
    """The devices of a trainer."""

    count: Annotated[StrictInt, Field(ge=1, le=64)] = Field(
        description="Devices for the main container of each trainer."
    )
    resource_name: ResourceName = Field(
        default="nvidia.com/gpu", description="The name of the resource, as a device plugin registers it."
    )


class Scheduling(Model):
    """The nodes and the priority of all pods, which may change while the job is suspended."""

    node_selector: Labels = Field(default={}, description="Added to the pods' own.")
    tolerations: tuple[dict[str, Any], ...] = Field(default=(), description="Added to the pods' own.")
    priority_class_name: ClassName | None = Field(
        default=None, description="The priority class of all pods whose template does not set one."
    )


class Gang(StrEnum):
    """The gang scheduler that holds back a job's pods until all of them can run."""

    NONE = "None"
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"
    KUEUE = "Kueue"


class KueuePolicy(Model):
    """A Kueue queue, which admits all pods together. Every restart restarts the whole job."""

    queue_name: QueueName = Field(description="A LocalQueue in the job's namespace.")


class CoschedulingPolicy(Model):
    """A PodGroup of scheduler-plugins, whose scheduler places the pods together."""

    min_member: Pods | None = Field(default=None, description=_MIN_MEMBER)
    schedule_timeout_seconds: Annotated[StrictInt, Field(ge=1, le=MAX_SECONDS)] | None = Field(
        default=None,
        description="How long the scheduler reserves nodes for pods while others wait. Default: its own.",
    )


class VolcanoPolicy(Model):
    """A PodGroup of Volcano, whose scheduler places the pods together."""

    queue: QueueName | None = Field(default=None, description="A Queue of Volcano. Default: its default.")
    min_member: Pods | None = Field(default=None, description=_MIN_MEMBER)


class PodGroupPolicy(Model):
    """The system that schedules or admits a job's pods together; exactly one field is set.

    With this policy, all pods are created at once, and startupPolicy has no effect.
    """

    kueue: KueuePolicy | None = Field(
        default=None,
        description="A queue of Kueue admits all pods together. Every restart is a restart of the whole job.",
    )
    coscheduling: CoschedulingPolicy | None = Field(
        default=None, description="A PodGroup of scheduler-plugins schedules the pods together."
    )
    volcano: VolcanoPolicy | None = Field(
        default=None, description="A PodGroup of Volcano schedules the pods together."
    )

    @property
    def gang(self) -> Gang:
        """The gang scheduler that the policy selects."""
        if self.kueue is not None:
            return Gang.KUEUE
        return Gang.COSCHEDULING if self.coscheduling is not None else Gang.VOLCANO

    @property
    def min_member(self) -> int | None:
        """The number of pods that must be scheduled together, if set in the manifest."""
        policy = self.coscheduling or self.volcano
        return policy.min_member if policy is not None else None


class PortRange(Model):
    """An inclusive range of ports of a node."""

    first: Port = Field(description="The first port.")
    last: Port = Field(description="The last port.")


class Tls(Model):
    """The certificates with which replicas encrypt their traffic and authenticate their peers."""

    secret_name: ObjectName = Field(
        description="A Secret in the job's namespace, as cert-manager creates it, with tls.crt, tls.key and"
        " ca.crt. Pods wait for it; the operator itself cannot read it."
    )
    server_name: ObjectName | None = Field(
        default=None,
        description="The name in the certificate of every parameter server. Default: the name of the server's"
        " host, NAME-pserver-INDEX.NAME.NAMESPACE.svc.",
    )


class NetworkPolicyType(StrEnum):
    """Whether a NetworkPolicy isolates the job."""

    ISOLATED = "Isolated"
    NONE = "None"


class NetworkPolicy(Model):
    """The setting that isolates a job's pods."""

    type: NetworkPolicyType = Field(
        description="Isolated: a NetworkPolicy admits only the job's own pods; the metrics port also admits"
        " the operator's namespace and the readers named in its chart. None: the job has no NetworkPolicy."
    )


class Network(Model):
    """The network of the pods: addresses, ports, isolation and encryption."""

    host_network: StrictBool = Field(
        default=False, description="The pods share their node's network. Needs portRange."
    )
    port_range: PortRange | None = Field(
        default=None,
        description="With hostNetwork: each replica gets its own ports from this range, so that replicas on "
        "one node do not clash.",
    )
    policy: NetworkPolicy | None = Field(
        default=None,
        description="Whether a NetworkPolicy isolates the pods. Default: Isolated without hostNetwork, if the"
        " operator may create NetworkPolicies, which its chart enables by default.",
    )
    tls: Tls | None = Field(
        default=None,
        description="Mutual TLS between the replicas, mode ParameterServer only.",
    )
