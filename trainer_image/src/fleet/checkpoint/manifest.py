"""The manifest of a checkpoint, which lists the contents and digest of each file."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any, Final

from fleet.checkpoint.files import open_file
from fleet.checkpoint.values import PARSE_ERRORS, as_count, as_list, as_mapping, as_text
from fleet.errors import CheckpointError
from fleet.tables.ids import SHARDS

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
"""The file name of the previous manifest, which is kept until every server has the new one."""
BEGUN_SUFFIX: Final = ".begun"
"""The suffix of a manifest that announces one file before it is written."""
FORMAT: Final = "fleet-checkpoint-2"
MOST_BEFORE: Final = 1000
"""Maximum number of earlier saves that a manifest names."""
_READABLE: Final = {"fleet-checkpoint-1", FORMAT}
"""The formats that this version can read. Format 1 has no `Manifest.here`."""


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A manifest entry for a part of a parameter in a file."""

    param: str
    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: str
    tensor: str
    """The name of the value's tensor in the file."""
    state: Mapping[str, Any]
    """The optimizer state of these elements, encoded by `values.encode`."""

    @classmethod
    def from_fields(cls, fields: object) -> "BlockRecord":
        """Parse a record; raise the same errors as `FileRecord.from_fields`."""
        found = as_mapping("a block", fields)
        shape = tuple(as_count("shape", each) for each in as_list("shape", found["shape"]))
        begin = as_count("begin", found["begin"])
        end = as_count("end", found["end"])
        if end - begin != math.prod(shape):
            raise ValueError(f"a block has the elements {begin} to {end} and the shape {list(shape)}")
        param, dtype, tensor = (as_text(name, found[name]) for name in ("param", "dtype", "tensor"))
        return cls(param, begin, end, shape, dtype, tensor, as_mapping("state", found["state"]))


@dataclass(frozen=True, slots=True)
class BaseRecord:
    """A manifest entry for the full checkpoint on which an incremental file of rows is based."""

    directory: str
    """The name of the full checkpoint's directory, which is in the same folder as the incremental one."""
    save: str
    """The random name of the save that wrote the full checkpoint."""

    @classmethod
    def from_fields(cls, fields: object) -> "BaseRecord":
        """Parse a record; raise the same errors as `FileRecord.from_fields`."""
        found = as_mapping("a base", fields)
        return cls(_plain_name(as_text("directory", found["directory"])), as_text("save", found["save"]))


@dataclass(frozen=True, slots=True)
class RowsRecord:
    """A manifest entry for the rows of a table in a file."""

    table: str
    shards: tuple[int, ...]
    """The virtual shards whose rows are all in the file."""
    updates: int
    """The number of updates that the table had received when it was saved."""
    base: BaseRecord | None = None
    """The checkpoint that holds the unchanged rows, if the file is incremental; None otherwise."""

    @classmethod
    def from_fields(cls, fields: object) -> "RowsRecord":
        """Parse a record; raise the same errors as `FileRecord.from_fields`."""
        found = as_mapping("rows", fields)
        shards = tuple(as_count("a shard", each) for each in as_list("shards", found["shards"]))
        if any(shard >= SHARDS for shard in shards):
            raise ValueError(f"rows are of the shards {list(shards)}, expected 0 to {SHARDS - 1}")
        base = found.get("base")
        return cls(
            as_text("table", found["table"]),
            shards,
            as_count("updates", found["updates"]),
            None if base is None else BaseRecord.from_fields(base),
        )


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A manifest entry for one file of a checkpoint."""

    name: str
    bytes: int
    sha256: str
    blocks: tuple[BlockRecord, ...] = ()
    trainer: int = -1
    """The trainer whose part the file holds; -1 for a server's shard."""
    rows: RowsRecord | None = None
    """The entry for a table's rows in the file; None if the file holds none."""

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "FileRecord":
        """Parse the result of `to_json`."""
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, fields: object) -> "FileRecord":
        """Parse a record.

        Raises
        ------
        ValueError, TypeError, KeyError
            A field is missing, or has a wrong type or value.
        """
        found = as_mapping("a file", fields)
        name = _plain_name(as_text("name", found["name"]))
        rows = found.get("rows")
        blocks = tuple(BlockRecord.from_fields(block) for block in as_list("blocks", found["blocks"]))
        return cls(
            name,
            as_count("bytes", found["bytes"]),
            as_text("sha256", found["sha256"]),
            blocks,
            as_count("trainer", found.get("trainer", -1), least=-1),
            None if rows is None else RowsRecord.from_fields(rows),
        )


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest of one checkpoint.

    Attributes
    ----------
    save : str
        The random name of the save. Every file name contains it.
    step : int
        The number of steps that every block had received.
    facts : mapping of str to str
        The facts that must be equal in the saving and the loading process: names, shapes and dtypes of the
        parameters, and the optimizer classes.
    files : tuple of FileRecord
    trainer_part : str
        The name of the file with trainer 0's part; empty if there is none.
    here : tuple of str
        The files that were in this directory when the manifest was written. If one is missing, the checkpoint
        is damaged. All other files are in the directories of other servers.
    steps : mapping of str to int
        The number of steps of each trainer, by index, in modes without a common step.
    after : tuple of str or None
        The random names of the earlier saves of this training run, oldest first, at most `MOST_BEFORE`. None
        if they are unknown.
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
        """The other checkpoints whose rows this checkpoint needs."""
        found = (file.rows.base for file in self.files if file.rows is not None)
        return frozenset(base for base in found if base is not None)

    def to_json(self) -> str:
        """Return the manifest as JSON that includes a digest of all other fields."""
        fields = asdict(self)
        return json.dumps({**fields, "sha256": _digest(fields)}, indent=1) + "\n"

    @classmethod
    def read(cls, directory: Path, name: str = MANIFEST_NAME) -> "Manifest":
        """Read the manifest of a directory.

        Raises
        ------
        CheckpointError
            The file is missing or damaged.
        """
        path = directory / name
        try:
            with open_file(path) as file:
                data = file.read()
        except OSError as error:
            raise CheckpointError(
                f"{directory} is not a checkpoint: {path.name} cannot be read ({error.strerror}); expected a "
                "directory that fleet.save_persistables or fleet.save_check_point has finished writing"
            ) from error
        return cls.from_bytes(data, str(path))

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> "Manifest":
        """Parse the bytes of a manifest file; see `parse`."""
        # Invalid UTF-8 must not raise here: `parse` reports it like any other damage.
        return cls.parse(data.decode("utf-8", errors="backslashreplace"), path)

    @classmethod
    def parse(cls, text: str, path: str) -> "Manifest":
        """Parse the JSON of a manifest.

        Parameters
        ----------
        text : str
        path : str
            Names the file in error messages.

        Raises
        ------
        CheckpointError
            The text is truncated, changed, of an unknown format, or not a manifest.
        """
        try:
            fields = json.loads(text)
            found = fields.get("format")
            recorded = fields.pop("sha256", None)
            digest = _digest(fields)
        except PARSE_ERRORS as error:
            raise CheckpointError(
                f"{path} is truncated or not a manifest: {error}; expected the JSON that a save writes last; "
                "load another checkpoint"
            ) from error
        if not isinstance(found, str) or found not in _READABLE:
            raise CheckpointError(
                f"{path} has the format {found!r}; expected {FORMAT!r}: another program or version wrote it; "
                "load another checkpoint"
            )
        if recorded != digest:
            raise CheckpointError(
                f"{path} was changed after it had been written: its digest is {recorded}, expected "
                f"{digest}; load another checkpoint"
            )
        try:
            return cls._from_fields(fields)
        except PARSE_ERRORS as error:
            raise CheckpointError(
                f"{path} is not a manifest: {error}; expected the JSON that a save writes last; load another "
                "checkpoint"
            ) from error

    @classmethod
    def _from_fields(cls, fields: Mapping[str, Any]) -> "Manifest":
        files = tuple(FileRecord.from_fields(file) for file in as_list("files", fields["files"]))
        names = {file.name for file in files}
        if len(names) < len(files):
            raise ValueError("two files have the same name")
        trainer_part = as_text("trainer_part", fields["trainer_part"])
        if trainer_part and trainer_part not in names:
            raise ValueError(f"the trainer's part {trainer_part!r} is not one of the files")
        here = tuple(as_text("here", name) for name in as_list("here", fields.get("here", ())))
        if not names.issuperset(here):
            raise ValueError(f"here is {list(here)}; expected names of its files")
        facts = as_mapping("facts", fields["facts"])
        steps = as_mapping("steps", fields.get("steps", {}))
        after = fields.get("after")
        return cls(
            save=as_text("save", fields["save"]),
            step=as_count("step", fields["step"]),
            facts={as_text("a fact", name): as_text(name, fact) for name, fact in facts.items()},
            files=files,
            trainer_part=trainer_part,
            here=here,
            steps={
                str(as_count("a trainer", int(each))): as_count(f"steps of {each}", step)
                for each, step in steps.items()
            },
            after=None
            if after is None
            else tuple(as_text("after", save) for save in as_list("after", after)),
        )


def _plain_name(name: str) -> str:
    # A manifest is untrusted input, and the files that it names are opened and deleted.
    if name in {"", ".", ".."} or "\0" in name or PurePath(name).name != name:
        raise ValueError(f"the file name {name!r} points outside the directory")
    return name


def _digest(fields: Mapping[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
