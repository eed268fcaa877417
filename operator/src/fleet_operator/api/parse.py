"""Parses a manifest into a `FleetJob`, or reports all problems in it."""

from __future__ import annotations

import copy
import difflib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel

from fleet_operator.api.base import PATTERNS
from fleet_operator.api.job import FleetJob, ObjectMeta
from fleet_operator.api.rules import RULES, name_problem
from fleet_operator.api.status import FleetJobStatus
from fleet_operator.errors import InvalidJob, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pydantic.fields import FieldInfo
    from pydantic_core import ErrorDetails

__all__ = ["UNKNOWN_FIELD", "newer_state", "parse_job", "read_job"]

UNKNOWN_FIELD = "an unknown field"
"""The value of `Problem.found` for an unknown field."""

_KINDS = {
    "bool_type": "true or false",
    "dict_type": "a map",
    "int_type": "a whole number",
    "list_type": "a list",
    "mapping_type": "a map",
    "missing": "a value",
    "model_attributes_type": "a map",
    "model_type": "a map",
    "string_type": "text (in quotes, where YAML would read a number or a truth value)",
    "tuple_type": "a list",
}


def parse_job(document: Mapping[str, Any]) -> FleetJob:
    """Validate a manifest and return it as a job.

    Parameters
    ----------
    document : mapping
        The parsed YAML or JSON of the manifest, or an object from the API server.

    Raises
    ------
    InvalidJob
        The manifest is invalid; the error lists all problems. Rules that involve several fields are checked
        only if each field is valid by itself.
    """
    if not isinstance(document, Mapping):
        found = "nothing" if document is None else f"{type(document).__name__} {document!r:.60}"
        raise InvalidJob(
            "without a name", [Problem("the manifest", found, "a map with apiVersion, kind and spec")]
        )
    problems = name_problems(document)
    try:
        job = FleetJob.model_validate(without_nulls(document))
    except ValidationError as error:
        raise InvalidJob(shown_name(document), [*problems, *problems_of(error, document)]) from None
    missing = [field for field in ("apiVersion", "kind") if field not in document]
    problems += [Problem(field, "nothing", _expected_constant(field)) for field in missing]
    problems += rule_problems(job)
    if problems:
        raise InvalidJob(shown_name(document), problems)
    return job


def read_job(stored: Mapping[str, Any], known: FleetJob | None = None) -> FleetJob:
    """Convert an object from the API server, which has already validated it, to a job.

    During an upgrade of the operator, an object may have fields that this build does not know. Unknown fields
    of the spec are dropped, and those of the status are kept.

    Parameters
    ----------
    stored : mapping
        An object from the API server; it is not modified.
    known : FleetJob, optional
        The previous version of the job, whose spec is reused if it cannot have changed.

    Raises
    ------
    InvalidJob
        The object does not match this build's schema of a job.
    """
    document = _document_of(stored)
    try:
        if known is not None and _is_generation_of(known, document["metadata"]):
            return known.model_copy(update=_state_of(document))
        return FleetJob.model_validate(document)
    except ValidationError as error:
        document = _without_unknown_fields(document, error)
    try:
        return FleetJob.model_validate(document)
    except ValidationError as error:
        raise InvalidJob(shown_name(document), problems_of(error, document)) from None


def newer_state(known: FleetJob, stored: Mapping[str, Any]) -> FleetJob:
    """Return a known job with the metadata and status of a newer version whose spec cannot be read.

    The generation stays that of the known spec. If the metadata or the status cannot be read either, return
    the known job.
    """
    try:
        state = _state_of(_document_of(stored))
    except ValidationError:
        return known
    metadata = state["metadata"].model_copy(update={"generation": known.metadata.generation})
    return known.model_copy(update={**state, "metadata": metadata})


def _document_of(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an object from the API server without the fields that it keeps for itself."""
    metadata = {key: value for key, value in stored["metadata"].items() if key != "managedFields"}
    document: Mapping[str, Any] = without_nulls({**stored, "metadata": metadata})
    return document


def _state_of(document: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the parts of a job that change without its spec."""
    return {
        "metadata": ObjectMeta.model_validate(document["metadata"]),
        "status": FleetJobStatus.model_validate(document.get("status", {})),
    }


def _is_generation_of(known: FleetJob, metadata: Mapping[str, Any]) -> bool:
    """Return whether an object has the same uid and generation, and thus the same spec, as a known job."""
    return (known.metadata.uid, known.metadata.generation) == (
        metadata.get("uid"),
        metadata.get("generation"),
    )


def _without_unknown_fields(document: Mapping[str, Any], error: ValidationError) -> Mapping[str, Any]:
    """Return a copy of a document without the unknown fields that a validation error reports."""
    document = copy.deepcopy(document)
    for detail in error.errors(include_url=False):
        if detail["type"] == "extra_forbidden":
            *outer, last = _location(detail, document)
            holder: Any = document
            for part in outer:
                holder = holder[part]
            holder.pop(last, None)
    return document


def shown_name(document: Mapping[str, Any]) -> str:
    """Return the name of a manifest's job for use in messages."""
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else "without a name"


def name_problems(document: Mapping[str, Any]) -> list[Problem]:
    """Return a list with the problem of a job's name, or an empty list if the name is valid."""
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    expected = name_problem(name) if isinstance(name, str) and name else None
    return [Problem("metadata.name", repr(name), expected)] if expected else []


def rule_problems(job: FleetJob) -> list[Problem]:
    """Return a problem for each violated rule that involves several fields."""
    return [
        Problem(f"spec.{rule.field}", rule.found(job), rule.expected) for rule in RULES if not rule.holds(job)
    ]


def without_nulls(value: Any) -> Any:
    """Remove fields whose value is null, such as a bare ``replicas:``, as the API server does."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    return value


def problems_of(error: ValidationError, document: Mapping[str, Any]) -> Iterator[Problem]:
    """Convert pydantic's errors to problems, with only the first error for each field."""
    seen = set()
    for detail in error.errors(include_url=False):
        location = _location(detail, document)
        path = _path(location)
        if path not in seen and not _is_echo(detail):
            seen.add(path)
            yield Problem(path, _found(detail), _expected(detail, location))


def _is_echo(detail: ErrorDetails) -> bool:
    """Return whether a list is reported as too short only because some of its items are invalid."""
    return detail["type"] == "too_short" and len(detail["input"]) >= detail["ctx"]["min_length"]


def _location(detail: ErrorDetails, document: Mapping[str, Any]) -> tuple[int | str, ...]:
    """Return the location of an error in the manifest, without pydantic's names of union members."""
    loc = detail["loc"]
    if loc[-1] == "[key]":  # the API server also reports the map as the field of an invalid key
        loc = loc[:-2]
    result: list[int | str] = []
    value: Any = document
    for position, part in enumerate(loc):
        if isinstance(part, int):
            value = value[part] if isinstance(value, list) and part < len(value) else None
        elif isinstance(value, dict) and part in value:
            value = value[part]
        elif position < len(loc) - 1 or detail["type"] != "missing":
            continue
        result.append(part)
    return tuple(result)


def _path(location: Iterable[int | str]) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return path.removeprefix(".") or "the manifest"


def _found(detail: ErrorDetails) -> str:
    if detail["type"] == "missing":
        return "nothing"
    if detail["type"] == "extra_forbidden":
        return UNKNOWN_FIELD
    value = detail["input"]
    if isinstance(value, (dict, list, tuple)):
        size = len(value)
        kind = "map" if isinstance(value, dict) else "list"
        return f"an empty {kind}" if size == 0 else f"a {kind} of {size}"
    return json.dumps(value) if isinstance(value, bool) else repr(value)


def _expected(detail: ErrorDetails, location: tuple[int | str, ...]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    match kind:
        case "extra_forbidden":
            return _known_fields(location)
        case "enum" | "literal_error":
            values = str(context["expected"])
            return f"one of {values.replace(' or ', ', ')}" if " or " in values else values
        case "greater_than_equal" | "less_than_equal":
            bounds = {"greater_than_equal": "at least", "less_than_equal": "at most"}
            return f"{bounds[kind]} {context.get('ge', context.get('le'))}"
        case "too_short" | "string_too_short":
            return f"at least {context.get('min_length')} of them" if kind == "too_short" else "some text"
        case "too_long" | "string_too_long":
            unit = "of them" if kind == "too_long" else "characters"
            return f"at most {context.get('max_length')} {unit}"
        case "string_pattern_mismatch":
            return PATTERNS.get(context["pattern"], f"text that matches {context['pattern']}")
        case "missing" if location[-1] in ("apiVersion", "kind"):
            return _expected_constant(str(location[-1]))
        case "missing":
            return _described(location) or "a value"
    return _KINDS.get(kind, detail["msg"])


def _expected_constant(field: str) -> str:
    return repr({"apiVersion": FleetJob.model_fields["api_version"].default}.get(field, "FleetJob"))


def _described(location: tuple[int | str, ...]) -> str | None:
    """Return the first sentence of a field's description."""
    field = _fields_at(location[:-1]).get(str(location[-1]))
    if field is None or not field.description:
        return None
    first, space, others = field.description.partition(".")[0].partition(" ")
    return f"{first.lower() if first.istitle() else first}{space}{others}"


def _known_fields(location: tuple[int | str, ...]) -> str:
    """Return a phrase with the known fields at an unknown field's location, and the closest match."""
    known = _fields_at(location[:-1])
    close = difflib.get_close_matches(str(location[-1]), known, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"one of {', '.join(known)}{hint}"


def _fields_at(location: tuple[int | str, ...]) -> dict[str, FieldInfo]:
    """Return the fields of the model at a location, keyed by their names in the manifest."""
    model: type[BaseModel] = FleetJob
    for part in location:
        held = _fields_of(model).get(str(part))
        types = (held.annotation, *get_args(held.annotation)) if held else ()
        model = next(
            (each for each in types if isinstance(each, type) and issubclass(each, BaseModel)), model
        )
    return _fields_of(model)


def _fields_of(model: type[BaseModel]) -> dict[str, FieldInfo]:
    return {field.alias or to_camel(name): field for name, field in model.model_fields.items()}
