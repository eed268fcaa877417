"""Reads YAML as ``kubectl apply`` does, within limits, and records each value's line.

PyYAML's libyaml parses the text into events; kubectl's parser is a port of the same library. But PyYAML and
kubectl build different values from the events (PyYAML reads ``1:30`` as 90 and ``y`` as text). So this module
builds the values itself: by the rules of goyaml.v2, then in the form of JSON. Aliases share one value, and
their expansion is bounded, because all later code sees the expanded manifest.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["MAX_DEPTH", "MAX_UNFOLDED", "Node", "YamlProblem", "read_documents"]

MAX_UNFOLDED = 3 << 19
"""The maximum number of characters in an expanded document: about etcd's limit for an object."""

MAX_DEPTH = 100
"""The maximum nesting depth of collections."""

_PARSER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the latter if PyYAML was built without libyaml
_TAG = "tag:yaml.org,2002:"
_UNPRINTABLE = re.compile("[^\t\n\r -~\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_INTEGER = re.compile(r"([-+]?)(?:0[bB]([01]+)|0[oO]([0-7]+)|0[xX]([0-9a-fA-F]+)|(0[0-7]*)|([1-9][0-9]*))")
_BASES = (2, 8, 16, 8, 10)  # the bases of the groups after the sign
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_WORDS: dict[str, bool | None] = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
}
_TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "float": (int, float),
    "int": (int,),
    "null": (type(None),),
}


class YamlProblem(Exception):  # noqa: N818  the name describes the problem; the message reports a person's mistake
    """The text is not valid YAML for a manifest.

    Attributes
    ----------
    line, column : int
        The position, counted from 0.
    """

    def __init__(self, message: str, line: int, column: int) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


@dataclass(slots=True)
class Node:
    """A value and its position in the text; an alias makes one node occur in several places."""

    value: Any
    line: int  # counted from 0; of a value in a map, that of its key
    size: int  # in characters, with aliases expanded
    height: int = 0  # the depth of nesting
    fields: Mapping[str, Node] = field(default_factory=dict)  # the fields, if it is a map
    elements: Sequence[Node] = ()  # the elements, if it is a list

    def lines(self, path: str = "") -> Iterator[tuple[str, int]]:
        """Yield the path, such as spec.containers[0], and the line of each field in this node."""
        yield path, self.line
        for name, node in self.fields.items():
            yield from node.lines(f"{path}.{name}" if path else name)
        for index, node in enumerate(self.elements):
            yield from node.lines(f"{path}[{index}]")


def read_documents(text: str) -> list[Node]:
    """Return the non-empty documents in a YAML text.

    Raises
    ------
    YamlProblem
        The text is not YAML; a map has a duplicate key; an alias has no anchor, or is inside the value that
        it refers to; a document expands to more than `MAX_UNFOLDED` characters, or is nested deeper than
        `MAX_DEPTH`; or it has values that JSON does not allow: other tags, non-finite numbers, or keys that
        are not strings, integers or booleans.
    """
    if (found := _UNPRINTABLE.search(text)) is not None:
        before = text[: found.start()].splitlines(keepends=True) or [""]
        fresh = before[-1].endswith(("\n", "\r"))
        line, column = (len(before), 0) if fresh else (len(before) - 1, len(before[-1]))
        raise YamlProblem(f"not YAML: found the control character {found[0]!r}", line, column)
    composer = _Composer(yaml.parse(text, Loader=_PARSER))
    try:
        return [node for node in composer.documents() if node.value is not None]
    except yaml.MarkedYAMLError as error:
        raise _problem_of(error, text) from error


def _problem_of(error: yaml.MarkedYAMLError, text: str) -> YamlProblem:
    """Convert a parser error, such as an unclosed list, to a problem with a position in the text."""
    written = text.rstrip().splitlines() or [""]
    places = [
        (mark.line, mark.column) for mark in (error.problem_mark, error.context_mark) if mark is not None
    ]
    line, column = next(
        (place for place in places if place[0] < len(written)), (len(written) - 1, len(written[-1]))
    )
    said = f"not YAML: {error.problem}"
    if error.context:
        began = error.context_mark.line if error.context_mark else line
        said += f" {error.context}" + (f" that begins in line {began + 1}" if began < line else "")
    return YamlProblem(said, line, column)


class _Composer:
    """Builds values from the events of PyYAML's parser, like PyYAML's own Composer."""

    def __init__(self, events: Iterable[Any]) -> None:
        self._events = iter(events)
        self._anchors: dict[str, Node | None] = {}  # None while the value is being read

    def documents(self) -> Iterator[Node]:
        for event in self._events:
            if isinstance(event, yaml.DocumentStartEvent):
                self._anchors.clear()
                yield self._node(next(self._events), 0)

    def _node(self, event: Any, depth: int) -> Node:
        line: int = event.start_mark.line
        if isinstance(event, yaml.AliasEvent):
            return self._named(event, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        if isinstance(event, yaml.ScalarEvent):
            node = Node(_scalar(event), line, len(event.value) + 2)
        else:
            if depth == MAX_DEPTH:
                _refuse(event, f"lists and maps are nested more than {MAX_DEPTH} deep; expected a FleetJob")
            is_map = isinstance(event, yaml.MappingStartEvent)
            if event.tag not in (None, "!", f"{_TAG}{'map' if is_map else 'seq'}"):
                _refuse(event, _strange_tag(event))
            node = self._map(event, depth) if is_map else self._list(event, depth)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _named(self, event: Any, depth: int) -> Node:
        """Return the node to which an alias refers."""
        if event.anchor not in self._anchors:
            _refuse(event, f"*{event.anchor} is not defined; expected &{event.anchor} at an earlier value")
        node = self._anchors[event.anchor]
        if node is None:
            _refuse(event, f"*{event.anchor} is inside the value that &{event.anchor} defines")
        if depth + node.height > MAX_DEPTH:
            _refuse(event, f"*{event.anchor} nests lists and maps more than {MAX_DEPTH} deep")
        return node

    def _list(self, start: Any, depth: int) -> Node:
        elements = list[Node]()
        size, height = 2, 0
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            elements.append(node := self._node(event, depth + 1))
            size, height = size + 1 + node.size, max(height, node.height)
            _check_size(event, size)
        values = [node.value for node in elements]
        return Node(values, start.start_mark.line, size, height + 1, elements=elements)

    def _map(self, start: Any, depth: int) -> Node:
        fields = dict[str, Node]()
        merged = set[str]()  # keys merged by `<<`, which later keys of the map override
        merge_line: int | None = None
        size, height = 2, 0
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if _is_merge(event):
                if merge_line is not None:
                    told = f"<< already occurs in line {merge_line + 1} of this map"
                    _refuse(event, f"{told}; expected <<: [*one, *other]")
                merge_line = event.start_mark.line
                brought = self._to_merge(next(self._events), depth)
                for name in fields.keys() & brought.keys():
                    told = f"<< has {name!r} too, which is in line {fields[name].line + 1} of this map"
                    _refuse(event, f"{told}; expected << to be the map's first key")
                merged |= brought.keys()
            else:
                name = self._key(event, depth)
                if name in fields and name not in merged:
                    line = fields[name].line + 1
                    _refuse(
                        event, f"the key {name!r} already occurs in line {line} of this map; expected it once"
                    )
                merged.discard(name)
                node = self._node(next(self._events), depth + 1)
                brought = {name: replace(node, line=event.start_mark.line)}
            fields |= brought
            size += sum(len(name) + 4 + node.size for name, node in brought.items())
            height = max(height, *(node.height for node in brought.values()), 0)
            _check_size(event, size)
        values = {name: node.value for name, node in fields.items()}
        return Node(values, start.start_mark.line, size, height + 1, fields=fields)

    def _key(self, event: Any, depth: int) -> str:
        """Return a map key as the string that represents it in JSON."""
        key = self._node(event, depth + 1).value
        if isinstance(key, bool):
            return "true" if key else "false"
        if isinstance(key, int):
            return str(key)
        if not isinstance(key, str):
            _refuse(event, f"found the key {key!r}, expected text; write it in quotes")
        return key

    def _to_merge(self, event: Any, depth: int) -> dict[str, Node]:
        """Return the fields that ``<<`` merges into a map; the first of several maps takes precedence."""
        node = self._node(event, depth + 1)
        sources = node.elements if isinstance(node.value, list) else [node]
        if not all(isinstance(source.value, dict) for source in sources):
            _refuse(event, "<< merges a map, or a list of maps, into another")
        brought = dict[str, Node]()
        for source in sources:
            brought = {**source.fields, **brought}
        return brought


def _is_merge(event: Any) -> bool:
    return isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.implicit[0]


def _scalar(event: Any) -> Any:
    """Return the value of a scalar."""
    if event.tag is None:
        return _resolve(event, event.value) if event.implicit[0] else event.value
    kind = event.tag.removeprefix(_TAG)
    if event.tag == "!" or kind == "str":
        return event.value
    if kind not in _TYPES:
        _refuse(event, _strange_tag(event))
    value = _resolve(event, event.value)
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "bool"):
        _refuse(event, f"found {event.value!r}, expected a value of the type !!{kind}")
    return value


def _resolve(event: Any, text: str) -> Any:
    """Return the value of an unquoted scalar as a JSON value, by kubectl's rules."""
    if text in _WORDS:
        return _WORDS[text]
    if _NOT_FINITE.fullmatch(text):
        _refuse(event, f"found {text}, expected a finite number: JSON has no other")
    if text[0] not in "+-.0123456789":
        return text
    plain = text if text[0] == "." else text.replace("_", "")
    if (matched := _INTEGER.fullmatch(plain)) is not None and len(plain) < 80:
        sign, *digits = matched.groups()
        number = next(int(found, base) for found, base in zip(digits, _BASES, strict=True) if found)
        number = -number if sign == "-" else number
        if -(2**63) <= number < 2**63:
            return number
        if not sign and number < 2**64:
            return float(number)
    if _FLOAT.fullmatch(plain):
        real = float(plain)
        if math.isfinite(real):
            return int(real) if real.is_integer() and abs(real) < 2**63 else real
    return text


def _strange_tag(event: Any) -> str:
    shown = event.tag.replace(_TAG, "!!")
    return f"the tag {shown} has no meaning in a manifest; expected none, !!str, !!int, !!float or !!bool"


def _check_size(event: Any, size: int) -> None:
    if size > MAX_UNFOLDED:
        alias = f"with *{event.anchor} " if isinstance(event, yaml.AliasEvent) else ""
        limit = f"{MAX_UNFOLDED:,} characters, more than a cluster stores of one object"
        _refuse(event, f"{alias}the document expands to more than {limit}")


def _refuse(event: Any, message: str) -> NoReturn:
    raise YamlProblem(message, event.start_mark.line, event.start_mark.column)
