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
from fleet.checkpoint.folders import CHECKPOINT_PREFIX
from fleet.checkpoint.writer import write_claim
from fleet.errors import FleetError
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
        write_claim(self._path(folder), json.dumps(_fields(self._job)) + "\n")
        self._held.add(folder)

    def renew(self, directory: Path) -> None:
        """Claim a folder that checkpoints are about to be looked for in, if this job has written there.

        What an earlier life would add from now on, nobody would go on from. Raises as `hold`.
        """
        found = self._found(_folder_of(directory))
        if found is not None and found.uid == self._job.uid:
            self.hold(directory)

    def _path(self, folder: Path) -> Path:
        return folder / f"claim-{self._writer}.json"

    def _found(self, folder: Path) -> JobIdentity | None:
        path = self._path(folder)
        try:
            fields = json.loads(path.read_bytes())  # opened each time: a network file system then asks anew
            return JobIdentity(
                text("job", fields["job"]),
                text("uid", fields["uid"]),
                whole_number("attempt", fields["attempt"]),
            )
        except OSError:
            return None  # there is none; or nothing here can be read, and the write will say so
        except PARSE_ERRORS:
            _log.warning("%s is no claim; expected what a save of this job writes: it is replaced", path)
            return None


def _folder_of(directory: Path) -> Path:
    return directory.parent if _NUMBERED.fullmatch(directory.name) else directory


def _fields(job: JobIdentity) -> dict[str, str | int]:
    return {"job": job.name, "uid": job.uid, "attempt": job.attempt}
