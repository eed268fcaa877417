"""A server's half of checkpoints: it writes the copy of its shard, and takes what it owns from one.

A save stalls training for as long as a copy of each block takes; the copy is written while training goes on,
and given back tensor by tensor. Rows of tables are copied as they are written, or before they change.

In sync mode nothing can be stepped while the copy is made, because the trainer that asks has sent nothing for
the next step yet; in the other modes a block is copied between two of its updates.
"""

import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from fleet.checkpoint import (
    BaseRecord,
    Checkpoint,
    Claims,
    FileRecord,
    Manifest,
    RowsRecord,
    commit,
    emptied,
    numbers_in,
    remove_numbers,
    tidy,
    write_rows,
    write_shard,
    write_trainer_part,
)
from fleet.errors import ConfigurationError, FleetError
from fleet.parameter_server.modes import ServerMode
from fleet.parameter_server.server.bases import Bases
from fleet.parameter_server.server.shard_loader import Loader
from fleet.parameter_server.server.writing import Writing
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.table_store import RowCopy
from fleet.plan.config import DistributedMode
from fleet.plan.job import ServerPlan
from fleet.role_maker import JobIdentity

__all__ = ["Keeper"]

_LOOK_SECONDS: Final = 1.0


class Keeper:
    """Saves and loads one server's shard.

    Parameters
    ----------
    plan : ServerPlan
    shard : Shard
    mode : ServerMode
    job : JobIdentity
        In whose life it writes.
    """

    def __init__(self, plan: ServerPlan, shard: Shard, mode: ServerMode, job: JobIdentity) -> None:
        self.statuses: dict[int, tuple[int, bytes]] = {}
        """What each trainer but the first has said of itself last, and after how many steps."""
        self._plan = plan
        self._shard = shard
        self._mode = mode
        self._claims = Claims(f"server-{plan.server}", job)
        self.loader = Loader(plan, shard, mode, self._claims)
        self._bases = Bases()
        self.saved: list[str] = []
        """The random names of what was saved here, the newest last."""
        self._writing = Writing("", list)
        self._one_at_a_time = threading.Lock()

    def save(
        self,
        directory: str,
        save: str,
        step: int,
        trainer_part: bytes | bytearray,
        trainers: Iterable[int] = (),
        *,
        incremental: bool = False,
    ) -> Mapping[int, int]:
        """Copy every block, begin to write the copy, and rows with it; only one save is written at a time.

        Parameters
        ----------
        directory, save : str
            Where to, and the random name of the save.
        step : int
            What every block must have made, in sync mode.
        trainer_part : bytes or bytearray
            Written as well, unless it is empty, with what the other trainers have said of themselves.
        trainers : iterable of int
            Those that have joined.
        incremental : bool
            Whether of tables only what has changed since the last checkpoint of all rows is written.

        Returns
        -------
        mapping of int to int
            How many steps of each are in the copy, where they are not in step.

        Raises
        ------
        ConfigurationError
            The blocks are at another step.
        FleetError
            The disk refuses, a step has failed here, or a later life of this server writes there.
        """
        with self._one_at_a_time:
            self._writing.wait()
            in_step = self._plan.mode is DistributedMode.SYNC and self._plan.custom is None
            # Before the copy: nobody may be said to have come further than the values.
            steps = self._steps_of(trainers, step if in_step else None)
            path, statuses = Path(directory), dict(self.statuses)
            since = self._bases.since(path) if incremental else {}
            copies, rows = self._shard.store.snapshot(), self._shard.tables.snapshot(since)
            done = self._check_may_write(path, rows)
            bases = self._bases.begin(path, save, rows)

            def write() -> list[FileRecord]:
                with done:  # rows first: they are set aside meanwhile
                    written = [self._write_rows(path, save, each, bases[each.table]) for each in rows]
                written += [write_shard(path, save, self._name, emptied(copies))] if copies else []
                # Those in step may say it a moment later than trainer 0 asks.
                said = self.statuses if in_step else statuses
                return written + _write_parts(path, save, trainer_part, said, step if in_step else None)

            self._writing = Writing(save, write)
            return steps

    def written(self, save: str) -> list[FileRecord] | None:
        """Return what a save has written, or None if that is not known after a short while.

        Raises
        ------
        FleetError
            The disk refuses; or another save came after this one.
        """
        writing = self._writing
        if writing.save != save:
            raise FleetError(f"the save {save} cannot be finished: another one came after it; save again")
        return writing.result(_LOOK_SECONDS)

    def commit(self, directory: str, manifest: str) -> None:
        """Make what has been written last a checkpoint; what it replaces stays until `tidy`.

        Raises
        ------
        FleetError
            It is of another save, a file of it is gone, the disk refuses, a step has failed here, or a later
            life of this server writes there.
        """
        save = Manifest.parse(manifest, directory).save
        with self._one_at_a_time:
            latest, files = self._writing.save, self._writing.result(0.0) or []
            gone = [file.name for file in files if not _is_there(Path(directory) / file.name, file.bytes)]
            if save != latest or gone:
                reason = (
                    f"{', '.join(gone)} is not as it was written" if gone else "another one came after it"
                )
                raise FleetError(
                    f"the save {save} in {directory} cannot be finished: {reason}; the checkpoint before "
                    "stays as it is: save again"
                )
            self._check_stepped()
            self._claims.hold(Path(directory))
            commit(Path(directory), manifest)
            self.saved.append(save)
            self._bases.committed(save)

    def tidy(self, directory: str) -> None:
        """Remove what the manifest does not name, now that every server has it."""
        with self._one_at_a_time:
            self._claims.hold(Path(directory))
            tidy(Path(directory))

    def load(self, directory: str, save: str = "") -> Checkpoint | None:
        """Take values and state from a checkpoint; see `Loader.load`."""
        with self._one_at_a_time:
            before = self.loader.restored
            found = self.loader.load(directory, save, self.saved)
            if self.loader.restored != before:
                self.saved.clear()  # they are of what there was before
            return found

    def numbers(self, directory: str) -> list[int]:
        """Return the numbers of the checkpoints in a folder, whole or not."""
        return numbers_in(Path(directory))

    def whole(self, directory: str) -> list[int]:
        """Return the numbers of those that are whole, as far as this server sees; its own files are read."""
        with self._one_at_a_time:
            return self.loader.whole(directory)

    def remove(self, directory: str, numbers: Iterable[int]) -> None:
        """Remove numbered checkpoints.

        Raises
        ------
        FleetError
            The disk refuses, or a later life of this server writes there.
        """
        with self._one_at_a_time:
            self._claims.hold(Path(directory))
            remove_numbers(Path(directory), numbers)

    def status_of(self, trainer: int, found: Checkpoint | None) -> bytes | None:
        """Return what a trainer has said of itself: in this training last, or in the checkpoint found."""
        if trainer in self.statuses:
            return self.statuses[trainer][1]
        with self._one_at_a_time:
            return found.status_of(trainer) if found is not None and trainer else None

    @property
    def _name(self) -> str:
        """What this server's part of a checkpoint is called."""
        return f"{self._plan.server}-of-{len(self._plan.endpoints)}"

    def _write_rows(self, path: Path, save: str, copy: RowCopy, base: BaseRecord | None) -> FileRecord:
        table, shards = self._shard.tables.names[copy.table], self._plan.table_shards
        record = RowsRecord(table, shards, copy.updates, base)
        copy.count()
        return write_rows(path, save, f"{self._name}-table-{copy.table}", record, copy.snapshot, copy.parts())

    def _check_may_write(self, path: Path, rows: Iterable[RowCopy]) -> ExitStack:
        """Check what was copied and where it goes; return what lets rows go, as a refusal does."""
        with ExitStack() as closing:
            for copy in rows:
                closing.callback(copy.close)
            self._check_stepped()
            self._claims.hold(path)
            return closing.pop_all()

    def _steps_of(self, trainers: Iterable[int], step: int | None) -> dict[int, int]:
        """Return the steps of trainers that are not in step; otherwise check that all have made this one."""
        if not self._shard.blocks and not len(self._shard.tables):
            return {}
        if step is None:
            return {trainer: self._mode.step_of(trainer) for trainer in trainers}
        if self._mode.step != step:
            raise ConfigurationError(
                f"the trainer asks for a checkpoint of step {step}, and the blocks here are at step "
                f"{self._mode.step}; save between optimizer.step() and the next backward()"
            )
        return {}

    def _check_stepped(self) -> None:
        """Refuse to save what a failed step has left: a block may be half stepped, and nobody meant it."""
        self._mode.missing()


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _write_parts(
    path: Path,
    save: str,
    first: bytes | bytearray,
    statuses: Mapping[int, tuple[int, bytes]],
    step: int | None,
) -> list[FileRecord]:
    """Write trainer 0's part, unless it is empty, and what others have said, at this step if it is given."""
    if not first:
        return []
    others = {
        trainer: part for trainer, (made, part) in dict(statuses).items() if step is None or made == step
    }
    return [write_trainer_part(path, save, part, trainer) for trainer, part in ({0: first} | others).items()]
