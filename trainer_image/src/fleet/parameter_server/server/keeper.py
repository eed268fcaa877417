"""A server's half of checkpoints: it writes the copy of its shard, and takes what it owns from one.

A save stalls training for as long as a copy of each block takes; the copy is written while training goes on,
and given back tensor by tensor. In sync mode no block can be stepped while it is made, because the trainer
that asks has sent nothing for the next step yet; in the other modes a block is copied between two of its
updates.
"""

import logging
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from fleet.checkpoint import (
    Checkpoint,
    Claims,
    FileRecord,
    Manifest,
    Piece,
    commit,
    cut_state,
    emptied,
    numbers_in,
    remove_numbers,
    saves_in,
    tidy,
    whole_numbers,
    write_shard,
    write_trainer_part,
)
from fleet.errors import CheckpointError, ConfigurationError, FleetError
from fleet.parameter_server.modes import ResumesEach, ServerMode, mode_of_server
from fleet.parameter_server.pieces import by_block
from fleet.parameter_server.server.writing import Writing
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.store import Put
from fleet.program import facts_of_training
from fleet.role_maker import JobIdentity
from fleet.transpiler.config import DistributedMode
from fleet.transpiler.lowering import PlannedBlock, ServerPlan

__all__ = ["Keeper"]

_LOOK_SECONDS: Final = 1.0
_log = logging.getLogger(__name__)


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
        self.restored = ""
        """The random name of the checkpoint that was loaded; empty when training began anew."""
        self.saves: list[str] = []
        """The checkpoints that were whole here when one was loaded last, the newest first."""
        self.begun = False
        """Whether a gradient has come, or is about to."""
        self.loading = threading.Lock()
        """Held while values change, and never while a disk is read: what is read with it belongs together."""
        self.statuses: dict[int, tuple[int, bytes]] = {}
        """What each trainer but the first has said of itself last, and after how many steps."""
        self._plan = plan
        self._shard = shard
        self._mode = mode
        self._claims = Claims(f"server-{plan.server}", job)
        self._loaded: Checkpoint | None = None
        self._folder = self._loaded_from = ""
        self._own: set[str] = set()
        self._writing = Writing("", list)
        self._verified: dict[tuple[int, ...], str] = {}
        """The digests of files that were read, by what tells a file and its age."""
        self._one_at_a_time = threading.Lock()

    def save(
        self, directory: str, save: str, step: int, trainer_part: bytes, trainers: Iterable[int] = ()
    ) -> Mapping[int, int]:
        """Copy every block, and begin to write the copy; only one is written at a time.

        Parameters
        ----------
        directory, save : str
            Where to, and the random name of the save.
        step : int
            What every block must have made, in sync mode.
        trainer_part : bytes
            Written as well, unless it is empty, with what the other trainers have said of themselves.
        trainers : iterable of int
            Those that have joined.

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
            apart = self._shard.blocks and not in_step
            if in_step and self._shard.blocks and self._mode.step != step:
                raise ConfigurationError(
                    f"the trainer asks for a checkpoint of step {step}, and the blocks here are at step "
                    f"{self._mode.step}; save between optimizer.step() and the next backward()"
                )
            # Before the copy: nobody may be said to have come further than the values.
            steps = {trainer: self._mode.step_of(trainer) for trainer in trainers if apart}
            statuses = dict(self.statuses)
            copies = self._shard.store.snapshot()
            self._check_stepped()
            path = Path(directory)
            self._claims.hold(path)

            def write() -> list[FileRecord]:
                name = f"{self._plan.server}-of-{len(self._plan.endpoints)}"
                written = [write_shard(path, save, name, emptied(copies))] if copies else []
                if trainer_part:
                    written.append(write_trainer_part(path, save, trainer_part))
                    # Those in step may say it a moment later than trainer 0 asks.
                    for trainer, (made, part) in (self.statuses if in_step else statuses).copy().items():
                        if not in_step or made == step:
                            written.append(write_trainer_part(path, save, part, trainer))
                return written

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
            self._own.add(save)

    def tidy(self, directory: str) -> None:
        """Remove what the manifest does not name, now that every server has it."""
        with self._one_at_a_time:
            self._claims.hold(Path(directory))
            tidy(Path(directory))

    def load(self, directory: str, save: str = "") -> Checkpoint | None:
        """Take values and state from a checkpoint, unless training has begun with it or its successors.

        Parameters
        ----------
        directory : str
            A checkpoint, or a folder of numbered ones. Empty: where this server has looked last.
        save : str
            Which one, by its random name. Otherwise the newest that is whole here; a server that has loaded
            one from this directory keeps to it. With neither, nothing is loaded.

        Returns
        -------
        Checkpoint or None
            What is loaded; where training goes on from it, the newest that this server has saved since.

        Raises
        ------
        CheckpointError
            It is of another model, or none is whole.
        ConfigurationError
            Training has begun with other values.
        """
        with self._one_at_a_time:
            self._folder = str(Path(directory)) if directory else self._folder
            if not self._folder or not (directory or save):
                return self._loaded
            self._claims.renew(Path(self._folder))
            found = saves_in(Path(self._folder), self._check_files)
            self.saves = [checkpoint.manifest.save for checkpoint in found]
            touched, kept = self.begun, {self.restored}
            if touched:
                kept |= self._own
            stays = touched or self._folder == self._loaded_from
            ours = [each for each in found if stays and each.manifest.save in kept]
            wanted = [each for each in found if each.manifest.save == save] if save else ours or found
            for checkpoint in wanted:
                if checkpoint.manifest.save == self.restored:
                    return self._loaded
                if checkpoint in ours:
                    return checkpoint
                self._check_untouched(checkpoint)
                self._check_training(checkpoint)
                try:
                    pieces = self._read(checkpoint)  # may take long, and holds nobody up who joins
                except CheckpointError as error:
                    self.saves.remove(checkpoint.manifest.save)
                    if checkpoint is wanted[-1]:
                        raise
                    _log.warning("passed over a checkpoint: %s", error)
                    continue
                with self.loading:
                    self._check_untouched(checkpoint)  # again: somebody may have begun meanwhile
                    self._restore(checkpoint, pieces)
                return checkpoint
            return None

    def numbers(self, directory: str) -> list[int]:
        """Return the numbers of the checkpoints in a folder, whole or not."""
        return numbers_in(Path(directory))

    def whole(self, directory: str) -> list[int]:
        """Return the numbers of those that are whole, as far as this server sees; its own files are read."""

        def check(checkpoint: Checkpoint) -> None:
            checkpoint.verify(
                self._verified,
                [(block.param, block.begin, block.end) for block in self._shard.blocks.values()],
            )

        with self._one_at_a_time:
            return whole_numbers(Path(directory), check)

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

    def _check_stepped(self) -> None:
        """Refuse to save what a failed step has left: a block may be half stepped, and nobody meant it."""
        self._mode.missing()

    def _check_files(self, checkpoint: Checkpoint) -> None:
        for block in self._shard.blocks.values():
            checkpoint.check_files(block.param, block.begin, block.end)

    def _check_untouched(self, checkpoint: Checkpoint) -> None:
        if self.begun:
            raise ConfigurationError(
                f"{checkpoint.directory} was not loaded: training has begun with other values; expected "
                "every trainer to call fleet.load_check_point or load_persistables before its first step, or "
                "the servers to load: fleet.init_server(model_dir)"
            )

    def _check_training(self, checkpoint: Checkpoint) -> None:
        trainers_step = mode_of_server(self._plan).steps_locally
        checkpoint.check(facts_of_training(self._plan.agreement), trainers_step=trainers_step)
        if trainers_step and checkpoint.has_state:
            raise CheckpointError(
                f"{checkpoint.directory} has the state of optimizers on the servers, and here trainers have "
                "optimizers of their own, which would begin without; load it in a mode in which servers "
                "step, or begin with the values alone: fleet.save_inference_model, then load_state_dict"
            )

    def _read(self, checkpoint: Checkpoint) -> dict[int, Piece]:
        """Read all of it before any of it is used: a corrupt file must not leave half a model."""
        checkpoint.trainer_part()
        read: dict[int, Piece] = {}
        for block in by_block(self._shard.blocks.values()):
            read |= _read_block(checkpoint, block)
        return read

    def _restore(self, checkpoint: Checkpoint, pieces: Mapping[int, Piece]) -> None:
        for number, piece in pieces.items():
            self._shard.store.apply(Put(number, piece.value, piece.state))
        self._mode.resume(checkpoint.manifest.step)
        if isinstance(self._mode, ResumesEach):
            self._mode.resume_each(
                {int(trainer): step for trainer, step in checkpoint.manifest.steps.items()}
            )
        self._loaded, self.restored, self._loaded_from = checkpoint, checkpoint.manifest.save, self._folder
        _log.info(
            "parameter server %s goes on at step %d, from %s",
            self._plan.endpoint,
            checkpoint.manifest.step,
            checkpoint.directory,
        )


def _read_block(checkpoint: Checkpoint, pieces: Sequence[PlannedBlock]) -> dict[int, Piece]:
    """Read a block once, and cut it into its pieces."""
    first, last = pieces[0], pieces[-1]
    shape = (sum(piece.shape[0] for piece in pieces), *first.shape[1:]) if len(pieces) > 1 else first.shape
    found = checkpoint.piece(first.param, first.begin, last.end, shape)
    return {
        piece.id: Piece(
            piece.param,
            piece.begin,
            piece.end,
            found.value.reshape(-1)[piece.begin - first.begin : piece.end - first.begin].view(piece.shape),
            cut_state(found.state, shape, piece.begin - first.begin, piece.end - first.begin, piece.shape),
        )
        for piece in pieces
    }


def _is_there(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size
