"""What the API server holds, as a job: whatever version of the operator or of the definition let it in.

A definition may be newer than the operator, while one is upgraded or after it was taken back, and older: what
it accepted was no mistake of the job's author, and a job that has begun runs to its end. So what is stored is
judged by what is wrong with it:

- Fields that this version does not know are left out.
- Values may be out of the bounds of this version, and break its rules. A job that has begun runs on with
  them; any other is held back.
- A choice may be one that this version does not have. Nobody here knows what to do then, so the job is held
  back, and left as it is.

A status is read as it is, and written back with what was not understood.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from fleet_operator.api.job import FleetJob, FleetJobSpec, ObjectMeta
from fleet_operator.api.parse import (
    UNKNOWN_FIELD,
    name_problems,
    problems_of,
    rule_problems,
    shown_name,
    without_nulls,
)
from fleet_operator.api.status import FleetJobStatus
from fleet_operator.errors import InvalidJob, Problem

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["read_job"]

_UNKNOWN = {"extra_forbidden"}
_BOUNDS = {
    "greater_than_equal",
    "less_than_equal",
    "string_pattern_mismatch",
    "string_too_long",
    "string_too_short",
    "too_long",
    "too_short",
}
_CHOICES = {"enum", "literal_error"}
_TOLD = ("conditions", "lastFailure", "progress")
"""What a status says to people only: nothing is decided by it."""


def read_job(stored: Mapping[str, Any], known: FleetJob | None = None) -> FleetJob:
    """Return an object of the API server as a job; see `FleetJob.problems` and `FleetJob.is_held_back`.

    Parameters
    ----------
    stored : mapping
        An object as the API server gives it. It is not modified.
    known : FleetJob, optional
        The job as it was: where only its metadata and its status can have changed, its spec is taken over.

    Raises
    ------
    InvalidJob
        It has not even the shape of a job, or a status of which what is remembered cannot be read.
    """
    status = _read_status(stored)
    if known is not None and (job := _with_spec_of(known, stored["metadata"], status)) is not None:
        return job
    metadata = {key: value for key, value in stored["metadata"].items() if key != "managedFields"}
    document = {key: value for key, value in stored.items() if key != "status"} | {"metadata": metadata}
    problems, kinds = name_problems(document), set[str]()
    try:
        job = FleetJob.model_validate(without_nulls(document))
    except ValidationError as error:
        wrong = [each for each in error.errors(include_url=False) if each["type"] not in _UNKNOWN]
        kinds = {each["type"] for each in wrong}
        problems += (each for each in problems_of(error, document) if each.found != UNKNOWN_FIELD)
        if not kinds <= _BOUNDS | _CHOICES:
            raise InvalidJob(shown_name(document), problems) from None
        job = _read_whatever(document)
    if not kinds:
        problems += rule_problems(job)
    if problems:
        held_back = bool(kinds & _CHOICES) or not status.has_begun
        job = job.with_problems(tuple(problems), held_back=held_back)
    return job.with_status(status)


def _with_spec_of(known: FleetJob, metadata: Mapping[str, Any], status: FleetJobStatus) -> FleetJob | None:
    """Return the job with the spec that is known already, or None if that is another job's or has changed."""
    if (metadata.get("uid"), metadata.get("generation")) != (known.metadata.uid, known.metadata.generation):
        return None
    try:
        fresh = ObjectMeta.model_validate(without_nulls(metadata))
    except ValidationError:
        return None  # the problems are told of the whole
    return known.model_copy(update={"metadata": fresh, "status": status})


def _read_status(stored: Mapping[str, Any]) -> FleetJobStatus:
    """Return the status, without what it says to people only where that cannot be read."""
    told = without_nulls(stored.get("status") or {})
    if not isinstance(told, dict):
        raise InvalidJob(shown_name(stored), [Problem("status", repr(told), "a map")])
    try:
        return FleetJobStatus.model_validate(told)
    except ValidationError as error:
        wrong = {detail["loc"][:2] for detail in error.errors(include_url=False)}
    fields = {where[0] for where in wrong if where[0] in _TOLD}
    legible = {name: value for name, value in told.items() if name not in fields}
    if isinstance(conditions := told.get("conditions"), list):
        legible["conditions"] = [each for i, each in enumerate(conditions) if ("conditions", i) not in wrong]
    try:
        return FleetJobStatus.model_validate(legible)
    except ValidationError as error:
        problems = problems_of(error, told)
        raise InvalidJob(
            shown_name(stored),
            [problem._replace(path=f"status.{problem.path}") for problem in problems],
        ) from None


def _read_whatever(document: Mapping[str, Any]) -> FleetJob:
    """Return a job whose values may be out of bounds, and choices any text, but have the right shape."""
    document = without_nulls(document)
    return FleetJob.model_construct(
        metadata=ObjectMeta.model_validate(document["metadata"]), spec=_built(FleetJobSpec, document["spec"])
    )


def _built(expected: Any, value: Any) -> Any:
    """Return a value as what its field expects, unchecked; fields that are not known are left out."""
    if get_origin(expected) is Annotated:
        return _built(get_args(expected)[0], value)
    if isinstance(value, list) and get_origin(expected) is tuple:
        return tuple(_built(get_args(expected)[0], item) for item in value)
    if not isinstance(expected, type):  # it is optional: whatever of the alternatives fits
        return next(
            (built for each in get_args(expected) if (built := _built(each, value)) is not value), value
        )
    if issubclass(expected, Enum):
        return next((member for member in expected if member.value == value), value)
    if not isinstance(value, dict) or not issubclass(expected, BaseModel):
        return value
    fields = {field.alias or name: (name, field) for name, field in expected.model_fields.items()}
    known = {
        fields[key][0]: _built(fields[key][1].annotation, item)
        for key, item in value.items()
        if key in fields
    }
    others = {key: item for key, item in value.items() if key not in fields}
    keeps_others = expected.model_config.get("extra") == "allow"
    return expected.model_construct(**known, **(others if keeps_others else {}))
