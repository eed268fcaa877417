"""Folders of numbered checkpoints, ``checkpoint-0``, ``checkpoint-1``, …, and the jobs that claim them.

The checkpoint with the highest number is the newest. A claim keeps a replaced process from writing: when the
pod on a lost node is replaced, the old pod may still run, with the same folder mounted. Each writer records
its attempt in the folder before it writes, and checks for a higher one before every step of a save. The check
and the write are two calls, so a write that was allowed just before the successor's claim may end just after
it. The result is either a complete checkpoint or none; files of two saves never mix.
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from fleet.checkpoint.files import TEMPORARY, disk_errors, open_file, write_bytes
from fleet.checkpoint.manifest import MANIFEST_NAME, REPLACED_NAME, Manifest
from fleet.checkpoint.reader import Checkpoint
from fleet.checkpoint.values import PARSE_ERRORS, as_count, as_text
from fleet.checkpoint.writer import remove_checkpoint
from fleet.errors import CheckpointError, DiskFullError, FleetError, disk_error, no_room
from fleet.role_maker import JobIdentity

__all__ = [
    "CHECKPOINT_PREFIX",
    "Claims",
    "find_checkpoint",
    "list_checkpoints",
    "list_complete_numbers",
    "list_numbers",
    "no_complete_checkpoint",
    "removable_numbers",
    "remove_numbers",
    "warn_of_skipped",
]

CHECKPOINT_PREFIX: Final = "checkpoint-"
_log = logging.getLogger(__name__)
_NUMBERED: Final = re.compile(rf"{CHECKPOINT_PREFIX}(0|[1-9][0-9]{{0,17}})")
_LIKE_NUMBERED: Final = re.compile(rf"{CHECKPOINT_PREFIX}[0-9]+")
"""The names of checkpoints, including numbers that no save assigns: too large, or with a leading zero."""
_STALE_SECONDS: Final = 60.0
"""The age after which a temporary claim is considered to be left over from a killed process."""


def list_numbers(folder: Path) -> list[int]:
    """Return the numbers of all checkpoints, complete or not, in ascending order."""
    matches = (_NUMBERED.fullmatch(name) for name in _names_in(folder))
    return sorted(int(match[1]) for match in matches if match)


def find_checkpoint(folder: Path, read: Callable[[Checkpoint], object] = bool) -> Checkpoint | None:
    """Return a folder's newest complete checkpoint, or None; the folder may itself be a checkpoint.

    Parameters
    ----------
    folder : Path
    read : callable
        Raises a CheckpointError if a needed file is damaged.

    Raises
    ------
    CheckpointError
        There are checkpoints, but none is complete.
    """
    found, damage = list_checkpoints(folder)
    for checkpoint in found:
        try:
            read(checkpoint)
        except CheckpointError as error:
            damage.append(error)
        else:
            return checkpoint
    if damage:
        raise no_complete_checkpoint(folder, damage, read)
    return None


def list_checkpoints(
    folder: Path, check: Callable[[Checkpoint], object] = bool
) -> tuple[list[Checkpoint], list[CheckpointError]]:
    """List the checkpoints in a folder; if the folder is itself a checkpoint, list only this one.

    Parameters
    ----------
    folder : Path
    check : callable
        Raises a CheckpointError if the checkpoint is not complete. It is called for every checkpoint, so it
        should not read large files.

    Returns
    -------
    found : list of Checkpoint
        Newest first.
    damage : list of CheckpointError
        The reasons why the other checkpoints cannot be used.
    """
    numbered = [folder / f"{CHECKPOINT_PREFIX}{number}" for number in reversed(list_numbers(folder))]
    found = []
    damage = [
        CheckpointError(
            f"{folder / name} has a number that no save assigns; expected {CHECKPOINT_PREFIX}0 and so on: "
            "rename it, or load it by its own path"
        )
        for name in sorted(_names_in(folder))
        if _LIKE_NUMBERED.fullmatch(name) and not _NUMBERED.fullmatch(name)
    ]
    for path in [folder, *numbered]:
        if path is not folder and os.path.lexists(path) and not path.is_dir():
            damage.append(CheckpointError(f"{path} is not a directory; expected a checkpoint"))
        # An interrupted commit may have reached only some of the servers. The replaced checkpoint is then the
        # newest one that all of them have.
        for name in (MANIFEST_NAME, REPLACED_NAME):
            if not os.path.lexists(path / name):  # an interrupted save has written no manifest
                continue
            try:
                checkpoint = Checkpoint(path, name)
                checkpoint.check_here()
                check(checkpoint)
            except CheckpointError as error:
                damage.append(error)
            else:
                found.append(checkpoint)
    # A folder can be both: save_persistables writes into it, and save_check_point below it.
    own = [checkpoint for checkpoint in found if checkpoint.directory == folder]
    others = [checkpoint for checkpoint in found if checkpoint.directory != folder]
    own_first = not others or not own or own[0].manifest.step >= others[0].manifest.step
    return ([*own, *others] if own_first else [*others, *own]), damage


def no_complete_checkpoint(
    folder: Path, damage: Sequence[CheckpointError | str], read: Callable[[Checkpoint], object]
) -> CheckpointError:
    """Return an error that explains why a folder has no complete checkpoint.

    Parameters
    ----------
    folder : Path
        A folder, or one checkpoint.
    damage : sequence of CheckpointError or str
        The reason why each checkpoint cannot be used.
    read : callable
        As in `find_checkpoint`. If `folder` is a numbered checkpoint, the message suggests the newest
        complete one of its folder, which is never used without a request.
    """
    reasons = "; ".join(map(str, damage))
    if not _NUMBERED.fullmatch(folder.name):
        return CheckpointError(
            reasons if len(damage) == 1 else f"no checkpoint in {folder} is complete: {reasons}"
        )
    with contextlib.suppress(CheckpointError):
        if (complete := find_checkpoint(folder.parent, read)) is not None:
            found = complete.directory
            reasons += (
                f". The newest complete checkpoint of that folder is {found}: load it, or {folder.parent}"
            )
    return CheckpointError(reasons)


def warn_of_skipped(damage: Sequence[CheckpointError | str], used: str) -> None:
    """Log a warning that names the damaged checkpoints, and the one that is used instead."""
    if damage:
        reasons = "; ".join(map(str, damage))
        _log.warning("skipped a damaged checkpoint: %s. Training continues from %s", reasons, used)


def list_complete_numbers(folder: Path, check: Callable[[Checkpoint], object]) -> list[int]:
    """Return the numbers of the complete checkpoints in ascending order.

    Parameters
    ----------
    folder : Path
        Links in the folder are ignored.
    check : callable
        Raises a CheckpointError if the checkpoint is not complete.
    """
    complete = []
    for number in list_numbers(folder):
        path = folder / f"{CHECKPOINT_PREFIX}{number}"
        if path.is_symlink() or not os.path.lexists(path / MANIFEST_NAME):
            continue
        try:
            checkpoint = Checkpoint(path)
            checkpoint.check_here()
            check(checkpoint)
        except CheckpointError as error:
            _log.warning("a damaged checkpoint does not count towards the number to keep: %s", error)
        else:
            complete.append(number)
    return complete


def removable_numbers(numbers: Sequence[int], complete: Sequence[int], keep: int) -> list[int]:
    """Return the numbers of the checkpoints to remove, so that the newest `keep` complete ones remain.

    Checkpoints above the newest complete one are kept, because they may be in progress. If no checkpoint is
    complete, all are kept.
    """
    kept, newest = set(complete[-keep:]), complete[-1] if complete else -1
    return [number for number in numbers if number not in kept and number < newest]


def remove_numbers(folder: Path, numbers: Iterable[int]) -> None:
    """Remove numbered checkpoints, except those that other checkpoints need; see `remove_checkpoint`."""
    numbers = set(numbers)
    needed = _numbers_needed_by(folder, set(list_numbers(folder)) - numbers)
    for number in sorted(numbers):
        path = folder / f"{CHECKPOINT_PREFIX}{number}"
        if number in needed:
            why = "a newer checkpoint has only the rows that have changed since"
        else:
            why = remove_checkpoint(path)
        if why:
            _log.info("%s stays: %s", path, why)


class Claims:
    """One process's claims on the checkpoint folders that it writes to.

    Parameters
    ----------
    writer : str
        The replica, such as ``server-0``. Replicas of a job write to the same folder, and may restart
        individually.
    job : JobIdentity
        The job and attempt. A process outside a job claims nothing, because no other process replaces it.
    """

    def __init__(self, writer: str, job: JobIdentity) -> None:
        self._writer = writer
        self._job = job
        self._held: set[Path] = set()

    def hold(self, directory: Path) -> None:
        """Claim a folder before writing a checkpoint to it, or check that the claim is still valid.

        Parameters
        ----------
        directory : Path
            A checkpoint, or a folder. Numbered checkpoints share the claim of their folder.

        Raises
        ------
        FleetError
            A later attempt of this replica or another job has claimed the folder, or the disk operation
            fails.
        """
        folder = _folder_of(directory)
        if not self._job.uid or (found := self._read(folder)) == self._job:
            return
        self._check_may_write(directory, folder, found)
        self._write(folder)

    def renew(self, directory: Path) -> None:
        """Claim a folder before reading from it, if this job has written to it.

        From then on, no earlier attempt can add a checkpoint. If the disk is full or read-only, the
        checkpoints are read anyway: `hold` claims the folder before the first write.

        Raises
        ------
        FleetError
            A later attempt of this replica has claimed the folder.
        """
        folder = _folder_of(directory)
        try:
            found = self._read(folder)
        except FleetError as error:
            _warn_unclaimed(folder, error)
            return
        if found is None or found.uid != self._job.uid or found == self._job:
            return
        self._check_may_write(directory, folder, found)
        self._held.add(
            folder
        )  # even if the write below fails, so that `hold` refuses another job that claims the folder later
        try:
            self._write(folder)
        except FleetError as error:
            _warn_unclaimed(folder, error)

    def _check_may_write(self, directory: Path, folder: Path, found: JobIdentity | None) -> None:
        if found is None:
            return
        same_job = found.uid == self._job.uid
        # The claim of another job is taken over at first, because that job may have ended long ago. A new
        # claim on a folder that this process holds shows that two jobs use it now.
        if found.attempt > self._job.attempt if same_job else folder in self._held:
            raise FleetError(
                f"{directory} was not written: {self._writer} of job {found.name} ({found.uid}) has claimed "
                f"{folder} with attempt {found.attempt}, and this process is of job {self._job.name} "
                f"({self._job.uid}), attempt {self._job.attempt}; a replaced process must not write, and "
                "each job needs its own folder"
            )

    def _write(self, folder: Path) -> None:
        path, job = self._path(folder), self._job
        claim = json.dumps({"job": job.name, "uid": job.uid, "attempt": job.attempt}) + "\n"
        with disk_errors(path):
            write_bytes(path, claim.encode())
        self._held.add(folder)
        with contextlib.suppress(OSError):  # a few bytes are left, and a later claim tries again
            now = path.stat().st_mtime  # by the file server's clock, which may differ from this host's
            for left in folder.glob(f"{path.name}.*{TEMPORARY}"):
                if left.stat().st_mtime < now - _STALE_SECONDS:
                    left.unlink()

    def _read(self, folder: Path) -> JobIdentity | None:
        """Return the job and attempt that claim a folder, or None if the folder is unclaimed.

        Raises
        ------
        FleetError
            The claim cannot be read, so it may belong to a later attempt.
        """
        path = self._path(folder)
        try:
            with open_file(path) as file:  # opened each time, because NFS then revalidates its cache
                fields = json.load(file)
            return JobIdentity(
                as_text("job", fields["job"]),
                as_text("uid", fields["uid"]),
                as_count("attempt", fields["attempt"]),
            )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise disk_error(
                error, f"{path} could not be read: {error}; nothing is written until the claim can be read"
            ) from error
        except PARSE_ERRORS:
            _log.warning("%s is not a claim, and is replaced; expected the JSON that a save writes", path)
            return None

    def _path(self, folder: Path) -> Path:
        return folder / f"claim-{self._writer}.json"


def _names_in(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not folder.is_symlink():
            return []  # the first save creates it
        sentence = f"{folder} cannot be searched for checkpoints ({error.strerror})"
        if no_room(error):  # without a free descriptor a save is skipped, as on a full disk
            raise DiskFullError(sentence) from error
        raise CheckpointError(f"{sentence}; expected a folder that this process may read") from error


def _numbers_needed_by(folder: Path, numbers: Iterable[int]) -> set[int]:
    """Return the numbers of the base checkpoints that the given incremental checkpoints need."""
    names: set[str] = set()
    for number in numbers:
        with contextlib.suppress(CheckpointError):
            manifest = Manifest.read(folder / f"{CHECKPOINT_PREFIX}{number}")
            names.update(base.directory for base in manifest.bases)
    return {int(match[1]) for match in map(_NUMBERED.fullmatch, names) if match}


def _folder_of(directory: Path) -> Path:
    return directory.parent if _LIKE_NUMBERED.fullmatch(directory.name) else directory


def _warn_unclaimed(folder: Path, error: FleetError) -> None:
    _log.warning(
        "checkpoints in %s are read without a claim of this process: %s. Nothing is saved there until the "
        "claim succeeds; the next save tries again",
        folder,
        error,
    )
