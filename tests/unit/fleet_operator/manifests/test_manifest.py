from __future__ import annotations

import os

import pytest

from fleet_operator.manifests.manifest import MAX_BYTES, ManifestError, load_manifest


@pytest.mark.parametrize("written", ["2026-01-01", "2026-02-30", "2026-01-01T10:00:00Z"])
def test_a_date_without_quotes_is_text_as_it_is_to_kubectl(tmp_path, written):
    path = tmp_path / "fleetjob.yaml"
    path.write_text(f"env: [{{name: DAY, value: {written}}}]")
    assert load_manifest(path).document == {"env": [{"name": "DAY", "value": written}]}


def test_a_byte_order_mark_is_no_part_of_the_manifest(tmp_path):
    path = tmp_path / "fleetjob.yaml"
    path.write_bytes(b"\xef\xbb\xbfkind: FleetJob\n")
    assert load_manifest(path).document == {"kind": "FleetJob"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param(
            "kind: FleetJob\nspec: {a: [1, 2}\n",
            ":2:16: not YAML: did not find expected ',' or ']' while parsing a flow sequence\n"
            "    spec: {a: [1, 2}\n"
            "                   ^",
            id="yaml",
        ),
        pytest.param(
            "a: [1,\nb: 2\nc: 3\n",
            ":3:2: not YAML: did not find expected ',' or ']' while parsing a flow sequence that begins in"
            " line 1\n"
            "    c: 3\n"
            "     ^",
            id="yaml-that-went-wrong-before",
        ),
        pytest.param(
            "a: 'x\nb: 2\n",
            ":1:4: not YAML: found unexpected end of stream while scanning a quoted scalar\n"
            "    a: 'x\n"
            "       ^",
            id="quotes-without-an-end",
        ),
        pytest.param(
            "spec:\n  replicas: 1\n  replicas: 2\n",
            ":3:3: the key 'replicas' already occurs in line 2 of this map; expected it once\n"
            "      replicas: 2\n"
            "      ^",
            id="a-key-that-comes-twice",
        ),
        pytest.param(
            "a: \tb\n\x07", ":2:1: not YAML: found the control character '\\x07'\n     \n    ^", id="bell"
        ),
        pytest.param(
            f"{{{'a' * 300}: 1, b: *c}}",
            f":1:310: *c is not defined; expected &c at an earlier value\n    {'a' * 52}: 1, b: *c}}\n"
            f"    {' ' * 60}^",
            id="a-long-line",
        ),
        pytest.param(
            "a: &a\n- *a\n",
            ":2:3: *a is inside the value that &a defines\n    - *a\n      ^",
            id="recursive",
        ),
    ],
)
def test_what_cannot_be_read_is_shown_with_its_place(tmp_path, text, said):
    path = tmp_path / "fleetjob.yaml"
    path.write_text(text)
    with pytest.raises(ManifestError) as raised:
        load_manifest(path)
    assert str(raised.value) == f"{path}{said}"


def test_a_file_too_large_is_not_read_to_its_end(tmp_path):
    path = tmp_path / "fleetjob.yaml"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(ManifestError, match=f"is larger than {MAX_BYTES:,} bytes"):
        load_manifest(path)
