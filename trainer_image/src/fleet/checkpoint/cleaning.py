"""Cleaning: only what a manifest of ours names is removed, and no link is followed below the folder.

What a save is about to write is named in a manifest of its own before it exists, so what a save that was cut
short has left is known too. A name says what is meant: ``shard-0-of-2-5d01c9aa.safetensors``, and what it is
called before it is whole. Anything else in the folder is somebody else's, and keeps its directory in place.
"""

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fleet.checkpoint.files import TEMPORARY, open_file
from fleet.checkpoint.manifest import BEGUN_SUFFIX, MANIFEST_NAME, REPLACED_NAME, Manifest
from fleet.errors import CheckpointError, disk_error

__all__ = ["remove_checkpoint", "tidy"]

_MANIFESTS: Final = {MANIFEST_NAME, REPLACED_NAME}
_NO_FOLDER: Final = "it is a link, or no folder"
_TEMPORARY: Final = re.compile(rf"(.*?)(\.[0-9a-f]{{8}})?{re.escape(TEMPORARY)}", re.DOTALL)


def tidy(directory: Path) -> None:
    """Remove what the manifest does not name: of the save before, or of one that never was finished.

    Raises
    ------
    CheckpointError
        There is no manifest.
    FleetError
        The disk refuses; the message names the directory and the file.
    """
    kept = {MANIFEST_NAME, *(file.name for file in Manifest.read(directory).files)}
    try:
        with _opened(directory) as folder:
            _demote_replaced(folder, str(directory))
            _remove(folder, str(directory), kept)
    except OSError as error:
        raise disk_error(
            error,
            f"{directory} holds a whole checkpoint, and what an earlier save has left in it could not be "
            f"removed: {error}; expected a directory whose files this process may remove: do so by hand, or "
            "save elsewhere",
        ) from error


def remove_checkpoint(directory: Path) -> str:
    """Remove a checkpoint, and its directory if nothing of somebody else's is in it.

    Returns
    -------
    str
        Why the directory stays; empty once it is gone. A link to one stays as it is, and so does what it
        leads to.

    Raises
    ------
    FleetError
        The disk refuses; the message names the directory.
    """
    try:
        with _opened(directory, os.O_NOFOLLOW) as folder:
            _remove(folder, str(directory), set())
            if left := _names_in(folder):
                return f"it has files that no manifest of a checkpoint names, such as {min(left)}"
        directory.rmdir()  # refuses what somebody has just written
    except FileNotFoundError:
        return ""  # other servers remove it as well
    except NotADirectoryError:
        return _NO_FOLDER
    except OSError as error:
        if directory.is_symlink():
            return _NO_FOLDER
        if error.errno == errno.ENOTEMPTY:
            return "somebody has just written to it"
        raise disk_error(
            error,
            f"{directory} could not be removed: {error}; expected a directory whose contents this process "
            "may remove: do so by hand, or keep more checkpoints",
        ) from error
    return ""


@contextlib.contextmanager
def _opened(directory: Path, flags: int = 0) -> Iterator[int]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _demote_replaced(folder: int, path: str) -> None:
    """Let what was replaced name its files as a save does that is not whole: it is about to be none."""
    files = sorted(_named_by(folder, REPLACED_NAME, path) - {REPLACED_NAME})
    if files:
        with contextlib.suppress(FileNotFoundError):  # another server was here
            os.rename(REPLACED_NAME, files[0] + BEGUN_SUFFIX, src_dir_fd=folder, dst_dir_fd=folder)


def _remove(folder: int, path: str, kept: set[str]) -> None:
    """Remove from an open directory what its manifests name, but for what is kept.

    Whatever names files goes after them: so another process, which removes the same or goes on after this one
    was killed, knows them as well.
    """
    present = _names_in(folder)
    named = {name: found for name in present if (found := _named_by(folder, name, path))}
    ours = set(named).union(*named.values())
    half_written = {name for name in present if _whole_name(name) in {*ours, *_MANIFESTS} - {name}}
    for name in sorted(half_written.union(ours.intersection(present)) - kept, key=named.__contains__):
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):  # a directory is somebody else's
            os.unlink(name, dir_fd=folder)


def _names_in(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in entries]


def _whole_name(name: str) -> str:
    """Return what a file is to be called when it is whole."""
    match = _TEMPORARY.fullmatch(name)
    return match[1] if match else name


def _named_by(folder: int, name: str, path: str) -> set[str]:
    """Return the files that a manifest in an open directory names; none for what is no manifest of ours."""
    if name not in _MANIFESTS and not name.endswith(BEGUN_SUFFIX):
        return set()
    try:
        with open_file(name, flags=os.O_NOFOLLOW, dir_fd=folder) as file:
            found = Manifest.from_bytes(file.read(), f"{path}/{name}").files
    except (OSError, CheckpointError):
        return set()
    names = {file.name for file in found}
    return {name, *names} if name in _MANIFESTS or name.removesuffix(BEGUN_SUFFIX) in names else set()
