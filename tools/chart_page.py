"""Generates the chart's README, with the type, default and comment of each value in ``values.yaml``.

``make docs`` writes the page. Types and limits come from ``values.schema.json``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["CHART", "Value", "chart_page", "values"]

CHART = Path("charts/fleet-operator")
PAGE = """\
# {name}
{description}. Version {version}, for Kubernetes {kubernetes} or newer.

```bash
helm install fleet-operator charts/fleet-operator --namespace fleet-system --create-namespace
helm test fleet-operator --namespace fleet-system
```

[Operations](../../docs/operations.md) describes upgrades, several releases in one cluster, and what remains
after `helm uninstall`. [Security](../../docs/security.md) lists the permissions.

## Values
Helm checks them against [values.schema.json](values.schema.json).

| value | type | default | meaning |
|---|---|---|---|
"""


@dataclass(frozen=True)
class Value:
    """A value of the chart, or a group of values, with its documentation.

    Attributes
    ----------
    name : str
        The path of the value, joined by dots.
    meaning : str
        The comment above the value, as one paragraph; empty if there is none.
    schema : mapping
        The value's schema in ``values.schema.json``; empty if it has none.
    default : Any
        The default; for a group, the defaults of its values.
    is_group : bool
        True if other values are below this one.
    """

    name: str
    meaning: str
    schema: Mapping[str, Any]
    default: Any
    is_group: bool

    def row(self) -> str:
        """Return the row that describes this value in the README's table."""
        cells = [f"`{self.name}`", "", "", self.meaning.replace("|", "\\|")]
        if not self.is_group:
            cells[1:3] = _kind(self.schema), f"`{json.dumps(self.default, ensure_ascii=False)}`"
        return f"| {' | '.join(cells)} |\n"


def chart_page(folder: Path) -> str:
    """Return the README of the chart in `folder`, without the notice that the file is generated."""
    chart = yaml.safe_load((folder / "Chart.yaml").read_text())
    page = PAGE.format(**chart, kubernetes=chart["kubeVersion"].removeprefix(">=").removesuffix(".0-0"))
    return page + "".join(value.row() for value in values(folder))


def values(folder: Path) -> Iterator[Value]:
    """Yield the values and groups of the chart in `folder`, in the order of ``values.yaml``."""
    text = (folder / "values.yaml").read_text()
    lines = text.splitlines()
    schema = json.loads((folder / "values.schema.json").read_text())

    def within(node: yaml.Node, properties: Mapping[str, Any], group: str) -> Iterator[Value]:
        for key, value in node.value:
            name, own = f"{group}{key.value}", properties.get(key.value, {})
            if "$ref" in own:
                own = schema["definitions"][own["$ref"].rpartition("/")[2]]
            parts = own.get("properties", {})
            default = yaml.safe_load(yaml.serialize(value))
            yield Value(name, _comment(lines, key.start_mark.line), own, default, is_group=bool(parts))
            if parts:
                yield from within(value, parts, f"{name}.")

    document = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(document, yaml.MappingNode):
        raise TypeError(f"{folder / 'values.yaml'}: found {document}, expected a mapping")
    yield from within(document, schema["properties"], "")


def _kind(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return ", ".join(f"`{each}`" for each in schema["enum"])
    kinds = " or ".join(each["type"] for each in schema.get("oneOf", [schema]))
    limits = [schema.get("minimum"), schema.get("maximum")]
    return kinds if None in limits else f"{kinds}, {limits[0]} to {limits[1]}"


def _comment(lines: Sequence[str], line: int) -> str:
    """Return the comment directly above a line of YAML."""
    start = line
    while start > 0 and lines[start - 1].lstrip().startswith("#"):
        start -= 1
    return " ".join(each.strip().removeprefix("#").strip() for each in lines[start:line])
