"""The manifest: which files a checkpoint has, what is in each, and how to know that it is whole."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any, Final

from fleet.errors import CheckpointError

__all__ = ["MANIFEST_NAME", "REPLACED_NAME", "BlockRecord", "FileRecord", "Manifest"]

MANIFEST_NAME: Final = "manifest.json"
REPLACED_NAME: Final = "manifest.replaced.json"
"""The manifest before, kept until every server has the new one."""
FORMAT: Final = "fleet-checkpoint-1"


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


@dataclass(frozen=True, slots=True)
class FileRecord:
    """One file of a checkpoint."""

    name: str
    bytes: int
    sha256: str
    blocks: tuple[BlockRecord, ...] = ()

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "FileRecord":
        """Return what `to_json` wrote."""
        return cls.from_fields(json.loads(text))

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> "FileRecord":
        """Return a record from its fields.

        Raises
        ------
        ValueError, TypeError, KeyError
            These are no record's.
        """
        name = fields["name"]
        if PurePath(name).name != name:
            raise ValueError(f"the file name {name!r} leads out of the directory")
        blocks = tuple(BlockRecord(**{**block, "shape": tuple(block["shape"])}) for block in fields["blocks"])
        return cls(name, int(fields["bytes"]), str(fields["sha256"]), blocks)


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
    """

    save: str
    step: int
    facts: Mapping[str, str]
    files: tuple[FileRecord, ...]
    trainer_part: str = ""
    format: str = field(default=FORMAT)

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
            data = path.read_bytes()
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
        except (ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{path} is truncated or no manifest: {error}; expected the JSON that a save writes last; "
                "load another checkpoint"
            ) from error
        if found != FORMAT:
            raise CheckpointError(
                f"{path} has the format {found!r}; expected {FORMAT!r}: it was written by something else, or "
                "by another version; load another checkpoint"
            )
        said = fields.pop("sha256", None)
        if said != _digest(fields):
            raise CheckpointError(
                f"{path} was changed after it had been written: its digest is {said}, expected "
                f"{_digest(fields)}; load another checkpoint"
            )
        try:
            files = tuple(FileRecord.from_fields(file) for file in fields.pop("files"))
            return cls(files=files, **fields)
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{path} is no manifest: {error}; expected the JSON that a save writes last; load another "
                "checkpoint"
            ) from error


def _digest(fields: Mapping[str, Any]) -> str:
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
