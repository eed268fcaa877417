"""Values mean what they mean to kubectl, which is asked where there is one; and reading has an end."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from fleet_operator.manifests import yaml_reader
from fleet_operator.manifests.yaml_reader import MAX_DEPTH, MAX_UNFOLDED, YamlProblem, read_documents

INT64 = 2**63

VALUES: dict[str, Any] = {
    # Not the base 60 of YAML 1.1.
    "1:30": "1:30",
    "190:20:30.15": "190:20:30.15",
    # The truth values of YAML 1.1, with y and n.
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
    "tRue": "tRue",
    "yES": "yES",
    **dict.fromkeys(("", "~", "null", "Null", "NULL")),
    "nULL": "nULL",
    # Whole numbers.
    "0": 0,
    "-0": 0,
    "+5": 5,
    "010": 8,
    "-010": -8,
    "007": 7,
    "08": 8,
    "09.5": 9.5,
    "0o10": 8,
    "0O7": 7,
    "0o8": "0o8",
    "0x1F": 31,
    "0X1f": 31,
    "+0x1": 1,
    "-0x1": -1,
    "0x": "0x",
    "0xG": "0xG",
    "0b11": 3,
    "-0b11": -3,
    "0b2": "0b2",
    "1_000": 1000,
    "1__0": 10,
    "1_": 1,
    "_1": "_1",
    "0x1_F": 31,
    "1_0.5": 10.5,
    "1,000": "1,000",
    "9223372036854775807": INT64 - 1,
    "-9223372036854775808": -INT64,
    "9223372036854775808": float(INT64),
    "18446744073709551615": float(2**64),
    "0xffffffffffffffff": float(2**64),
    "0x10000000000000000": "0x10000000000000000",
    "-0xffffffffffffffff": "-0xffffffffffffffff",
    "123456789012345678901234567890": 123456789012345678901234567890.0,
    # Other numbers; JSON has one kind, so that a whole one is one.
    "1.0": 1,
    "1.50": 1.5,
    "5.": 5,
    ".5": 0.5,
    "-.5": -0.5,
    "+.5": 0.5,
    "-0.0": 0,
    "1e3": 1000,
    "1.e3": 1000,
    "12e03": 12000,
    "1e-5": 1e-05,
    "1e20": 1e20,
    "1e": "1e",
    "e3": "e3",
    "1.2.3": "1.2.3",
    "1e400": "1e400",
    "1e-400": 0,
    "1" * 5000: "1" * 5000,
    "inf": "inf",
    "NaN": "NaN",
    "0x1p4": "0x1p4",
    "٣": "٣",
    ".": ".",
    "+": "+",
    "--1": "--1",
    # Dates are text.
    "2026-01-01": "2026-01-01",
    "2026-02-30": "2026-02-30",
    "2026-01-01T10:00:00Z": "2026-01-01T10:00:00Z",
    # Signs of other versions.
    "<<": "<<",
    "=": "=",
    # Quotes and tags.
    "'1'": "1",
    '"yes"': "yes",
    "!!str 1": "1",
    "!!str ~": "~",
    "! 1": "1",
    "!<tag:yaml.org,2002:str> 1": "1",
    "!!int '1'": 1,
    "!!float 1": 1,
    "!!bool yes": True,
    "!!null ''": None,
    "!!map {b: 1}": {"b": 1},
    "!!seq [1]": [1],
    # Text.
    "x\n    y": "x y",
    "x #y": "x",
    "x#y": "x#y",
    '"\\U0001F600"': "\U0001f600",
    "|-\n    x\n    y": "x\ny",
    # Lists and maps.
    "{b:1}": {"b:1": None},
    '{"b":1}': {"b": 1},
    "{b, c}": {"b": None, "c": None},
    "[1, 2,]": [1, 2],
    "[b: 1, c: 2]": [{"b": 1}, {"c": 2}],
    "{1: x, yes: z, 0x10: u, 2026-01-01: v, 1:30: w, 'no': t}": {
        "1": "x",
        "true": "z",
        "16": "u",
        "2026-01-01": "v",
        "1:30": "w",
        "no": "t",
    },
    # Anchors, and maps merged into others.
    "[&x yes, *x]": [True, True],
    "[&x 1, &x 2, *x]": [1, 2, 2],
    "[&x a, {*x : b}]": ["a", {"a": "b"}],
    "[&x {b: 1, c: 2}, {<<: *x, b: 3}]": [{"b": 1, "c": 2}, {"b": 3, "c": 2}],
    "[&x {b: 1}, &u {b: 2, c: 3}, {<<: [*x, *u]}]": [{"b": 1}, {"b": 2, "c": 3}, {"b": 1, "c": 3}],
    "{<<: {b: 1}}": {"b": 1},
    "[&x {b: 1}, {'<<': *x}]": [{"b": 1}, {"<<": {"b": 1}}],
    "[&x {b: 1}, &u {<<: *x, c: 2}, {<<: *u}]": [{"b": 1}, {"b": 1, "c": 2}, {"b": 1, "c": 2}],
}

REFUSED = {
    ".inf": "found .inf, expected a finite number",
    "-.INF": "found -.INF, expected a finite number",
    ".nan": "found .nan, expected a finite number",
    "!!int x": "found 'x', expected a value of the type !!int",
    "!!bool 1": "found '1', expected a value of the type !!bool",
    "[*x]": "*x is not defined",
    "&x [*x]": "*x is inside the value that &x defines",
    "&x {b: {c: *x}}": "*x is inside the value that &x defines",
    "{~: b}": "found the key None, expected text",
    "{[b]: c}": "found the key ['b'], expected text",
    "{<<: 1}": "<< merges a map, or a list of maps",
    "{<<: [1]}": "<< merges a map, or a list of maps",
    "b: c": "not YAML: mapping values are not allowed in this context",
    "'b\x01'": "not YAML: found the control character '\\x01'",
    "[1,,2]": "not YAML: did not find expected node content while parsing a flow node",
}
"""What kubectl refuses too."""

REFUSED_HERE = {
    "{b: 1, b: 2}": "the key 'b' already occurs in line 5 of this map; expected it once",
    "{1: a, '1': b}": "the key '1' already occurs in line 5 of this map; expected it once",
    "[&x {b: 1}, {b: 2, <<: *x}]": "<< has 'b' too, which is in line 5 of this map; expected << to be",
    "[&x {b: 1}, {<<: *x, <<: *x}]": "<< already occurs in line 5 of this map; expected <<: [*one, *other]",
    "{1.5: b}": "found the key 1.5, expected text; write it in quotes",
    "!foo bar": "the tag !foo has no meaning in a manifest",
    "!!binary aGk=": "the tag !!binary has no meaning in a manifest",
    "!!timestamp 2026-01-01": "the tag !!timestamp has no meaning in a manifest",
    "!!set {b, c}": "the tag !!set has no meaning in a manifest",
}
"""What kubectl takes, the later key of two say; a mistake, or nothing that a manifest needs."""


def document(value: str) -> str:
    return f"apiVersion: fleetjob.dev/v1\nkind: FleetJob\nmetadata: {{name: x}}\nspec:\n  a: {value}\n"


@functools.cache
def kubectl() -> str | None:
    assets = Path(os.environ.get("KUBEBUILDER_ASSETS", "/nonexistent")) / "kubectl"
    return str(assets) if assets.exists() else shutil.which("kubectl")


def asked(text: str) -> Any:
    """Return what kubectl makes of a manifest's field, or None where it refuses it; no cluster is asked."""
    command = [kubectl() or "", "annotate", "--local", "--output=json", "--filename=-", "x=y"]
    ended = subprocess.run(
        command, input=text, capture_output=True, text=True, timeout=30, env={"HOME": "/nonexistent"}
    )
    return _parsed(ended.stdout)["spec"] if ended.returncode == 0 else None


def _parsed(text: str) -> Any:
    """Read JSON as the API server does: what does not fit into 64 bits is a float."""
    return json.loads(
        text, parse_int=lambda digits: int(digits) if abs(int(digits)) < INT64 else float(digits)
    )


@pytest.fixture(params=["libyaml", "python"])
def parser(request, monkeypatch):
    """Read with each of PyYAML's two parsers."""
    if request.param == "python":
        monkeypatch.setattr(yaml_reader, "_PARSER", yaml.SafeLoader)


def read(value: str) -> Any:
    (node,) = read_documents(document(value))
    return node.value["spec"]["a"]


@pytest.mark.usefixtures("parser")
@pytest.mark.parametrize("written", VALUES)
def test_a_value_means(written):
    found = read(written)
    assert (found, type(found)) == (VALUES[written], type(VALUES[written]))


@pytest.mark.programs
@pytest.mark.skipif(kubectl() is None, reason="there is no kubectl")
def test_kubectl_means_the_same():
    """One call, since each takes a tenth of a second: all values in one map."""
    names = {f"v{number}": written for number, written in enumerate(VALUES)}
    fields = "".join(f"  {name}: {written}\n" for name, written in names.items())
    text = document("").removesuffix("  a: \n") + fields
    found = asked(text)
    (node,) = read_documents(text)
    expected = json.loads(json.dumps(node.value["spec"]))
    for name, written in names.items():
        assert found.get(name) == expected[name] == VALUES[written], written


@pytest.mark.parametrize("written", REFUSED | REFUSED_HERE)
def test_what_is_refused(written):
    with pytest.raises(YamlProblem) as raised:
        read(written)
    assert (REFUSED | REFUSED_HERE)[written] in str(raised.value)
    assert raised.value.line == 4


@pytest.mark.programs
@pytest.mark.skipif(kubectl() is None, reason="there is no kubectl")
@pytest.mark.parametrize("written", REFUSED)
def test_kubectl_refuses_the_same(written):
    assert asked(document(written)) is None


def bomb(levels: int, width: int, innermost: str = "x") -> str:
    lines = [f"a0: &a0 [{', '.join([innermost] * width)}]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "said", "line"),
    [
        pytest.param(bomb(9, 9), "expands to more than 1,572,864 characters", 5, id="nine-levels-of-nine"),
        pytest.param(bomb(2, 100, "x" * 1000), "expands to more", 1, id="a-long-text-many-times"),
        pytest.param(
            "a: &a {b: " + "x" * 100_000 + "}\nc: [" + "{<<: *a}, " * 20 + "]", "expands", 1, id="merged"
        ),
        pytest.param("[" * 2000, f"nested more than {MAX_DEPTH} deep", 0, id="nested-lists"),
        pytest.param("{a: " * 2000, f"nested more than {MAX_DEPTH} deep", 0, id="nested-maps"),
        pytest.param(
            bomb(200, 1), f"*a98 nests lists and maps more than {MAX_DEPTH} deep", 99, id="nested-by-aliases"
        ),
        pytest.param("a: [" + "1," * MAX_UNFOLDED + "]", "expands to more", 0, id="a-long-list"),
    ],
)
def test_reading_has_an_end(text, said, line):
    began = time.process_time()
    with pytest.raises(YamlProblem) as raised:
        read_documents(text)
    assert time.process_time() - began < 10
    assert said in str(raised.value)
    assert raised.value.line == line


def test_aliases_within_reason_are_read():
    (node,) = read_documents(bomb(4, 9))
    assert len(node.value["a3"]) == 9


def test_documents_have_their_own_anchors():
    documents = read_documents("# nothing\n---\na: &x 1\n---\n---\nb: 2\n")
    assert [node.value for node in documents] == [{"a": 1}, {"b": 2}]
    with pytest.raises(YamlProblem, match=r"\*x is not defined"):
        read_documents("a: &x 1\n---\nb: *x\n")


def test_each_field_knows_its_line():
    text = "a:\n  b: 1\n  nvidia.com/gpu:\n    2\n  c:\n  - d: &x\n      e: 1\n  - *x\n"
    (node,) = read_documents(text)
    assert {path: line + 1 for path, line in node.lines()} == {
        "": 1,
        "a": 1,
        "a.b": 2,
        "a.nvidia.com/gpu": 3,
        "a.c": 5,
        "a.c[0]": 6,
        "a.c[0].d": 6,
        "a.c[0].d.e": 7,
        "a.c[1]": 6,
        "a.c[1].e": 7,
    }
