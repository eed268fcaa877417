"""Reading a checkpoint: whatever was cut how, and every file that is not what its manifest says."""

import contextlib
import hashlib
import itertools
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet.checkpoint import (
    Checkpoint,
    FileRecord,
    Manifest,
    Piece,
    commit,
    tidy,
    write_shard,
    write_trainer_part,
)
from fleet.errors import CheckpointError

FACTS = {"parameter w": "float32[10, 3] in param group 0", "optimizer of param group 0": "adam"}
WHOLE = torch.arange(30.0).reshape(10, 3)


def piece(begin: int, end: int) -> Piece:
    """Return some rows of `WHOLE`, as a server that holds them would write them."""
    rows = WHOLE[begin:end].clone()
    state = {"step": torch.tensor(7.0), "exp_avg": rows * 2, "count": 3}
    return Piece("w", begin * 3, end * 3, rows, state)


def write(directory: Path, cuts: tuple[int, ...] = (0, 6, 10), save: str = "aa") -> Checkpoint:
    """Write `WHOLE` as so many shards, and return the checkpoint."""
    pairs = list(itertools.pairwise(cuts))
    files = [
        write_shard(directory, save, f"{index}-of-{len(pairs)}", [piece(begin, end)])
        for index, (begin, end) in enumerate(pairs)
    ]
    trainer = write_trainer_part(directory, save, b"trainer")
    commit(directory, Manifest(save, 7, FACTS, (*files, trainer), trainer.name).to_json())
    return Checkpoint(directory)


@settings(max_examples=25)
@given(
    st.sets(st.integers(1, 9)).map(lambda inner: (0, *sorted(inner), 10)),
    st.sets(st.integers(1, 9)).map(lambda inner: (0, *sorted(inner), 10)),
)
def test_every_element_and_its_state_come_back_however_they_are_cut(tmp_path_factory, written, wanted):
    checkpoint = write(tmp_path_factory.mktemp("cut"), written)
    for begin, end in itertools.pairwise(wanted):
        found, expected = checkpoint.piece("w", begin * 3, end * 3, (end - begin, 3)), piece(begin, end)
        assert torch.equal(found.value, expected.value)
        assert torch.equal(found.state["exp_avg"], expected.state["exp_avg"])
        assert float(found.state["step"]) == 7.0
        assert found.state["count"] == 3
        assert found.state.keys() == expected.state.keys()


def test_what_belongs_to_the_elements_as_a_whole_is_not_cut_anew(tmp_path):
    factored = Piece("w", 0, 30, WHOLE, {"row": torch.ones(10)})
    file = write_shard(tmp_path, "aa", "0-of-1", [factored])
    commit(tmp_path, Manifest("aa", 1, FACTS, (file,)).to_json())
    checkpoint = Checkpoint(tmp_path)
    assert torch.equal(checkpoint.piece("w", 0, 30, (10, 3)).state["row"], torch.ones(10))
    with pytest.raises(CheckpointError, match=r"row of w has the shape \[10\].*cannot be sliced differently"):
        checkpoint.piece("w", 0, 15, (5, 3))


def test_state_within_lists_and_arrays_comes_back_and_is_not_cut_anew(tmp_path):
    state = {"history": [torch.ones(10, 3), {"norm": torch.tensor(2.0)}], "array": np.arange(3)}
    other = Piece("w.history", 0, 1, torch.zeros(1), {})
    file = write_shard(tmp_path, "aa", "0-of-1", [Piece("w", 0, 30, WHOLE, state), other])
    commit(tmp_path, Manifest("aa", 1, FACTS, (file,)).to_json())
    checkpoint = Checkpoint(tmp_path)
    found = checkpoint.piece("w", 0, 30, (10, 3)).state
    assert torch.equal(found["history"][0], torch.ones(10, 3))
    assert float(found["history"][1]["norm"]) == 2.0
    assert found["array"].tolist() == [0, 1, 2]
    with pytest.raises(
        CheckpointError, match=r"optimizer's array of w has the shape \[3\].*cannot be sliced"
    ):
        checkpoint.piece("w", 0, 15, (5, 3))


def test_a_directory_without_a_manifest_is_no_checkpoint(tmp_path):
    write_shard(tmp_path, "aa", "0-of-1", [piece(0, 10)])
    with pytest.raises(CheckpointError, match=f"{tmp_path} is not a checkpoint"):
        Checkpoint(tmp_path)


def test_the_trainers_part_comes_from_who_has_it(tmp_path):
    checkpoint = write(tmp_path)
    assert checkpoint.part_of(0) == b"trainer"
    (tmp_path / checkpoint.manifest.trainer_part).unlink()
    assert checkpoint.part_of(0) == b"trainer"  # kept, for trainers that come back
    assert Checkpoint(tmp_path).part_of(0) is None


def test_a_trainers_part_that_is_missing_or_truncated_is_told_before_anything_is_read(tmp_path):
    checkpoint = write(tmp_path)
    checkpoint.check_here()
    path = tmp_path / checkpoint.manifest.trainer_part
    for data, words in ((b"train", "is truncated"), (None, "cannot be read")):
        path.unlink() if data is None else path.write_bytes(data)
        with pytest.raises(CheckpointError, match=rf"trainer-aa\.safetensors .*{words}"):
            checkpoint.check_here()


def break_truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-8])


def break_changed(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def break_foreign(path: Path) -> None:
    other = path.parent / "other"
    file = write_shard(other, "bb", "0-of-2", [piece(0, 6)])
    shutil.copy(other / file.name, path)


def break_missing(path: Path) -> None:
    path.unlink()


def break_text(path: Path) -> None:
    path.write_bytes(b"x" * path.stat().st_size)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(break_truncated, r"has \d+ bytes, expected \d+: it is truncated", id="truncated"),
        pytest.param(break_changed, r"has the SHA-256 .* expected .*: it was changed", id="changed"),
        pytest.param(break_foreign, r"belongs to the save 'bb', and the manifest to 'aa'", id="foreign"),
        pytest.param(break_missing, r"cannot be read \(No such file.* needed here", id="missing"),
        pytest.param(break_text, r"it was changed, or is not a safetensors file", id="no-safetensors"),
    ],
)
def test_a_file_that_is_not_the_one_written_is_refused_by_name(tmp_path, spoil, words):
    checkpoint = write(tmp_path)
    path = tmp_path / checkpoint.manifest.files[0].name
    spoil(path)
    with pytest.raises(CheckpointError, match=words) as caught:
        checkpoint.piece("w", 0, 18, (6, 3))
    assert str(path) in str(caught.value)
    # What lies in the other file is still good: each server may have a directory of its own.
    assert torch.equal(checkpoint.piece("w", 18, 30, (4, 3)).value, WHOLE[6:])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda text: text[:40], "is truncated or not a manifest", id="truncated"),
        pytest.param(lambda _: '{"a": 1}', "has the format None; expected 'fleet-.*another", id="foreign"),
        pytest.param(
            lambda _: Manifest("aa", 1, {}, (1,)).to_json(),  # type: ignore[arg-type]
            "is not a manifest: .*load another checkpoint",
            id="no-record",
        ),
        pytest.param(lambda text: text.replace('"step": 7', '"step": 8'), "was changed after", id="changed"),
    ],
)
def test_a_manifest_that_is_not_the_one_written_is_refused_by_name(tmp_path, change, words):
    write(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(change(path.read_text()))
    with pytest.raises(CheckpointError, match=words) as caught:
        Checkpoint(tmp_path)
    assert str(path) in str(caught.value)


def test_elements_that_no_file_has_are_an_error(tmp_path):
    checkpoint = write(tmp_path, (0, 6))
    with pytest.raises(CheckpointError, match="elements of w only up to 18, expected 0 to 30"):
        checkpoint.piece("w", 0, 30, (10, 3))


def test_another_training_is_refused_with_the_difference(tmp_path):
    checkpoint = write(tmp_path)
    checkpoint.check(FACTS)
    with pytest.raises(CheckpointError, match=r"another model or optimizer: .*sgd here, adam there"):
        checkpoint.check({**FACTS, "optimizer of param group 0": "sgd"})


def test_a_second_save_in_the_same_directory_leaves_the_first_until_it_is_tidied(tmp_path):
    write(tmp_path)
    mine = {"mine.txt", "trainer-log.txt", "shard-notes.md", "manifest.json.bak"}
    for name in mine:
        (tmp_path / name).write_text("kept")
    announced = Manifest("dead", 0, {}, (FileRecord("shard-0-of-9-dead.safetensors", 0, ""),)).to_json()
    (tmp_path / "shard-0-of-9-dead.safetensors.begun").write_text(announced)
    for left in ("shard-0-of-9-dead.safetensors.tmp", "manifest.json.0123abcd.tmp"):
        (tmp_path / left).write_bytes(b"of a save that was cut short")
    checkpoint = write(tmp_path, (0, 10), save="bb")
    before = Checkpoint(tmp_path, "manifest.replaced.json")
    assert before.manifest.save == "aa"
    assert torch.equal(before.piece("w", 0, 30, (10, 3)).value, WHOLE)
    tidy(tmp_path)
    names = {file.name for file in checkpoint.manifest.files}
    assert {path.name for path in tmp_path.iterdir()} == names | {"manifest.json"} | mine


def test_a_manifest_that_is_no_text_is_refused_by_name(tmp_path):
    write(tmp_path)
    (tmp_path / "manifest.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CheckpointError, match=r"manifest\.json is truncated or not a manifest"):
        Checkpoint(tmp_path)


def test_pieces_of_which_only_one_has_state_are_not_joined(tmp_path):
    bare = Piece("w", 0, 18, WHOLE[:6].clone()), Piece("w", 18, 30, WHOLE[6:].clone())
    for order, pieces in enumerate(([piece(0, 6), bare[1]], [bare[0], piece(6, 10)])):
        directory = tmp_path / str(order)
        file = write_shard(directory, "aa", "0-of-1", pieces)
        commit(directory, Manifest("aa", 7, FACTS, (file,)).to_json())
        with pytest.raises(CheckpointError, match="different optimizer state for some elements of w"):
            Checkpoint(directory).piece("w", 0, 30, (10, 3))


def test_a_parameter_without_elements_comes_back(tmp_path):
    file = write_shard(tmp_path, "aa", "0-of-1", [Piece("none", 0, 0, torch.ones(0, 3))])
    commit(tmp_path, Manifest("aa", 7, FACTS, (file,)).to_json())
    assert Checkpoint(tmp_path).piece("none", 0, 0, (0, 3)).value.shape == (0, 3)
    with pytest.raises(CheckpointError, match="names no file"):
        Checkpoint(tmp_path).piece("other", 0, 0, (0, 3))


def test_a_file_name_that_leads_out_of_the_directory_is_refused(tmp_path):
    manifest = write(tmp_path).manifest
    fields = json.loads(manifest.files[0].to_json())
    with pytest.raises(ValueError, match="points outside the directory"):
        type(manifest.files[0]).from_fields({**fields, "name": "../passwd"})


def sealed(fields: Any) -> str:
    """Return a manifest with the digest that its fields have, as whoever meant harm would."""
    fields = {name: field for name, field in fields.items() if name != "sha256"}
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return json.dumps({**fields, "sha256": hashlib.sha256(canonical.encode()).hexdigest()})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", "7"),
        ("step", -1),
        ("step", 7.0),
        ("step", True),
        ("step", 2**63),
        ("step", None),
        ("save", 1),
        ("facts", []),
        ("facts", {"optimizer": 1}),
        ("files", {}),
        ("files", None),
        ("trainer_part", 5),
        ("trainer_part", "somewhere else"),
    ],
)
def test_a_field_of_another_type_or_out_of_its_range_is_refused_by_the_files_name(tmp_path, name, value):
    write(tmp_path)
    path = tmp_path / "manifest.json"
    path.write_text(sealed({**json.loads(path.read_text()), name: value}))
    with pytest.raises(CheckpointError, match=rf"{path} is not a manifest: .*load another"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("depth", [2_000, 200_000])
@pytest.mark.parametrize("inner", ["[" * 1, '{"a":'])
def test_json_of_any_depth_is_refused_by_the_files_name(tmp_path, depth, inner):
    write(tmp_path)
    path = tmp_path / "manifest.json"
    end = "]" if inner == "[" else "}"
    path.write_text('{"format": "fleet-checkpoint-1", "facts": ' + inner * depth + "1" + end * depth + "}")
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        Checkpoint(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of everything within a value of JSON."""
    within = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in within for place in places(item, (*path, key)))]


def test_whatever_a_manifest_says_is_read_or_is_an_error_that_names_its_folder(tmp_path):
    write(tmp_path)
    path = tmp_path / "manifest.json"
    written = path.read_text()

    @given(data=st.data())
    @settings(max_examples=100, deadline=None)
    def check(data: st.DataObject) -> None:
        fields = json.loads(written)
        *way, last = data.draw(st.sampled_from([place for place in places(fields) if place]))
        inner = fields
        for key in way:
            inner = inner[key]
        inner[last] = data.draw(JSON)
        path.write_text(sealed(fields))
        with contextlib.suppress(CheckpointError), naming(tmp_path):
            found = Checkpoint(tmp_path)
            found.check(FACTS)
            found.piece("w", 0, 30, (10, 3))

    check()


@contextlib.contextmanager
def naming(directory: Path) -> Iterator[None]:
    """See that an error names what it is about."""
    try:
        yield
    except CheckpointError as error:
        if str(directory) not in str(error):
            pytest.fail(f"the error names no file: {error}")
        raise


def test_the_first_format_which_told_less_is_read_still(tmp_path):
    write(tmp_path)
    path = tmp_path / "manifest.json"
    fields = json.loads(path.read_text())
    for file in fields["files"]:
        del file["trainer"]
    del fields["here"], fields["steps"]
    path.write_text(sealed({**fields, "format": "fleet-checkpoint-1"}))
    found = Checkpoint(tmp_path)
    found.check_here()
    assert torch.equal(found.piece("w", 0, 30, (10, 3)).value, WHOLE)
