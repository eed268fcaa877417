"""Claims: a process that was replaced, and lives on unseen, writes no checkpoints any more.

The pod of a lost node is replaced without that node's word, and may go on over there with the same folder
mounted. Each writer leaves its attempt in the folder before it writes, and looks for a higher one before
every step of a save. The look and the write are two calls: a write that was let through just before its
successor's claim may end just after it. It is whole then, or nothing; files of two saves never make one.
"""

import json
import logging
import re
from pathlib import Path
from typing import Final

from fleet.checkpoint.fields import PARSE_ERRORS, text, whole_number
from fleet.checkpoint.files import open_file
from fleet.checkpoint.folders import CHECKPOINT_PREFIX
from fleet.checkpoint.writer import write_claim
from fleet.errors import FleetError, disk_error
from fleet.role_maker import JobIdentity

__all__ = ["Claims"]

_log = logging.getLogger(__name__)
_NUMBERED: Final = re.compile(rf"{CHECKPOINT_PREFIX}\d+")


class Claims:
    """What one process has claimed.

    Parameters
    ----------
    writer : str
        Which replica it is: ``server-0``. Replicas of a job write side by side, and may be restarted alone.
    job : JobIdentity
        With the attempt. A process outside any job claims nothing: nobody replaces it.
    """

    def __init__(self, writer: str, job: JobIdentity) -> None:
        self._writer = writer
        self._job = job
        self._held: set[Path] = set()

    def hold(self, directory: Path) -> None:
        """Claim the folder of a checkpoint that is about to be written, or see that it is still claimed.

        Parameters
        ----------
        directory : Path
            A checkpoint, or a folder of numbered ones, which are claimed together.

        Raises
        ------
        FleetError
            A later life of this replica has claimed it, another job has taken it over, or the disk refuses.
        """
        folder = _folder_of(directory)
        if not self._job.uid or (found := self._found(folder)) == self._job:
            return
        self._check_may_write(directory, folder, found)
        self._write(folder)

    def renew(self, directory: Path) -> None:
        """Claim a folder that checkpoints are about to be looked for in, if this job has written there.

        What an earlier life would add from now on, nobody would go on from. Where the disk refuses, full or
        read-only, they are read all the same: `hold` claims the folder before the first write.

        Raises
        ------
        FleetError
            A later life of this replica has claimed it.
        """
        folder = _folder_of(directory)
        try:
            found = self._found(folder)
        except FleetError as error:
            _tell_unclaimed(folder, error)
            return
        if found is None or found.uid != self._job.uid or found == self._job:
            return
        self._check_may_write(directory, folder, found)
        self._held.add(folder)  # whoever takes it over from now on is another job
        try:
            self._write(folder)
        except FleetError as error:
            _tell_unclaimed(folder, error)

    def _check_may_write(self, directory: Path, folder: Path, found: JobIdentity | None) -> None:
        theirs = found is not None and found.uid != self._job.uid and folder in self._held
        if found is not None and (
            theirs or (found.uid == self._job.uid and found.attempt > self._job.attempt)
        ):
            raise FleetError(
                f"{directory} is not written: {self._writer} of job {found.name} ({found.uid}) has claimed "
                f"{folder} with attempt {found.attempt}, and this process is of job {self._job.name} "
                f"({self._job.uid}), attempt {self._job.attempt}; one that was replaced writes no more, and "
                "each job needs a folder of its own"
            )

    def _write(self, folder: Path) -> None:
        write_claim(self._path(folder), json.dumps(_fields(self._job)) + "\n")
        self._held.add(folder)

    def _path(self, folder: Path) -> Path:
        return folder / f"claim-{self._writer}.json"

    def _found(self, folder: Path) -> JobIdentity | None:
        """Return who has claimed a folder; None where nobody has.

        Raises
        ------
        FleetError
            That cannot be read: it may be a later life.
        """
        path = self._path(folder)
        try:
            with open_file(path) as file:  # opened each time: a network file system then asks anew
                fields = json.load(file)
            return JobIdentity(
                text("job", fields["job"]),
                text("uid", fields["uid"]),
                whole_number("attempt", fields["attempt"]),
            )
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise disk_error(
                error, f"{path} could not be read: {error}; nothing is written before it says by whom"
            ) from error
        except PARSE_ERRORS:
            _log.warning("%s is no claim; expected what a save of this job writes: it is replaced", path)
            return None


def _tell_unclaimed(folder: Path, error: FleetError) -> None:
    _log.warning(
        "checkpoints in %s are read without a claim of this process: %s. Nothing is saved there before it "
        "has one; the next save tries again",
        folder,
        error,
    )


def _folder_of(directory: Path) -> Path:
    return directory.parent if _NUMBERED.fullmatch(directory.name) else directory


def _fields(job: JobIdentity) -> dict[str, str | int]:
    return {"job": job.name, "uid": job.uid, "attempt": job.attempt}
