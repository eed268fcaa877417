"""Pure functions that check the parts of a manifest whose types are Kubernetes' own.

They find unknown fields and values of the wrong type. The CustomResourceDefinition of FleetJob does not
restrict a pod's spec, so the API server reports mistakes in it only when a pod is created.
``pod_fields.json`` has the fields of the version of Kubernetes that this project is tested with;
`tools.pod_fields` generates it. A newer cluster may know more fields, so callers may accept unknown ones, but
a value of the wrong type is invalid in any version.
"""

from __future__ import annotations

import difflib
import json
import re
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

from fleet_operator.api.base import PATTERNS, RESOURCE_NAME
from fleet_operator.api.parse import UNKNOWN_FIELD
from fleet_operator.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    Types = Mapping[str, Mapping[str, str]]

ROOTS = {
    "template.spec": "PodSpec",
    "pserver.template.spec": "PodSpec",
    "trainer.template.spec": "PodSpec",
    "scheduling.tolerations": "[Toleration]",
    "checkpoint.volumeClaimTemplate.spec": "PersistentVolumeClaimSpec",
}
"""The type of each Kubernetes object in a FleetJob's spec, in the notation of ``pod_fields.json``."""

_SCALARS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "string": (str, "text (in quotes, where YAML would read a number or a truth value)"),
    "integer": (int, "a whole number"),
    "number": ((int, float), "a number"),
    "boolean": (bool, "true or false"),
}


class Findings(NamedTuple):
    """The unknown fields and wrong types in a manifest's parts with Kubernetes types."""

    kubernetes: str  # the Kubernetes version whose fields are known
    unknown: tuple[Problem, ...]  # fields that this version does not have
    misfit: tuple[Problem, ...]  # values of the wrong type


class _Place(NamedTuple):
    """A map in the manifest: its path and its allowed fields."""

    path: str
    fields: Mapping[str, str]


def find(document: Mapping[str, Any]) -> Findings:
    """Return the unknown fields and wrong types in a manifest's parts with Kubernetes types.

    Parameters
    ----------
    document : mapping
        A FleetJob. Problems in its other parts are ignored.
    """
    known = json.loads(files(__package__).joinpath("pod_fields.json").read_text(encoding="utf-8"))
    version, types = known["kubernetes"], known["types"]
    unknown, misfit = list[Problem](), list[Problem]()
    for path, kind in ROOTS.items():
        value: Any = document.get("spec")
        for name in path.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        for problem, is_unknown in _problems(value, kind, (_Place(f"spec.{path}", {}),), types):
            (unknown if is_unknown else misfit).append(problem)
    return Findings(version, tuple(unknown), tuple(misfit))


def _problems(
    value: Any, kind: str, places: tuple[_Place, ...], types: Types
) -> Iterator[tuple[Problem, bool]]:
    """Yield each problem of a value, paired with whether the problem is an unknown field.

    `places` is the path to the value.
    """
    path = places[-1].path
    if value is None or kind == "any":  # like the API server, treat null as an absent field
        return
    if kind in _SCALARS:
        wanted, words = _SCALARS[kind]
        if kind == "integer" and isinstance(value, float) and value.is_integer():
            return  # 30.0 is sent to the cluster as 30
        if not isinstance(value, wanted) or (isinstance(value, bool) and kind != "boolean"):
            yield Problem(path, _shown(value), words), False
    elif kind.startswith("["):
        if not isinstance(value, list):
            yield Problem(path, _shown(value), "a list"), False
            return
        for index, item in enumerate(value):
            yield from _problems(item, kind[1:-1], (*places, _Place(f"{path}[{index}]", {})), types)
    elif not isinstance(value, dict):
        yield Problem(path, _shown(value), "a map"), False
    elif kind.startswith("{"):
        for name, item in value.items():
            yield from _problems(item, kind[1:-1], (*places, _Place(f"{path}[{name}]", {})), types)
    else:
        yield from _problems_of_fields(value, kind, places, types)


def _problems_of_fields(
    value: Mapping[str, Any], kind: str, places: tuple[_Place, ...], types: Types
) -> Iterator[tuple[Problem, bool]]:
    here = places[-1]._replace(fields=types[kind])
    around = (*places[:-1], here)
    for name, item in value.items():
        path = f"{here.path}.{name}"
        if name not in here.fields:
            yield Problem(path, UNKNOWN_FIELD, _meant(str(name), around, types)), True
            continue
        yield from _problems(item, here.fields[name], (*around, _Place(path, {})), types)
        if kind == "ResourceRequirements" and name in ("limits", "requests") and isinstance(item, dict):
            yield from ((problem, False) for problem in _no_resources(item, path))


def _no_resources(names: Iterable[str], path: str) -> Iterator[Problem]:
    """Yield a problem for each invalid resource name in a container, such as `gpu` without a domain."""
    for name in names:
        if not re.fullmatch(RESOURCE_NAME, str(name)):
            yield Problem(path, repr(name), PATTERNS[RESOURCE_NAME])


def _meant(name: str, around: tuple[_Place, ...], types: Types) -> str:
    """Return a hint about an unknown field: its correct level, a similar name, or all known fields."""
    here = around[-1].fields
    for place in reversed(around[:-1]):
        if name in place.fields:
            return f"it below {place.path} (did you mean to indent it less?)"
    for field, kind in here.items():
        if name in types.get(kind.strip("[]"), {}):
            inner = f"{field}[0]" if kind.startswith("[") else field
            return f"it below {field} (did you mean {inner}.{name}?)"
    if close := difflib.get_close_matches(name, here, n=1):
        return f"a field of Kubernetes' (did you mean {close[0]}?)"
    return f"one of {', '.join(here)}"


def _shown(value: Any) -> str:
    if isinstance(value, (dict, list)):
        return f"a {'map' if isinstance(value, dict) else 'list'} of {len(value)}"
    return json.dumps(value) if isinstance(value, bool) else repr(value)
