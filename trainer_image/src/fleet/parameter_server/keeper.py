"""A server's half of checkpoints: it writes the copy of its shard, and takes what it owns from one.

A save stalls training for as long as a copy of each block takes. In sync mode no block can be stepped
meanwhile, because the trainer that asks has sent nothing for the next step yet; in the other modes a block
is copied between two of its updates.
"""

import logging
import threading
from pathlib import Path

from fleet.checkpoint import (
    Checkpoint,
    FileRecord,
    commit,
    find_checkpoint,
    keep_newest,
    numbers_in,
    write_shard,
    write_trainer_part,
)
from fleet.errors import ConfigurationError
from fleet.parameter_server.modes import ServerMode
from fleet.parameter_server.shard import Shard
from fleet.program import facts_of_training
from fleet.transpiler.config import DistributedMode
from fleet.transpiler.lowering import ServerPlan

__all__ = ["Keeper"]

_log = logging.getLogger(__name__)


class Keeper:
    """Saves and loads one server's shard.

    Parameters
    ----------
    plan : ServerPlan
    shard : Shard
    mode : ServerMode
    """

    def __init__(self, plan: ServerPlan, shard: Shard, mode: ServerMode) -> None:
        self.restored = ""
        """The random name of the checkpoint that was loaded; empty when training began anew."""
        self._plan = plan
        self._shard = shard
        self._mode = mode
        self._loaded: Checkpoint | None = None
        self._one_at_a_time = threading.Lock()

    def save(self, directory: str, save: str, step: int, trainer_part: bytes) -> list[FileRecord]:
        """Copy every block, and write the copy.

        Parameters
        ----------
        directory, save : str
            Where to, and the random name of the save.
        step : int
            What every block must have made, in sync mode.
        trainer_part : bytes
            Written as well, unless it is empty.

        Returns
        -------
        list of FileRecord

        Raises
        ------
        ConfigurationError
            The blocks are at another step.
        FleetError
            The disk refuses.
        """
        with self._one_at_a_time:
            in_step = self._plan.mode is DistributedMode.SYNC and self._plan.custom is None
            if in_step and self._shard.blocks and self._mode.step != step:
                raise ConfigurationError(
                    f"the trainer asks for a checkpoint of step {step}, and the blocks here are at step "
                    f"{self._mode.step}; save between optimizer.step() and the next backward()"
                )
            copies = self._shard.copies()
            path = Path(directory)
            written = []
            if copies:
                name = f"{self._plan.server}-of-{len(self._plan.endpoints)}"
                written.append(write_shard(path, save, name, copies))
            if trainer_part:
                written.append(write_trainer_part(path, save, trainer_part))
            return written

    def commit(self, directory: str, manifest: str) -> None:
        """Make what has been written a checkpoint.

        Raises
        ------
        FleetError
            The disk refuses.
        """
        with self._one_at_a_time:
            commit(Path(directory), manifest)

    def load(self, directory: str) -> Checkpoint | None:
        """Take values and state from the newest checkpoint in a folder, unless training has begun.

        Returns
        -------
        Checkpoint or None
            The checkpoint that was found, whether it was loaded now, before or, because training had
            begun, not at all. With no directory given, what was loaded before.

        Raises
        ------
        CheckpointError
            It is of another model, or a file of it is missing, truncated or changed.
        """
        if not directory:
            return self._loaded
        with self._one_at_a_time:
            path = find_checkpoint(Path(directory))
            if path is None:
                return None
            checkpoint = Checkpoint(path)
            if self.restored == checkpoint.manifest.save or self._shard.touched:
                return checkpoint
            self._restore(checkpoint)
            return checkpoint

    def checkpoints(self, directory: str, keep: int) -> list[int]:
        """Return the numbers of the checkpoints in a folder; with `keep`, remove the older ones first."""
        with self._one_at_a_time:
            if keep:
                keep_newest(Path(directory), keep)
            return numbers_in(Path(directory))

    def _restore(self, checkpoint: Checkpoint) -> None:
        checkpoint.check(facts_of_training(self._plan.agreement))
        blocks = self._shard.blocks.values()
        # All of it is read before any of it is used: a corrupt file must not leave half a model.
        pieces = {
            block.id: checkpoint.piece(block.param, block.begin, block.end, block.shape) for block in blocks
        }
        self._shard.restore(pieces)
        self._mode.resume(checkpoint.manifest.step)
        self._loaded, self.restored = checkpoint, checkpoint.manifest.save
        _log.info(
            "parameter server %s goes on at step %d, from %s",
            self._plan.endpoint,
            checkpoint.manifest.step,
            checkpoint.directory,
        )
