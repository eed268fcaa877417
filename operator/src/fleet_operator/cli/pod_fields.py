"""Pure: typing errors in what a manifest holds of Kubernetes' own types, found without a cluster.

The definition of a FleetJob leaves a pod's spec open, so an API server says what is wrong with it only when
a pod is created. What Kubernetes knew at the version that this project is tested with is in
``pod_fields.json`` (`tools.pod_fields` writes it). A newer cluster may know more fields, so those that are
unknown can be let pass; a value of another kind is wrong in any version.
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
    "nodePool.tolerations": "[Toleration]",
    "checkpoint.volumeClaimTemplate.spec": "PersistentVolumeClaimSpec",
}
"""Where a FleetJob's spec holds what, as ``pod_fields.json`` writes it."""

_SCALARS: dict[str, tuple[type | tuple[type, ...], str]] = {
    "string": (str, "text (in quotes, where YAML would read a number or a truth value)"),
    "integer": (int, "a whole number"),
    "number": ((int, float), "a number"),
    "boolean": (bool, "true or false"),
}


class Findings(NamedTuple):
    """What is wrong with the parts of a manifest that are Kubernetes' own."""

    kubernetes: str  # the version whose fields are known
    unknown: tuple[Problem, ...]  # fields that this version does not have
    misfit: tuple[Problem, ...]  # values of another kind than their field's


class _Place(NamedTuple):
    """A map of the manifest: where it is, and the fields that it may have."""

    path: str
    fields: Mapping[str, str]


def find(document: Mapping[str, Any]) -> Findings:
    """Compare a manifest with the fields that Kubernetes knows.

    Parameters
    ----------
    document : mapping
        A FleetJob; what is wrong with it otherwise, in whatever way, is passed over.
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
    """Give each problem of a value, and whether it is an unknown field; `places` lead to the value."""
    path = places[-1].path
    if value is None or kind == "any":  # an empty field is as good as none, to the API server as well
        return
    if kind in _SCALARS:
        wanted, words = _SCALARS[kind]
        if kind == "integer" and isinstance(value, float) and value.is_integer():
            return  # 30.0 is written as 30 on its way to the cluster
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
    """Give the names that no resource of a container can have, such as a GPU's without a domain."""
    for name in names:
        if not re.fullmatch(RESOURCE_NAME, str(name)):
            yield Problem(path, repr(name), PATTERNS[RESOURCE_NAME])


def _meant(name: str, around: tuple[_Place, ...], types: Types) -> str:
    """Say what was probably meant: a field misspelt, one of a map around or below, or none of these."""
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
