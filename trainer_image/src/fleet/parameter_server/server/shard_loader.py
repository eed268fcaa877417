"""How a server takes what it owns from a checkpoint, and what it has taken."""

import logging
import threading
from collections.abc import Collection, Sequence
from pathlib import Path

from fleet.checkpoint import (
    Checkpoint,
    Claims,
    FileRecord,
    Piece,
    base_of,
    check_each,
    cut_state,
    files_of,
    have_state,
    none_is_whole,
    read_rows,
    saves_in,
    tell_passed_over,
    whole_numbers,
)
from fleet.errors import CheckpointError, ConfigurationError
from fleet.parameter_server.modes import ResumesEach, ServerMode, mode_of_server
from fleet.parameter_server.pieces import by_block
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.store import Put
from fleet.parameter_server.table_store import RowPut
from fleet.plan import facts_of_training
from fleet.plan.blocks import PlannedBlock
from fleet.plan.job import ServerPlan
from fleet.process.resources import for_saves

__all__ = ["Loader"]

_log = logging.getLogger(__name__)


class Loader:
    """Loads one server's shard. `load` and `whole` are called by one thread at a time.

    Parameters
    ----------
    plan : ServerPlan
    shard : Shard
    mode : ServerMode
    claims : Claims
        Of this server on folders of checkpoints.
    """

    def __init__(self, plan: ServerPlan, shard: Shard, mode: ServerMode, claims: Claims) -> None:
        self.restored = ""
        """The random name of the checkpoint that was loaded; empty when training began anew."""
        self.saves: list[str] = []
        """The checkpoints that were whole here when one was loaded last, the newest first."""
        self.begun = False
        """Whether a gradient has come, or is about to."""
        self.loading = threading.Lock()
        """Held while values change, and never while a disk is read: what is read with it belongs together."""
        self._plan = plan
        self._shard = shard
        self._mode = mode
        self._claims = claims
        self._loaded: Checkpoint | None = None
        self._folder = self._loaded_from = ""
        self._damaged: dict[tuple[Path, str], CheckpointError] = {}
        """What is wrong with checkpoints that were read, by directory and random name."""
        self._told: set[str] = set()
        self._verified: dict[tuple[int, ...], str] = {}
        """The digests of files that were read, by what tells a file and its age."""

    @property
    def history(self) -> Sequence[str] | None:
        """The saves up to the one with which training began, the newest last; None where nobody knows."""
        if self._loaded is None:
            return ()
        manifest = self._loaded.manifest
        return None if manifest.after is None else (*manifest.after, manifest.save)

    @for_saves.lent()
    def load(self, directory: str, save: str, own: Collection[str]) -> Checkpoint | None:
        """Take values and state from a checkpoint, unless training has begun with it or its successors.

        Parameters
        ----------
        directory : str
            A checkpoint, or a folder of numbered ones. Empty: where this server has looked last.
        save : str
            Which one, by its random name. Otherwise the newest that is whole here; a server that has loaded
            one from this directory keeps to it. With neither, nothing is loaded.
        own : collection of str
            The random names of what this server has saved.

        Returns
        -------
        Checkpoint or None
            What is loaded; where training goes on from it, the newest that this server has saved since. None
            where there is none, or the one that `save` names is not whole: then `saves` is without it.

        Raises
        ------
        CheckpointError
            It is of another model, or none is whole.
        ConfigurationError
            Training has begun with other values.
        """
        self._folder = str(Path(directory)) if directory else self._folder
        if not self._folder or not (directory or save):
            return self._loaded
        folder = Path(self._folder)
        self._claims.renew(folder)
        found, damage = saves_in(folder, self._check_sizes)
        self.saves = [each.manifest.save for each in found if _key(each) not in self._damaged]
        touched, kept = self.begun, {self.restored}
        if touched:
            kept |= set(own)
        stays = touched or self._folder == self._loaded_from
        ours = [each for each in found if stays and each.manifest.save in kept]
        wanted = [each for each in found if each.manifest.save == save] if save else ours or found
        try:
            chosen = next((each for each in wanted if self._take(each, each in ours, damage)), None)
        except ConfigurationError:
            self._tell(damage, "nothing: the next one is refused")
            raise
        if chosen is not None and chosen.manifest.save == self.restored:
            chosen = self._loaded  # with what was read of it: the files may be gone
        elif chosen is None and touched and damage and not save:
            chosen = self._loaded
        if chosen is None and damage and not save:
            raise none_is_whole(folder, damage, self._check_alternative)
        self._tell(
            damage, str(chosen.directory) if chosen is not None else "what the other servers have whole"
        )
        return chosen

    def _take(self, checkpoint: Checkpoint, is_ours: bool, damage: list[CheckpointError]) -> bool:
        """Load a checkpoint, or of one of this training read the trainers' parts; False if it is damaged."""
        if checkpoint.manifest.save == self.restored:
            return True
        if _key(checkpoint) in self._damaged:
            damage.append(self._damaged[_key(checkpoint)])
            return False
        if not is_ours:
            self._check_untouched(checkpoint)
            self._check_training(checkpoint)
        try:
            if is_ours:
                checkpoint.keep_parts()
                return True
            found_here = self._read(checkpoint)  # may take long, and holds nobody up who joins
        except CheckpointError as error:
            self._damaged[_key(checkpoint)] = error
            self.saves.remove(checkpoint.manifest.save)
            damage.append(error)
            return False
        self._check_state_has_place(checkpoint)
        with self.loading:
            self._check_untouched(checkpoint)  # again: somebody may have begun meanwhile
            self._restore(checkpoint, found_here)
        return True

    def _tell(self, damage: Sequence[CheckpointError], used: str) -> None:
        """Tell of damage once, however often it is found."""
        new = [reason for reason in dict.fromkeys(map(str, damage)) if reason not in self._told]
        self._told.update(new)
        tell_passed_over(new, used)

    def whole(self, directory: str) -> list[int]:
        """Return the numbers of those that are whole, as far as this server sees; its own files are read."""

        def check(checkpoint: Checkpoint) -> None:
            spans = [(block.param, block.begin, block.end) for block in self._shard.blocks.values()]
            checkpoint.verify(self._verified, spans)
            for base in checkpoint.manifest.bases:
                base_of(checkpoint, base).verify(self._verified, ())

        return whole_numbers(Path(directory), check)

    def _files(self, checkpoint: Checkpoint) -> list[tuple[Checkpoint, FileRecord]]:
        """Return the files that this server needs, each with the checkpoint that has it."""
        blocks = self._shard.blocks.values()
        dense = checkpoint.files_with((block.param, block.begin, block.end) for block in blocks)
        return [(checkpoint, file) for file in dense] + [
            (found, file)
            for name in self._shard.tables.names.values()
            for found, file, _ in files_of(checkpoint, name, self._plan.table_shards)
        ]

    def _check_sizes(self, checkpoint: Checkpoint) -> None:
        check_each(self._files(checkpoint), Checkpoint.check_size)

    def _check_contents(self, checkpoint: Checkpoint) -> None:
        check_each(self._files(checkpoint), Checkpoint.checked)

    def _check_alternative(self, checkpoint: Checkpoint) -> None:
        self._check_training(checkpoint)
        self._check_contents(checkpoint)

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

    def _check_state_has_place(self, checkpoint: Checkpoint) -> None:
        trainers_step = mode_of_server(self._plan).steps_locally
        if trainers_step and (checkpoint.has_state or self._rows_have_state(checkpoint)):
            raise CheckpointError(
                f"{checkpoint.directory} has the state of optimizers on the servers, and here trainers have "
                "optimizers of their own, which would begin without; load it in a mode in which servers "
                "step, or begin with the values alone: fleet.save_inference_model, then load_state_dict"
            )

    def _rows_have_state(self, checkpoint: Checkpoint) -> bool:
        names, shards = self._shard.tables.names.values(), self._plan.table_shards
        return any(have_state(checkpoint, name, shards) for name in names)

    def _read(self, checkpoint: Checkpoint) -> list[Put | RowPut]:
        """Read all of it before any of it is used: a corrupt file must not leave half a model."""
        self._check_contents(checkpoint)
        checkpoint.keep_parts()
        read: list[Put | RowPut] = []
        for block in by_block(self._shard.blocks.values()):
            pieces = _read_block(checkpoint, block)
            read += [Put(number, piece.value, piece.state) for number, piece in pieces.items()]
        for table in self._plan.tables:
            read.append(RowPut(table.number, *read_rows(checkpoint, table.config, self._plan.table_shards)))
        return read

    def _restore(self, checkpoint: Checkpoint, found: Sequence[Put | RowPut]) -> None:
        for put in found:
            if isinstance(put, Put):
                self._shard.store.apply(put)
            else:
                self._shard.tables.apply(put)
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


def _key(checkpoint: Checkpoint) -> tuple[Path, str]:
    return checkpoint.directory, checkpoint.manifest.save


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
