"""The manifest: which files a checkpoint has, what is in each, and how to know that it is whole."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any, Final

from fleet.checkpoint.fields import PARSE_ERRORS, items, mapping, text, whole_number
from fleet.checkpoint.files import open_file
from fleet.errors import CheckpointError
from fleet.tables.shards import SHARDS

__all__ = [
    "BEGUN_SUFFIX",
    "MANIFEST_NAME",
    "MOST_BEFORE",
    "REPLACED_NAME",
    "BaseRecord",
    "BlockRecord",
    "FileRecord",
    "Manifest",
    "RowsRecord",
]

MANIFEST_NAME: Final = "manifest.json"
REPLACED_NAME: Final = "manifest.replaced.json"
"""The manifest before, kept until every server has the new one."""
BEGUN_SUFFIX: Final = ".begun"
"""Ends the name of a manifest that names one file which is about to be written."""
FORMAT: Final = "fleet-checkpoint-2"
MOST_BEFORE: Final = 1000
"""How many saves before it a manifest names."""
_READABLE: Final = {"fleet-checkpoint-1", FORMAT}
"""The first one told of no files that lie beside it."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """One piece, as a file holds it."""

    param: str
    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: str
    tensor: str
    """The name of the value in the file."""
    state: Mapping[str, Any]
    """The optimizer's entries, as `values.encode` writes them."""

    @classmethod
    def from_fields(cls, fields: object) -> "BlockRecord":
        """Return a record from its fields; raises as `FileRecord.from_fields`."""
        found = mapping("a block", fields)
        shape = tuple(whole_number("shape", each) for each in items("shape", found["shape"]))
        begin = whole_number("begin", found["begin"])
        end = whole_number("end", found["end"])
        if end - begin != math.prod(shape):
            raise ValueError(f"a block has the elements {begin} to {end} and the shape {list(shape)}")
        param, dtype, tensor = (text(name, found[name]) for name in ("param", "dtype", "tensor"))
        return cls(param, begin, end, shape, dtype, tensor, mapping("state", found["state"]))


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """The checkpoint to whose rows those of a file belong."""

    directory: str
    """Beside that of the checkpoint which has the file."""
    save: str
    """The random name of its save."""

    @classmethod
    def from_fields(cls, fields: object) -> "BaseRecord":
        """Return a record from its fields; raises as `FileRecord.from_fields`."""
        found = mapping("a base", fields)
        return cls(_plain_name(text("directory", found["directory"])), text("save", found["save"]))


@dataclass(frozen=True, slots=True)
class RowsRecord:
    """Rows of a table, as a file holds them."""

    table: str
    shards: tuple[int, ...]
    """The virtual shards of which the file has all rows."""
    updates: int
    """How many updates the table has had."""
    base: BaseRecord | None = None
    """Where all rows are, if the file has only those that have changed since."""

    @classmethod
    def from_fields(cls, fields: object) -> "RowsRecord":
        """Return a record from its fields; raises as `FileRecord.from_fields`."""
        found = mapping("rows", fields)
        shards = tuple(whole_number("a shard", each) for each in items("shards", found["shards"]))
        if any(shard >= SHARDS for shard in shards):
            raise ValueError(f"rows are of the shards {list(shards)}, expected 0 to {SHARDS - 1}")
        base = found.get("base")
        return cls(
            text("table", found["table"]),
            shards,
            whole_number("updates", found["updates"]),
            None if base is None else BaseRecord.from_fields(base),
        )


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str
    blocks: tuple[BlockRecord, ...] = ()
    trainer: int = -1
    """Whose own part it is; -1 for a shard."""
    rows: RowsRecord | None = None
    """The rows of a table that the file has, if it does."""

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "FileRecord":
        """Return what `to_json` wrote."""
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, fields: object) -> "FileRecord":
        """Return a record from its fields.

        Raises
        ------
        ValueError, TypeError, KeyError
            These are no record's.
        """
        found = mapping("a file", fields)
        name = _plain_name(text("name", found["name"]))
        rows = found.get("rows")
        blocks = tuple(BlockRecord.from_fields(block) for block in items("blocks", found["blocks"]))
        return cls(
            name,
            whole_number("bytes", found["bytes"]),
            text("sha256", found["sha256"]),
            blocks,
            whole_number("trainer", found.get("trainer", -1), least=-1),
            None if rows is None else RowsRecord.from_fields(rows),
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of one checkpoint.

    Attributes
    ----------
    save : str
        The random name of the save, which the files carry in theirs.
    step : int
        The number of steps that every block had made.
    facts : mapping of str to str
        What whoever loads it must have in common with who saved it: names, shapes and types of the
        parameters, and the optimizers' classes.
    files : tuple of FileRecord
    trainer_part : str
        The name of the file with the trainer's own part; empty when there is none.
    here : tuple of str
        The names of the files that lay beside this manifest when it was written: those that are damage when
        they are missing. The others are in other servers' directories.
    steps : mapping of str to int
        The number of steps of each trainer, by its index, where trainers are not in step.
    after : tuple of str or None
        The random names of the saves before this one in the same training, the newest last, `MOST_BEFORE` at
        most. None where nobody has said.
    """

    save: str
    step: int
    facts: Mapping[str, str]
    files: tuple[FileRecord, ...]
    trainer_part: str = ""
    here: tuple[str, ...] = ()
    steps: Mapping[str, int] = field(default_factory=dict)
    after: tuple[str, ...] | None = None
    format: str = field(default=FORMAT)

    @property
    def bases(self) -> frozenset[BaseRecord]:
        """The checkpoints that this one needs beside its own files."""
        found = (file.rows.base for file in self.files if file.rows is not None)
        return frozenset(base for base in found if base is not None)

    def to_json(self) -> str:
        """Return the manifest as JSON, with a digest of itself."""
        fields = asdict(self)
        return json.dumps({**fields, "sha256": _digest(fields)}, indent=1) + "\n"

    @classmethod
    def read(cls, directory: Path, name: str = MANIFEST_NAME) -> "Manifest":
        """Read a directory's manifest.

        Raises
        ------
        CheckpointError
            There is none, or it is not what `to_json` writes.
        """
        path = directory / name
        try:
            with open_file(path) as file:
                data = file.read()
        except OSError as error:
            raise CheckpointError(
                f"{directory} is no checkpoint: {path.name} cannot be read ({error.strerror}); expected a "
                "directory that fleet.save_persistables or fleet.save_check_point has finished to write"
            ) from error
        return cls.from_bytes(data, str(path))

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Manifest":
        """Return the manifest that a file's content is, as `parse` does."""
        return cls.parse(data.decode("utf-8", errors="backslashreplace"), path)

    @classmethod
    def parse(cls, text: str, path: str) -> "Manifest":
        """Return the manifest that a text is; `path` is for messages."""
        try:
            fields = json.loads(text)
            found = fields.get("format")
            said = fields.pop("sha256", None)
            digest = _digest(fields)
        except PARSE_ERRORS as error:
            raise CheckpointError(
                f"{path} is truncated or no manifest: {error}; expected the JSON that a save writes last; "
                "load another checkpoint"
            ) from error
        if not isinstance(found, str) or found not in _READABLE:
            raise CheckpointError(
                f"{path} has the format {found!r}; expected {FORMAT!r}: it was written by something else, or "
                "by another version; load another checkpoint"
            )
        if said != digest:
            raise CheckpointError(
                f"{path} was changed after it had been written: its digest is {said}, expected "
                f"{digest}; load another checkpoint"
            )
        try:
            return cls._from_fields(fields)
        except PARSE_ERRORS as error:
            raise CheckpointError(
                f"{path} is no manifest: {error}; expected the JSON that a save writes last; load another "
                "checkpoint"
            ) from error

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> "Manifest":
        files = tuple(FileRecord.from_fields(file) for file in items("files", fields["files"]))
        names = {file.name for file in files}
        if len(names) < len(files):
            raise ValueError("two files have one name")
        trainer_part = text("trainer_part", fields["trainer_part"])
        if trainer_part and trainer_part not in names:
            raise ValueError(f"the trainer's part {trainer_part!r} is none of the files")
        facts = mapping("facts", fields["facts"])
        steps = mapping("steps", fields.get("steps", {}))
        after = fields.get("after")
        here = tuple(text("here", name) for name in items("here", fields.get("here", ())))
        if not names.issuperset(here):
            raise ValueError(f"here is {list(here)}; expected names of its files")
        return cls(
            save=text("save", fields["save"]),
            step=whole_number("step", fields["step"]),
            facts={text("a fact", name): text(name, fact) for name, fact in facts.items()},
            files=files,
            trainer_part=trainer_part,
            here=here,
            steps={
                str(whole_number("a trainer", int(each))): whole_number(f"steps of {each}", step)
                for each, step in steps.items()
            },
            after=None if after is None else tuple(text("after", save) for save in items("after", after)),
        )


def _plain_name(name: str) -> str:
    if name in {"", ".", ".."} or "\0" in name or PurePath(name).name != name:
        raise ValueError(f"the file name {name!r} leads out of the directory")
    return name


def _digest(fields: Mapping[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
