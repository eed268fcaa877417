"""The base classes of a manifest's types: immutable models with camelCase names in JSON."""

# No `from __future__ import annotations` here: pydantic reads the annotations when the class is made.
from datetime import UTC, datetime
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictFloat,
    StrictInt,
    StringConstraints,
)
from pydantic.alias_generators import to_camel

__all__ = [
    "MAX_LISTED",
    "MAX_PORT",
    "MAX_SECONDS",
    "PATTERNS",
    "RESOURCE_NAME",
    "Annotations",
    "Labels",
    "Model",
    "NonEmpty",
    "ObjectName",
    "OpenModel",
    "Pods",
    "Port",
    "Quantity",
    "ResourceName",
    "Seconds",
    "Servers",
    "StatusModel",
    "Timestamp",
    "Trainers",
]

# Every replica's environment lists all servers, and Linux limits a variable to 128 KiB. The longest
# names make 184 characters per entry: 700 entries always fit.
MAX_LISTED = 700
MAX_TRAINERS = 1000
MAX_PORT = 65535
MAX_SECONDS = 2**31 - 1

Servers = Annotated[StrictInt, Field(ge=1, le=MAX_LISTED)]
Trainers = Annotated[StrictInt, Field(ge=1, le=MAX_TRAINERS)]
Pods = Annotated[StrictInt, Field(ge=1, le=MAX_LISTED + MAX_TRAINERS)]
Port = Annotated[StrictInt, Field(ge=1024, le=MAX_PORT)]
Seconds = Annotated[StrictInt, Field(ge=0, le=MAX_SECONDS)]
NonEmpty = Annotated[str, StringConstraints(min_length=1)]
Quantity = str | StrictInt | Annotated[StrictFloat, Field(allow_inf_nan=False)]
"""A Kubernetes quantity: a string such as 500m, or a number such as 0.5."""

# Kubernetes' patterns for resource names, labels and annotations. The API server does not check them in a
# stored template, only when a pod is created.
MAX_ENTRIES = 128
_DOMAIN = "[a-z0-9]([-a-z0-9]*[a-z0-9])?([.][a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_NAME = "[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_LABEL_KEY = f"^({_DOMAIN}/)?{_NAME}$"
_LABEL_VALUE = "^([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?$"
_ANNOTATION_KEY = f"^({_DOMAIN.replace('a-z', 'A-Za-z')}/)?{_NAME}$"
OBJECT_NAME = f"^{_DOMAIN}$"
RESOURCE_NAME = f"^(cpu|memory|ephemeral-storage|hugepages-[A-Za-z0-9]+|{_DOMAIN}/{_NAME})$"
_KEY = "letters, digits, '-', '_' and '.', up to 63 of them, after DOMAIN/ or nothing"
PATTERNS = {
    _LABEL_KEY: f"names of labels: {_KEY}",
    _LABEL_VALUE: "letters, digits, '-', '_' and '.', with a letter or a digit first and last, or nothing",
    _ANNOTATION_KEY: f"names of annotations: {_KEY}",
    OBJECT_NAME: "lower case letters, digits, '-' and '.', with a letter or a digit first and last",
    RESOURCE_NAME: "names of resources: cpu, memory, ephemeral-storage, hugepages-SIZE or DOMAIN/NAME",
}
"""Maps each pattern to a description of the values that match it."""

LabelKey = Annotated[str, StringConstraints(pattern=_LABEL_KEY)]
LabelValue = Annotated[str, StringConstraints(max_length=63, pattern=_LABEL_VALUE)]
Labels = Annotated[dict[LabelKey, LabelValue], Field(max_length=MAX_ENTRIES)]
AnnotationKey = Annotated[str, StringConstraints(pattern=_ANNOTATION_KEY)]
Annotations = Annotated[dict[AnnotationKey, str], Field(max_length=MAX_ENTRIES)]
ObjectName = Annotated[str, StringConstraints(max_length=253, pattern=OBJECT_NAME)]
ResourceName = Annotated[str, StringConstraints(pattern=RESOURCE_NAME)]


class Model(BaseModel):
    """The base class of manifest types: immutable, camelCase in JSON, and without unknown fields."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True)


class OpenModel(Model):
    """The base class of pod template types; the API server validates the fields not declared here."""

    model_config = ConfigDict(extra="allow")

    def to_manifest(self) -> dict[str, Any]:
        """Return the fields that were set, without defaults, as a new manifest."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)


def _timestamp(moment: datetime) -> str:
    return moment.astimezone(UTC).replace(microsecond=0).strftime("%Y-%m-%dT%H:%M:%SZ")


Timestamp = Annotated[datetime, PlainSerializer(_timestamp, return_type=str)]


class StatusModel(BaseModel):
    """The base class of status types: immutable; keeps fields that a newer operator wrote."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="allow", frozen=True)

    @property
    def extras(self) -> dict[str, Any]:
        """The fields that this version of the operator does not know; it writes them back unchanged."""
        return dict(self.model_extra or {})
