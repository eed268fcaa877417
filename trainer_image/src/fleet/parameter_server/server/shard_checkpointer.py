"""Saving a server's shard at trainer 0's request: first a copy, then its files, then the manifest.

Training waits only while the blocks are copied. The copy is written while training continues, and is freed
tensor by tensor. A table row is copied when it is written to disk, or before it changes. In sync mode no
block can be updated during the copy, because trainer 0 has not sent its next gradient. In the other modes
each block is copied between two of its updates.
"""

import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fleet.checkpoint import (
    CHECKPOINT_PREFIX,
    MOST_BEFORE,
    BaseRecord,
    FileRecord,
    Manifest,
    RowsRecord,
    commit,
    is_written,
    list_numbers,
    remove_numbers,
    tidy,
    write_rows,
    write_shard,
    write_trainer_part,
)
from fleet.errors import CheckpointError, ConfigurationError, FleetError
from fleet.parameter_server.control.calls import CHUNK_BYTES
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.modes import ServerMode
from fleet.parameter_server.server.membership import Membership
from fleet.parameter_server.server.shard_loader import ShardLoader
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.table_store import RowCopy
from fleet.process.resources import for_saves

__all__ = ["PartTransfer", "ShardCheckpointer"]

_log = logging.getLogger(__name__)
_LOOK_SECONDS: Final = 1.0
"""The longest time for which a call waits for files that are being written."""
_SAVE_NAME: Final = re.compile(r"[0-9A-Za-z]{1,64}")
"""The pattern of a save's name, which becomes part of file names."""


class ShardCheckpointer:
    """The handler of the trainers' checkpoint calls. Thread-safe.

    Every call raises ConfigurationError unless its trainer has joined with the attempt that the call gives.

    Parameters
    ----------
    shard : Shard
    mode : ServerMode
    loader : ShardLoader
    membership : Membership
    changed : threading.Condition
        Guards the membership.
    folder : str
        The only folder in which trainers may name directories; if empty, they may name any directory.
    """

    def __init__(
        self,
        shard: Shard,
        mode: ServerMode,
        loader: ShardLoader,
        membership: Membership,
        changed: threading.Condition,
        folder: str = "",
    ) -> None:
        plan = shard.plan
        self._shard = shard
        self._mode = mode
        self._loader = loader
        self._claims = loader.claims
        self._membership = membership
        self._changed = changed
        self._folder = folder
        self._name = f"{plan.server}-of-{len(plan.endpoints)}"
        self._in_step = plan.has_common_step
        self._parts = PartTransfer()
        self._statuses: dict[int, tuple[int, bytes]] = {}
        """The latest step and status of each trainer other than 0."""
        self._bases = _Bases()
        self._save = ""
        """The name of the latest save."""
        self._files: Future[list[FileRecord]] = Future()
        """The records of the latest save's files, available once the files are written."""
        self._files.set_result([])
        self._reply = control_pb2.SaveReply()
        """The reply for the latest save, which is sent again if gRPC repeats the request."""

    def save(self, request: control_pb2.SaveRequest) -> control_pb2.SaveReply:
        """Copy the shard, after waiting for the previous save, and start writing the copy.

        Returns
        -------
        SaveReply
            The earlier saves of this training and, in modes without a common step, the number of each
            trainer's steps that the copy includes.

        Raises
        ------
        ConfigurationError
            The blocks are at another step, or the directory or the name is refused.
        FleetError
            Writing failed, a step has failed, or a later attempt of this server has claimed the folder.
        """
        self._check_may_use(request.trainer, request.directory)
        save, step = request.save, request.step if self._in_step else None
        if not _SAVE_NAME.fullmatch(save):
            raise ConfigurationError(
                f"a save is named {save[:80]!r}; expected 1 to 64 letters and digits, because the name "
                "becomes part of file names"
            )
        with self._changed:
            trainers = self._membership.joined
        path = Path(request.directory)
        with for_saves.lent(), self._loader.disk_lock:
            if save == self._save:  # gRPC repeats a request whose reply was lost
                return self._reply
            first_part = self._parts.take_upload(save, request.part_bytes)
            wait([self._files])
            history = self._loader.history
            before = None if history is None else control_pb2.History(saves=history[-MOST_BEFORE:])
            # Read before the copy, so that the values are not older than the recorded steps.
            steps = self._steps_of(trainers, step)
            statuses = dict(self._statuses)
            since = self._bases.updates_since(path) if request.incremental else {}
            copies, rows = self._shard.store.snapshot(), self._shard.tables.snapshot(since)
            with ExitStack() as closing:
                for copy in rows:
                    closing.callback(copy.close)
                self._mode.missing()  # raises if a step has failed: a block may be half updated
                self._claims.hold(path)
                row_copies = closing.pop_all()
            bases = self._bases.begin(path, save, rows)

            def write() -> list[FileRecord]:
                with row_copies:  # rows first: updates set changing rows aside until they are written
                    files = [self._write_rows(path, save, each, bases[each.table]) for each in rows]
                if copies:
                    files.append(write_shard(path, save, self._name, copies))
                if first_part:
                    files.append(write_trainer_part(path, save, first_part))
                    # In modes with a common step, a status of this step may arrive after trainer 0's request.
                    for trainer, (made, part) in dict(self._statuses if self._in_step else statuses).items():
                        if step is None or made == step:
                            files.append(write_trainer_part(path, save, part, trainer))
                return files

            try:
                self._files = _in_background(save, write)
            except RuntimeError as error:  # no thread can be started at present
                row_copies.close()  # otherwise no later save could copy the tables
                raise FleetError(f"the save {save} could not begin: {error}; save again") from error
            self._save, self._reply = save, control_pb2.SaveReply(steps=steps, history=before)
            return self._reply

    def written(self, request: control_pb2.WrittenRequest) -> control_pb2.WrittenReply:
        """Wait briefly for the files of a save; return their records, or reply that they are not ready.

        Raises
        ------
        FleetError
            Writing failed, or another save has begun since.
        """
        self._check_joined(request.trainer)
        save, files = self._save, self._files
        if save != request.save:
            raise FleetError(
                f"the save {request.save} cannot be finished, because another save has begun since; save "
                "again"
            )
        wait([files], _LOOK_SECONDS)
        if not files.done():
            return control_pb2.WrittenReply()
        return control_pb2.WrittenReply(done=True, files=[file.to_json() for file in files.result()])

    def commit(self, request: control_pb2.CommitRequest) -> control_pb2.CommitReply:
        """Write the manifest of the latest save or, without a manifest, remove the replaced files.

        Raises
        ------
        FleetError
            The manifest belongs to another save, a file is missing, writing failed, a step has failed, or a
            later attempt of this server has claimed the folder.
        """
        self._check_may_use(request.trainer, request.directory)
        path = Path(request.directory)
        with for_saves.lent(), self._loader.disk_lock:
            if not request.manifest:
                self._claims.hold(path)
                tidy(path)
                return control_pb2.CommitReply()
            save = Manifest.parse(request.manifest, request.directory).save
            files = self._files.result() if self._files.done() else []
            gone = [file.name for file in files if not is_written(path, file)]
            if save != self._save or gone:
                reason = (
                    f"{', '.join(gone)} is not as it was written" if gone else "another save has begun since"
                )
                raise FleetError(
                    f"the save {save} in {path} cannot be finished: {reason}; the previous checkpoint is "
                    "unchanged; save again"
                )
            self._mode.missing()  # raises if a step has failed since the copy
            self._claims.hold(path)
            commit(path, request.manifest)
            self._loader.note_saved(save, path)
            self._bases.commit(save)
        return control_pb2.CommitReply()

    def numbers(self, request: control_pb2.CheckpointsRequest) -> control_pb2.CheckpointsReply:
        """Remove numbered checkpoints from a folder; return the remaining numbers.

        Raises
        ------
        FleetError
            Removing failed, or a later attempt of this server has claimed the folder.
        """
        self._check_may_use(request.trainer, request.directory)
        path = Path(request.directory)
        with for_saves.lent():
            if request.remove:
                with self._loader.disk_lock:
                    self._claims.hold(path)
                    remove_numbers(path, request.remove)
            return control_pb2.CheckpointsReply(
                numbers=list_numbers(path),
                whole=self._loader.complete_numbers(request.directory) if request.verify else (),
            )

    def load(self, request: control_pb2.LoadRequest) -> control_pb2.LoadReply:
        """Load a checkpoint; return its name, the trainer's next step, and what the trainer may download.

        See `ShardLoader.load`.
        """
        self._check_may_use(request.trainer, request.directory)
        trainer = request.trainer.id
        found = self._loader.load(request.directory, request.save)
        restored, step = self._loader.inform(trainer)
        if trainer in self._statuses:
            status = self._statuses[trainer][1]
        else:
            status = self._loader.part_of(trainer, found) if trainer else b""
        return control_pb2.LoadReply(
            directory=str(found.directory) if found else "",
            restored=restored,
            step=step,
            part_bytes=self._parts.offer_download(trainer, self._loader.part_of(0, found)),
            saves=self._loader.candidates,
            status=status,
            apart=found is not None and str(trainer) in found.manifest.steps,
        )

    def upload_part(self, request: control_pb2.PartRequest) -> control_pb2.PartReply:
        """Store an uploaded chunk of trainer 0's part for the next save."""
        self._check_joined(request.trainer)
        self._parts.upload(request.save, request.offset, request.data)
        return control_pb2.PartReply()

    def download_part(self, request: control_pb2.FoundPartRequest) -> control_pb2.FoundPartReply:
        """Return a chunk of the part that the latest `load` made available to the trainer."""
        self._check_joined(request.trainer)
        return control_pb2.FoundPartReply(data=self._parts.download(request.trainer.id, request.offset))

    def set_status(self, request: control_pb2.StatusRequest) -> control_pb2.StatusReply:
        """Store the script status of a trainer other than trainer 0 for later checkpoints."""
        self._check_joined(request.trainer)
        self._statuses[request.trainer.id] = request.step, request.part
        return control_pb2.StatusReply()

    def write(self, request: control_pb2.WriteRequest) -> control_pb2.WriteReply:
        """Replace a block's value with a value from a trainer's script."""
        self._check_joined(request.trainer)
        self._loader.write(request.block, request.value)
        return control_pb2.WriteReply()

    def _write_rows(self, path: Path, save: str, copy: RowCopy, base: BaseRecord | None) -> FileRecord:
        table, shards = self._shard.tables.names[copy.table], self._shard.plan.table_shards
        record = RowsRecord(table, shards, copy.updates, base)
        copy.count()
        return write_rows(path, save, f"{self._name}-table-{copy.table}", record, copy.snapshot, copy.parts())

    def _steps_of(self, trainers: Iterable[int], step: int | None) -> dict[int, int]:
        """Return each trainer's step or, in modes with a common step, check that step and return {}."""
        if not self._shard.blocks and not len(self._shard.tables):
            return {}
        if step is None:
            return {trainer: self._mode.step_of(trainer) for trainer in trainers}
        if self._mode.step != step:
            raise ConfigurationError(
                f"the trainer requests a checkpoint of step {step}, but the blocks on this server are at "
                f"step {self._mode.step}; save between optimizer.step() and the next backward()"
            )
        return {}

    def _check_joined(self, trainer: control_pb2.Trainer) -> None:
        with self._changed:
            self._membership.check_joined(trainer.id, trainer.attempt)

    def _check_may_use(self, trainer: control_pb2.Trainer, directory: str) -> None:
        """Reject a trainer that has not joined, and a directory outside the job's folder."""
        self._check_joined(trainer)
        if not self._folder or not directory:
            return
        # Resolved, because a link in the folder may lead out of it.
        if not Path(directory).resolve().is_relative_to(Path(self._folder).resolve()):
            raise ConfigurationError(
                f"{directory} is not in {self._folder}, the folder of this job's checkpoints "
                "(FLEET_CHECKPOINT_DIR); on behalf of a trainer, servers read, write and remove files only "
                "there. To begin with a checkpoint from elsewhere, let the servers load it: "
                "fleet.init_server(model_dir)"
            )


class PartTransfer:
    """The transfer of trainer 0's part in chunks of limited message size. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._save, self._uploaded = "", bytearray()
        self._offered: dict[int, bytes] = {}
        """The part that each trainer may download."""

    def upload(self, save: str, offset: int, data: bytes) -> None:
        """Append a chunk to the part of a save; a chunk at offset 0 starts a new part.

        Raises
        ------
        ConfigurationError
            The chunk does not follow the previous one.
        """
        with self._lock:
            if not offset:
                self._save, self._uploaded = save, bytearray()
            elif save == self._save and data and self._uploaded[offset:] == data:
                return  # gRPC repeats a chunk whose reply was lost
            if (save, offset) != (self._save, len(self._uploaded)):
                raise ConfigurationError(
                    f"a chunk of the trainer's part of the save {save!r} begins at {offset}; expected a "
                    f"chunk of {self._save!r} at {len(self._uploaded)}; save again"
                )
            self._uploaded += data

    def take_upload(self, save: str, size: int) -> bytes | bytearray:
        """Remove and return the uploaded part of a save, or empty bytes if `size` is 0.

        Raises
        ------
        FleetError
            The part belongs to another save, or is incomplete.
        """
        if not size:
            return b""
        with self._lock:
            found, uploaded = self._save, self._uploaded
            self._save, self._uploaded = "", bytearray()
        if (found, len(uploaded)) != (save, size):
            raise FleetError(
                f"the trainer's part of the save {save!r} has {size} bytes, but {len(uploaded)} bytes of "
                f"{found!r} have arrived; save again"
            )
        return uploaded

    def offer_download(self, trainer: int, part: bytes) -> int:
        """Offer a part for download to a trainer, replacing any earlier one; return its size."""
        with self._lock:
            self._offered[trainer] = part
        return len(part)

    def download(self, trainer: int, offset: int) -> bytes:
        """Return the chunk at an offset, or empty bytes at the end of the part."""
        with self._lock:
            part = self._offered.get(trainer, b"")
        return part[offset : offset + CHUNK_BYTES]


@dataclass(frozen=True, slots=True)
class _Base:
    directory: Path
    save: str
    updates: int
    """The number of updates that the table had received when it was saved."""


class _Bases:
    """The base of each table's incremental checkpoints: this server's newest full checkpoint."""

    def __init__(self) -> None:
        self._committed: dict[int, _Base] = {}
        self._begun: dict[int, _Base] = {}
        """The bases that the latest save provides if it is committed."""

    def updates_since(self, directory: Path) -> dict[int, int]:
        """Return the update count that each table had in its base, for bases in the same folder."""
        found = {
            table: base.updates
            for table, base in self._committed.items()
            if base.directory.parent == directory.parent and _still_exists(base)
        }
        if not found:
            _log.info("%s gets all rows, because its folder has no checkpoint with all rows yet", directory)
        return found

    def begin(
        self, directory: Path, save: str, copies: Collection[RowCopy]
    ) -> Mapping[int, BaseRecord | None]:
        """Record a save before its rows are written; return the base that each table's file refers to.

        A table whose rows are all written refers to no base. A numbered save becomes its base once committed.
        """
        self._begun = {}
        records: dict[int, BaseRecord | None] = {}
        for copy in copies:
            records[copy.table] = None
            if copy.snapshot.since is not None:
                base = self._committed[copy.table]
                records[copy.table] = BaseRecord(base.directory.name, base.save)
                continue
            self._committed.pop(copy.table, None)
            # A checkpoint without a number may be overwritten, so it must not become a base.
            if directory.name.startswith(CHECKPOINT_PREFIX):
                self._begun[copy.table] = _Base(directory, save, copy.updates)
        return records

    def commit(self, save: str) -> None:
        """Allow later saves to use this save as their base."""
        self._committed |= {table: base for table, base in self._begun.items() if base.save == save}


def _still_exists(base: _Base) -> bool:
    try:
        return Manifest.read(base.directory).save == base.save
    except CheckpointError:
        return False


def _in_background(save: str, write: Callable[[], list[FileRecord]]) -> Future[list[FileRecord]]:
    """Write the files of a save in a background thread; return a future for their records."""
    files: Future[list[FileRecord]] = Future()

    def run() -> None:
        try:
            with for_saves.lent():
                files.set_result(write())
        except (FleetError, OSError) as error:
            files.set_exception(error)
        except BaseException as error:  # noqa: BLE001 - the trainer waits for the error
            files.set_exception(FleetError(f"the save {save} failed: {error!r}"))

    # A daemon thread, so that a hung disk does not keep the server's process from ending.
    threading.Thread(target=run, name="fleet-writes", daemon=True).start()
    return files
