"""Loading a server's shard from a checkpoint, and recording which trainers were informed of the load.

A checkpoint is loaded before training begins, by the server itself or at a trainer's request. A trainer that
joined before the load still has the earlier values: it may not begin a step until it has requested the loaded
checkpoint.
"""

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from fleet.checkpoint import (
    Checkpoint,
    Claims,
    FileRecord,
    check_files,
    cut_state,
    list_checkpoints,
    list_complete_numbers,
    no_complete_checkpoint,
    open_base,
    read_rows,
    row_files,
    rows_have_state,
    warn_of_skipped,
)
from fleet.errors import CheckpointError, ConfigurationError
from fleet.parameter_server.modes import ServerMode, mode_of_server
from fleet.parameter_server.pieces import by_block
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.store import Put
from fleet.parameter_server.table_store import RowPut
from fleet.plan import facts_of_training
from fleet.plan.blocks import PlannedBlock
from fleet.process.resources import for_saves
from fleet.role_maker import JobIdentity

__all__ = ["ShardLoader"]

_log = logging.getLogger(__name__)


class ShardLoader:
    """Loads the shard of one server. Thread-safe.

    Parameters
    ----------
    shard : Shard
    mode : ServerMode
    job : JobIdentity
        The job and attempt of this server, for its claims.
    """

    def __init__(self, shard: Shard, mode: ServerMode, job: JobIdentity) -> None:
        self.restored = ""
        """The random name of the loaded checkpoint; empty if training began with initial values."""
        self.saved: list[str] = []
        """The saves that were committed on this server since the load, oldest first."""
        self.candidates: list[str] = []
        """The checkpoints that were complete on this server at the last load, newest first."""
        self.disk_lock = threading.Lock()
        """Held while a checkpoint is read or written, so that disk access is serialized."""
        self.claims = Claims(f"server-{shard.plan.server}", job)
        """The server's claims on checkpoint folders."""
        self._plan = shard.plan
        self._shard = shard
        self._mode = mode
        self._values_lock = threading.Lock()
        """Held while a load changes values, but not during disk I/O: joining trainers wait for this lock."""
        self._begun = False
        """Whether training has begun: a gradient has arrived, or is about to."""
        self._known: dict[int, str] = {}
        """The name of the loaded checkpoint that the server last reported to each trainer."""
        self._loaded: Checkpoint | None = None
        self._folder = self._loaded_from = ""
        self._saved_in = Path()
        """The directory of the newest save in `saved`."""
        self._damaged: dict[tuple[Path, str], CheckpointError] = {}
        """The errors of earlier reads of checkpoints, by `Checkpoint.key`."""
        self._warned: set[str] = set()
        self._digests: dict[tuple[int, ...], str] = {}
        """The digests of files that were already verified, for `Checkpoint.verify`."""

    @property
    def history(self) -> Sequence[str] | None:
        """The names of this training run's saves, oldest first, or None if earlier ones are unknown."""
        if self._loaded is None:
            return self.saved
        manifest = self._loaded.manifest
        return None if manifest.after is None else [*manifest.after, manifest.save, *self.saved]

    def note_saved(self, save: str, folder: Path) -> None:
        """Record a save that this server has committed."""
        self.saved.append(save)
        self._saved_in = folder

    def inform(self, trainer: int) -> tuple[str, int]:
        """Return the loaded checkpoint's name and a trainer's next step; record that the trainer has them."""
        with self._values_lock:
            self._known[trainer] = self.restored
            return self.restored, self._mode.step_of(trainer)

    def position(self) -> tuple[str, int]:
        """Return the loaded checkpoint's name and the current step, with no load between the two reads."""
        with self._values_lock:
            return self.restored, self._mode.step

    def begin_step(self, trainer: int) -> None:
        """Record that training has begun; reject a trainer that was not informed of the loaded checkpoint.

        Raises
        ------
        ConfigurationError
            The trainer still has the values from before a checkpoint was loaded.
        """
        with self._values_lock:
            if self._known.get(trainer, "") == self.restored:
                self._begun = True
                return
        raise ConfigurationError(
            f"trainer {trainer} began a step with values from before the save {self.restored} was loaded; "
            "expected every trainer to call fleet.load_check_point or load_persistables before its first "
            "step, or the servers to load the checkpoint: fleet.init_server(model_dir)"
        )

    @contextmanager
    def step_to_answer(self, trainer: int, step: int) -> Iterator[int]:
        """Yield the step whose values answer a trainer's request; no load runs during the `with` statement.

        A trainer that joined just before a load requests values that no longer exist. It gets the current
        values instead, which is harmless: the trainer must load the checkpoint itself before it may train.
        """
        # Nothing is loaded once training has begun, so the hot path takes no lock.
        with nullcontext() if self._begun else self._values_lock:
            knows = self._known.get(trainer, "") == self.restored
            yield step if knows else self._mode.step_of(trainer)

    def write(self, block: int, value: bytes) -> None:
        """Replace a block's value with a value from a trainer's script."""
        with self._values_lock:
            self._shard.write(block, value)

    @for_saves.lent()
    def load(self, directory: str, save: str = "") -> Checkpoint | None:
        """Load values and optimizer state, unless training has begun from this checkpoint or a later one.

        Parameters
        ----------
        directory : str
            A checkpoint, or a folder of numbered checkpoints; empty for the directory of the previous call.
        save : str
            The random name of the checkpoint to load; empty for the newest complete one. If the server has
            already loaded a checkpoint from this directory, it keeps that one. If both arguments are empty,
            nothing is loaded, and the newest checkpoint that was loaded or has been saved is returned.

        Returns
        -------
        Checkpoint or None
            The loaded checkpoint or, if training has begun from it, the newest checkpoint that this server
            has saved since. None if there is no checkpoint, or if the one named `save` is damaged; a damaged
            checkpoint is removed from `candidates`.

        Raises
        ------
        CheckpointError
            The checkpoint was saved from another model, or no checkpoint is complete.
        ConfigurationError
            Training has begun with other values.
        """
        with self.disk_lock:
            if not (directory or save):
                return self._newest()
            self._folder = str(Path(directory)) if directory else self._folder
            if not self._folder:
                return self._loaded
            folder = Path(self._folder)
            self.claims.renew(folder)
            found, damage = list_checkpoints(folder, self._check_sizes)
            self.candidates = [each.manifest.save for each in found if each.key not in self._damaged]
            begun = self._begun
            # This training run's own checkpoints are not loaded again: the server has their values or newer
            # ones.
            own = {self.restored, *self.saved} if begun else {self.restored}
            keeps = begun or self._folder == self._loaded_from
            ours = [each for each in found if keeps and each.manifest.save in own]
            wanted = [each for each in found if each.manifest.save == save] if save else ours or found
            try:
                chosen = next((each for each in wanted if self._take(each, each in ours, damage)), None)
            except ConfigurationError:
                self._warn(damage, "nothing: the next one is refused")
                raise
            if chosen is not None and chosen.manifest.save == self.restored:
                chosen = self._loaded  # the trainers' parts are in memory; their files may not exist
            elif chosen is None and begun and damage and not save:
                chosen = self._loaded
            if chosen is None and damage and not save:
                raise no_complete_checkpoint(folder, damage, self._check_alternative)
            used = str(chosen.directory) if chosen is not None else "a checkpoint that the other servers have"
            self._warn(damage, used)
            return chosen

    def part_of(self, trainer: int, found: Checkpoint | None) -> bytes:
        """Return a trainer's part of a checkpoint, or empty bytes if this server does not have it."""
        with self.disk_lock:
            return (found.part_of(trainer) if found is not None else None) or b""

    def complete_numbers(self, directory: str) -> list[int]:
        """Return the numbers of a folder's checkpoints for which this server's files are complete."""

        def check(checkpoint: Checkpoint) -> None:
            spans = [(block.param, block.begin, block.end) for block in self._shard.blocks.values()]
            checkpoint.verify(self._digests, spans)
            for base in checkpoint.manifest.bases:
                open_base(checkpoint, base).verify(self._digests, ())

        with self.disk_lock:
            return list_complete_numbers(Path(directory), check)

    def _newest(self) -> Checkpoint | None:
        """Return this training run's newest checkpoint: its latest undamaged save, or the loaded one."""
        if self.saved:
            for each in list_checkpoints(self._saved_in, self._check_sizes)[0]:
                if each.manifest.save == self.saved[-1]:
                    with suppress(CheckpointError):
                        each.keep_parts()
                        return each
        return self._loaded

    def _take(self, checkpoint: Checkpoint, is_ours: bool, damage: list[CheckpointError]) -> bool:
        """Load a checkpoint, or only its trainers' parts if `is_ours`; return False if it is damaged."""
        if checkpoint.manifest.save == self.restored:
            return True
        if checkpoint.key in self._damaged:
            damage.append(self._damaged[checkpoint.key])
            return False
        if not is_ours:
            self._check_not_begun(checkpoint)
            self._check_training(checkpoint)
        try:
            if is_ours:
                checkpoint.keep_parts()
                return True
            content = self._read(checkpoint)  # may take long, and trainers may join meanwhile
        except CheckpointError as error:
            self._damaged[checkpoint.key] = error
            self.candidates.remove(checkpoint.manifest.save)
            damage.append(error)
            return False
        self._check_state_has_place(checkpoint)
        with self._values_lock:
            self._check_not_begun(checkpoint)  # again: a trainer may have begun meanwhile
            self._restore(checkpoint, content)
        return True

    def _read(self, checkpoint: Checkpoint) -> list[Put | RowPut]:
        """Read the whole shard before any value changes, so that a damaged file does no harm."""
        check_files(self._needed_files(checkpoint), Checkpoint.verify_file)
        checkpoint.keep_parts()
        content: list[Put | RowPut] = []
        for block in by_block(self._shard.blocks.values()):
            content += _read_block(checkpoint, block)
        for table in self._plan.tables:
            rows = read_rows(checkpoint, table.config, self._plan.table_shards)
            content.append(RowPut(table.number, *rows))
        return content

    def _restore(self, checkpoint: Checkpoint, content: Sequence[Put | RowPut]) -> None:
        for put in content:
            if isinstance(put, Put):
                self._shard.store.apply(put)
            else:
                self._shard.tables.apply(put)
        manifest = checkpoint.manifest
        self._mode.resume(manifest.step)
        self._mode.resume_each({int(trainer): step for trainer, step in manifest.steps.items()})
        self._loaded, self.restored, self._loaded_from = checkpoint, manifest.save, self._folder
        self.saved.clear()  # these saves belong to the training run that the load replaces
        _log.info(
            "parameter server %s continues at step %d, from %s",
            self._plan.endpoint,
            manifest.step,
            checkpoint.directory,
        )

    def _needed_files(self, checkpoint: Checkpoint) -> list[tuple[Checkpoint, FileRecord]]:
        """Return the files that this server needs, each with the checkpoint that contains it."""
        blocks = self._shard.blocks.values()
        dense = checkpoint.files_with((block.param, block.begin, block.end) for block in blocks)
        return [(checkpoint, file) for file in dense] + [
            (found, file)
            for name in self._shard.tables.names.values()
            for found, file, _ in row_files(checkpoint, name, self._plan.table_shards)
        ]

    def _check_sizes(self, checkpoint: Checkpoint) -> None:
        check_files(self._needed_files(checkpoint), Checkpoint.check_size)

    def _check_alternative(self, checkpoint: Checkpoint) -> None:
        self._check_training(checkpoint)
        check_files(self._needed_files(checkpoint), Checkpoint.verify_file)

    def _check_not_begun(self, checkpoint: Checkpoint) -> None:
        if self._begun:
            raise ConfigurationError(
                f"{checkpoint.directory} was not loaded, because training has begun with other values; "
                "expected every trainer to call fleet.load_check_point or load_persistables before its first "
                "step, or the servers to load the checkpoint: fleet.init_server(model_dir)"
            )

    def _check_training(self, checkpoint: Checkpoint) -> None:
        trainers_step = mode_of_server(self._plan).steps_locally
        checkpoint.check(facts_of_training(self._plan.agreement), trainers_step=trainers_step)

    def _check_state_has_place(self, checkpoint: Checkpoint) -> None:
        names, shards = self._shard.tables.names.values(), self._plan.table_shards
        if mode_of_server(self._plan).steps_locally and (
            checkpoint.has_state or any(rows_have_state(checkpoint, name, shards) for name in names)
        ):
            raise CheckpointError(
                f"{checkpoint.directory} has the state of optimizers on the servers, but in this mode the "
                "trainers have the optimizers, which would begin without state; load it in a mode in which "
                "servers step, or load only the values: fleet.save_inference_model, then load_state_dict"
            )

    def _warn(self, damage: Sequence[CheckpointError], used: str) -> None:
        """Log a warning about damaged checkpoints, once for each kind of damage."""
        new = [reason for reason in dict.fromkeys(map(str, damage)) if reason not in self._warned]
        self._warned.update(new)
        warn_of_skipped(new, used)


def _read_block(checkpoint: Checkpoint, pieces: Sequence[PlannedBlock]) -> list[Put]:
    """Read a block from a checkpoint and slice it into its pieces."""
    first, last = pieces[0], pieces[-1]
    shape = (sum(piece.shape[0] for piece in pieces), *first.shape[1:]) if len(pieces) > 1 else first.shape
    found = checkpoint.piece(first.param, first.begin, last.end, shape)
    puts = []
    for piece in pieces:
        begin, end = piece.begin - first.begin, piece.end - first.begin
        value = found.value.reshape(-1)[begin:end].view(piece.shape)
        puts.append(Put(piece.id, value, cut_state(found.state, shape, begin, end, piece.shape)))
    return puts
