"""Every public name says in NumPy style what each parameter of its signature is, and of no other."""

import dataclasses
import enum
import inspect
import re
from collections.abc import Iterator

import pytest

import fleet
from fleet import collective, metrics, nn, parameter_server, role_maker, tables
from fleet.tables.admission import Admission
from fleet.tables.config import RowType
from fleet.tables.eviction import Eviction
from fleet.tables.first_values import FirstValues
from fleet.tables.rules import RowRule

ORDER = ["Parameters", "Attributes", "Returns", "Yields", "Raises", "Notes", "Examples"]
SECTIONS = re.compile(rf"^({'|'.join(ORDER)})\n(-+)\n", re.MULTILINE)
INTERFACES = {kind.__name__: kind for kind in (Admission, Eviction, FirstValues, RowRule, RowType)}
"""The interfaces of table policies. An implementation may refer to their methods: ``see `RowRule.step`.``"""


def public() -> dict[str, object]:
    """Return what a script can call or read, by its name."""
    named: dict[str, object] = {f"fleet.{name}": getattr(fleet, name) for name in fleet.__all__}
    for module in (metrics, nn, role_maker, tables):
        named |= {f"{module.__name__}.{name}": getattr(module, name) for name in module.__all__}
    named |= {f"{kind.__module__}.Fleet": kind for kind in (collective.Fleet, parameter_server.Fleet)}
    named |= {f"fleet.tables.{name}": kind for name, kind in INTERFACES.items()}
    for name, each in list(named.items()):
        if inspect.isclass(each):
            named |= {f"{name}.{member}": found for member, found in members(each)}
    return {name: each for name, each in named.items() if callable(each) or isinstance(each, property)}


def members(kind: type) -> Iterator[tuple[str, object]]:
    """Give the public methods and properties that a class has from this package."""
    for name in dir(kind):
        found = inspect.getattr_static(kind, name)
        if isinstance(found, staticmethod | classmethod):
            found = getattr(kind, name)
        code = found.fget if isinstance(found, property) else found
        if not name.startswith("_") and getattr(code, "__module__", "").startswith("fleet."):
            yield name, found


def sections(doc: str) -> dict[str, str]:
    """Return a docstring's sections by their titles."""
    parts = SECTIONS.split(doc)[1:]
    return {title: body for title, _, body in zip(*[iter(parts)] * 3, strict=True)}


def described(section: str) -> list[str]:
    """Return the names that a section explains: ``a, b : int`` at the margin."""
    lines = re.findall(r"^(\S[^\n:]*?)(?: : .*)?$", section, re.MULTILINE)
    return [name.strip().lstrip("*") for line in lines for name in line.split(",")]


def parameters(each: object) -> list[str]:
    """Return the names of what a caller gives; nothing of what makes no objects, or takes a message only."""
    if isinstance(each, property):
        return []
    if inspect.isclass(each):
        if issubclass(each, enum.Enum | Exception) or getattr(each, "_is_protocol", False):
            return []
        if dataclasses.is_dataclass(each):
            return [field.name for field in dataclasses.fields(each) if field.init]
    names = list(inspect.signature(each).parameters)  # type: ignore[arg-type]
    return names[1:] if names[:1] == ["self"] else names


def is_data(each: object) -> bool:
    """Whether it is a class of values with names."""
    return inspect.isclass(each) and (dataclasses.is_dataclass(each) or hasattr(each, "_fields"))


def documentation(each: object) -> str:
    """Return a docstring; of a class, that of the one that has its constructor; or the one referred to."""
    if inspect.isclass(each) and "__init__" not in vars(each):
        bases = (base for base in each.__mro__[:-1] if "__init__" in vars(base))
        each = next((base for base in bases if base.__module__.startswith("fleet.")), each)
    doc = inspect.getdoc(each) or ""
    same = re.fullmatch(r".*; see `(\w+)\.(\w+)`\.", doc)
    if same and same[1] in INTERFACES:
        return documentation(getattr(INTERFACES[same[1]], same[2]))
    return doc


PUBLIC = public()


@pytest.mark.parametrize("name", PUBLIC)
def test_it_says_what_it_is_and_what_each_parameter_is(name):
    each = PUBLIC[name]
    assert inspect.getdoc(each), "it has no docstring"
    found = sections(documentation(each))
    if is_data(each) and "Parameters" not in found:  # these are set by name, and stand in any order
        assert sorted(described(found.get("Attributes", ""))) == sorted(parameters(each))
    else:
        assert described(found.get("Parameters", "")) == parameters(each)


@pytest.mark.parametrize("name", PUBLIC)
def test_it_is_numpy_style(name):
    summary, *rest = (inspect.getdoc(PUBLIC[name]) or "").split("\n")
    assert summary.endswith((".", ":"))
    assert not rest or not rest[0], "a blank line stands behind the summary"
    doc = documentation(PUBLIC[name])
    found = SECTIONS.findall(doc)
    assert all(len(title) == len(line) for title, line in found)
    titles = [title for title, _ in found]
    assert titles == sorted(titles, key=ORDER.index)
    for title, section in sections(doc).items():
        if title in ("Parameters", "Attributes", "Raises"):
            assert described(section), f"{title} is empty"
