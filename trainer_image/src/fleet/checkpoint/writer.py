"""Writing and removing the files in a checkpoint's directory.

A save announces each file in a separate small manifest (``….begun``), then writes the file, and writes the
manifest last. An interrupted save therefore leaves the previous checkpoint intact, and all files that it
wrote are known by name. Cleaning removes only files that a manifest names, and follows no link below the
directory. Any other file stays, and so does the directory that contains it.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fleet.checkpoint.files import TEMPORARY, disk_errors, open_file, write_bytes, write_tensors
from fleet.checkpoint.manifest import (
    BEGUN_SUFFIX,
    MANIFEST_NAME,
    REPLACED_NAME,
    BlockRecord,
    FileRecord,
    Manifest,
)
from fleet.checkpoint.reader import Piece
from fleet.checkpoint.values import encode
from fleet.errors import CheckpointError, disk_error

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "announce",
    "commit",
    "is_written",
    "remove_checkpoint",
    "tidy",
    "write_shard",
    "write_trainer_part",
]

_MANIFESTS: Final = {MANIFEST_NAME, REPLACED_NAME}
_NO_FOLDER: Final = "it is a link, or not a folder"
_TEMPORARY: Final = re.compile(rf"(.*?)(\.[0-9a-f]{{8}})?{re.escape(TEMPORARY)}", re.DOTALL)


def write_shard(directory: Path, save_name: str, shard: str, pieces: list[Piece]) -> FileRecord:
    """Write pieces of parameters to one file.

    Parameters
    ----------
    directory : Path
        Created if it is missing.
    save_name : str
        The random name of the save.
    shard : str
        The server's part of the checkpoint, such as ``0-of-2``.
    pieces : list of Piece
        The list is emptied, so that each tensor is freed once it is written. No other thread may change the
        tensors.

    Returns
    -------
    FileRecord
        The file's entry in the manifest.

    Raises
    ------
    FleetError
        A disk operation fails; the message names the file.
    """
    tensors: dict[str, Tensor] = {}
    blocks = []
    for piece in pieces:
        name = f"{piece.param}[{piece.begin}:{piece.end}]"
        tensors[name] = piece.value
        state = {
            entry: encode(value, tensors, f"{name}.{entry}") for entry, value in sorted(piece.state.items())
        }
        dtype = str(piece.value.dtype).removeprefix("torch.")
        shape = tuple(piece.value.shape)
        blocks.append(BlockRecord(piece.param, piece.begin, piece.end, shape, dtype, name, state))
    pieces.clear()
    path = directory / f"shard-{shard}-{save_name}.safetensors"
    with disk_errors(path):
        announce(path, save_name)
        size, digest = write_tensors(path, tensors, {"format": "pt", "save": save_name})
        return FileRecord(path.name, size, digest, tuple(blocks))


def write_trainer_part(
    directory: Path, save_name: str, data: bytes | bytearray, trainer: int = 0
) -> FileRecord:
    """Write a trainer's part, given as the bytes of a safetensors file; see `write_shard`."""
    path = directory / f"trainer-{f'{trainer}-' if trainer else ''}{save_name}.safetensors"
    with disk_errors(path):
        announce(path, save_name)
        digest = write_bytes(path, data)
        return FileRecord(path.name, len(data), digest, trainer=trainer)


def announce(path: Path, save_name: str) -> None:
    """Record a file in a separate manifest before writing it, to allow cleanup after an interruption."""
    begun = Manifest(save_name, 0, {}, (FileRecord(path.name, 0, ""),)).to_json()
    write_bytes(path.with_name(path.name + BEGUN_SUFFIX), begun.encode())


def commit(directory: Path, manifest: str) -> None:
    """Write the manifest, which completes the checkpoint.

    The replaced manifest and its files are kept under `REPLACED_NAME` until `tidy`. The new manifest records
    which of its files are in this directory; if the servers share it, all of them are.

    Parameters
    ----------
    directory : Path
    manifest : str
        The result of `Manifest.to_json`.

    Raises
    ------
    FleetError
        A disk operation fails; the message names the file.
    """
    path = directory / MANIFEST_NAME
    whole = Manifest.parse(manifest, str(path))
    with disk_errors(path):
        here = tuple(file.name for file in whole.files if is_written(directory, file))
        before, replaced = _save_in(path), _save_in(directory / REPLACED_NAME)
        # A replaced manifest that is still here is the last one that every server is known to have completed.
        if before not in {"", whole.save} and replaced in {"", whole.save}:
            write_bytes(directory / REPLACED_NAME, path.read_bytes())
        write_bytes(path, replace(whole, here=here).to_json().encode())


def is_written(directory: Path, file: FileRecord) -> bool:
    """Return whether a directory contains a file with the recorded size."""
    path = directory / file.name
    return path.is_file() and path.stat().st_size == file.bytes


def tidy(directory: Path) -> None:
    """Remove files that the manifest does not list, left by the replaced save or by interrupted saves.

    Raises
    ------
    CheckpointError
        There is no manifest.
    FleetError
        A disk operation fails; the message names the directory and the file.
    """
    kept = {MANIFEST_NAME, *(file.name for file in Manifest.read(directory).files)}
    try:
        # Links are followed here, unlike in `remove_checkpoint`: the user may have linked the directory to
        # another disk.
        with _opened(directory) as folder:
            _demote_replaced(folder, str(directory))
            _remove(folder, str(directory), kept)
    except OSError as error:
        raise disk_error(
            error,
            f"{directory} holds a complete checkpoint, but files of an earlier save in it could not be "
            f"removed: {error}; expected a directory whose files this process may remove: remove them by "
            "hand, or save elsewhere",
        ) from error


def remove_checkpoint(directory: Path) -> str:
    """Remove a checkpoint's files, and its directory if it becomes empty.

    Returns
    -------
    str
        The reason why the directory stays; empty if it was removed. A link stays, and so does its target.

    Raises
    ------
    FleetError
        A disk operation fails; the message names the directory.
    """
    try:
        with _opened(directory, os.O_NOFOLLOW) as folder:
            _remove(folder, str(directory), set())
            if left := _names_in(folder):
                return f"it has files that no manifest of a checkpoint names, such as {min(left)}"
        directory.rmdir()  # fails if another process has just written into it
    except FileNotFoundError:
        return ""  # another server has removed it
    except NotADirectoryError:
        return _NO_FOLDER
    except OSError as error:
        if directory.is_symlink():
            return _NO_FOLDER
        if error.errno == errno.ENOTEMPTY:
            return "another process has just written into it"
        raise disk_error(
            error,
            f"{directory} could not be removed: {error}; expected a directory whose contents this process "
            "may remove: remove it by hand, or keep more checkpoints",
        ) from error
    return ""


def _save_in(manifest: Path) -> str:
    """Return the random name of a manifest's save; an empty string if the manifest is missing or damaged."""
    try:
        with open_file(manifest) as file:
            return Manifest.from_bytes(file.read(), str(manifest)).save
    except (FileNotFoundError, CheckpointError):
        return ""


@contextlib.contextmanager
def _opened(directory: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _demote_replaced(folder: int, path: str) -> None:
    """Mark the replaced checkpoint as incomplete before its files are removed."""
    files = sorted(_files_named_by(folder, REPLACED_NAME, path) - {REPLACED_NAME})
    if files:
        with contextlib.suppress(FileNotFoundError):  # another server has already renamed it
            os.rename(REPLACED_NAME, files[0] + BEGUN_SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)


def _remove(folder: int, path: str, kept: set[str]) -> None:
    """Remove all files that are listed in the manifests of an open directory, except those in `kept`.

    The manifests are removed last: if this process is killed, the next one can still find the files.
    """
    present = _names_in(folder)
    named = {name: found for name in present if (found := _files_named_by(folder, name, path))}
    ours = set(named).union(*named.values())
    # The final name of a file that is not temporary is the file's own.
    temporaries = {name for name in present if _final_name(name) in {*ours, *_MANIFESTS} - {name}}
    for name in sorted(temporaries.union(ours.intersection(present)) - kept, key=named.__contains__):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a save creates no directory
            # Relative to the open directory, so that nobody can redirect the removal by replacing the
            # directory with a link.
            os.unlink(name, dir_fd=folder)


def _names_in(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _final_name(name: str) -> str:
    """Return the final name of a temporary file; return any other name unchanged."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else name


def _files_named_by(folder: int, name: str, path: str) -> set[str]:
    """Return the names of a manifest and of the files that it lists; for any other file, an empty set."""
    if name not in _MANIFESTS and not name.endswith(BEGUN_SUFFIX):
        return set()
    try:
        with open_file(name, flags=os.O_NOFOLLOW, dir_fd=folder) as file:
            found = Manifest.from_bytes(file.read(), f"{path}/{name}").files
    except (OSError, CheckpointError):
        return set()
    names = {file.name for file in found}
    return {name, *names} if name in _MANIFESTS or name.removesuffix(BEGUN_SUFFIX) in names else set()
