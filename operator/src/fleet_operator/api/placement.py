"""What a person says about where pods run and how they are reached."""

# No `from __future__ import annotations` here: pydantic reads the annotations when the class is made.
from typing import Annotated, Any

from pydantic import Field, StrictBool, StrictInt, StringConstraints

from fleet_operator.api.base import LabelValue, Model, NonEmpty, Port

__all__ = ["Network", "NodePool", "PortRange", "Scheduling"]

ObjectName = Annotated[str, StringConstraints(min_length=1, max_length=253)]


class NodePool(Model):
    """Where the pods run and what the trainers get of it."""

    node_selector: dict[str, LabelValue] = Field(default={}, description="Added to all pods.")
    tolerations: tuple[dict[str, Any], ...] = Field(default=(), description="Added to all pods.")
    resource_name: NonEmpty = Field(default="nvidia.com/gpu", description="What gpusPerTrainer counts.")
    gpus_per_trainer: Annotated[StrictInt, Field(ge=0, le=64)] = Field(
        default=0, description="Devices for the main container of each trainer."
    )
    shared_memory: Annotated[str, StringConstraints(pattern="^[0-9]+(Ki|Mi|Gi|Ti|k|M|G|T)?$")] | None = Field(
        default=None, description="Size of /dev/shm in the trainers, for example 2Gi."
    )


class Scheduling(Model):
    """How pods are scheduled."""

    priority_class_name: ObjectName | None = Field(
        default=None, description="The priority class of all pods whose template names none."
    )


class PortRange(Model):
    """Ports of a node, both ends included."""

    first: Port = Field(description="The first port.")
    last: Port = Field(description="The last port.")


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
