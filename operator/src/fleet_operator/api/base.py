"""What every part of a manifest is made of: frozen models, camelCase outside, and bounded values."""

# No `from __future__ import annotations` here: pydantic reads the annotations when the class is made.
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StringConstraints
from pydantic.alias_generators import to_camel

__all__ = [
    "MAX_PORT",
    "MAX_REPLICAS",
    "MAX_SECONDS",
    "LabelValue",
    "Model",
    "NonEmpty",
    "OpenModel",
    "Port",
    "Quantity",
    "Replicas",
    "Seconds",
]

# Every replica's environment lists all replicas, and Linux takes at most 128 KiB in one variable. The longest
# names make 184 characters per entry: 700 entries always fit.
MAX_REPLICAS = 700
MAX_PORT = 65535
MAX_SECONDS = 2**31 - 1

Replicas = Annotated[StrictInt, Field(ge=1, le=MAX_REPLICAS)]
Port = Annotated[StrictInt, Field(ge=1024, le=MAX_PORT)]
Seconds = Annotated[StrictInt, Field(ge=0, le=MAX_SECONDS)]
NonEmpty = Annotated[str, StringConstraints(min_length=1)]
Quantity = str | StrictInt | Annotated[StrictFloat, Field(allow_inf_nan=False)]
"""An amount of something, such as 500m or 0.5: the API server reads numbers as their text."""
LabelValue = Annotated[str, StringConstraints(max_length=63)]


class Model(BaseModel):
    """A part of the manifest: frozen, camelCase outside, and no field that is not known."""

    model_config = ConfigDict(alias_generator=to_camel, extra="forbid", frozen=True)


class OpenModel(Model):
    """A part of a pod's template: what is not typed here is kept as it is, for the API server to judge."""

    model_config = ConfigDict(extra="allow")

    def to_manifest(self) -> dict[str, Any]:
        """Return what was written, as new dictionaries and lists; nothing is added."""
        return self.model_dump(mode="json", by_alias=True, exclude_unset=True)
