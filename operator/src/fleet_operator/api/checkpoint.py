"""What a person says about the volume that outlives the pods."""

# No `from __future__ import annotations` here: pydantic reads the annotations when the class is made.
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from fleet_operator.api.base import Annotations, Labels, Model, OpenModel

__all__ = ["Checkpoint", "CheckpointScope", "Retention", "VolumeClaimTemplate"]


class CheckpointScope(StrEnum):
    """Who shares a volume."""

    JOB = "Job"
    PSERVER = "Pserver"


class Retention(StrEnum):
    """What becomes of a claim when its job is deleted."""

    RETAIN = "Retain"
    DELETE = "Delete"


class ClaimMetadata(Model):
    """What a template adds to the metadata of its claims."""

    labels: Labels | None = Field(default=None, description="Beside the operator's own.")
    annotations: Annotations | None = Field(default=None, description="As they are written.")


class ClaimSpec(OpenModel):
    """The spec of a PersistentVolumeClaim."""

    storage_class_name: str | None = Field(default=None, description="The cluster's default if absent.")


class VolumeClaimTemplate(Model):
    """A template for PersistentVolumeClaims."""

    metadata: ClaimMetadata | None = Field(default=None, description="Labels and annotations of the claims.")
    spec: ClaimSpec = Field(description="The spec of a PersistentVolumeClaim, as Kubernetes knows it.")


class Checkpoint(Model):
    """A volume that outlives the pods."""

    mount_path: Annotated[str, StringConstraints(pattern="^/[^:]+$", max_length=255)] = Field(
        default="/checkpoint", description="Where it is mounted; also FLEET_CHECKPOINT_DIR."
    )
    claim_name: Annotated[str, StringConstraints(min_length=1, max_length=253)] | None = Field(
        default=None, description="A PersistentVolumeClaim that is there already, for all pods of the job."
    )
    volume_claim_template: VolumeClaimTemplate | None = Field(
        default=None, description="Makes claims for the job, named after it."
    )
    scope: CheckpointScope | None = Field(
        default=None,
        description="Job: one claim, mounted by all pods. Pserver: one for each parameter server, mounted by"
        " it alone. Default: Pserver with a volumeClaimTemplate in mode ParameterServer, else Job.",
    )
    retention: Retention = Field(
        default=Retention.RETAIN,
        description="Whether claims made from the template outlive the job. A later job of the same name then"
        " finds them.",
    )
