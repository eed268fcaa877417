"""The page about the transpiler lists every field of the configuration with its default."""

import re
from dataclasses import fields
from pathlib import Path

import fleet

PAGE = (Path(__file__).parents[3] / "docs" / "transpiler.md").read_text()
ROW = re.compile(r"^\| `(\w+)` \| `([^`]+)` \| (.+) \| (.+) \|$", re.MULTILINE)


def test_every_field_has_a_row_with_its_default():
    config = fleet.DistributeTranspilerConfig()
    rows = {name: default for name, default, *_ in ROW.findall(PAGE)}
    expected = {field.name: getattr(config, field.name) for field in fields(config)}
    written = {
        name: value.__name__
        if isinstance(value, type)
        else f'"{value}"'
        if isinstance(value, str)
        else str(value)
        for name, value in expected.items()
    }
    assert rows == written


def test_every_way_to_clip_is_there():
    for name in ("ClipGradByValue", "ClipGradByNorm", "ClipGradByGlobalNorm"):
        assert f"`fleet.{name}(" in PAGE
