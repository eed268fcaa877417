"""A server's half of checkpoints, and of values that a script writes, as trainers ask for it.

Here is decided who may ask, and known who knows what is loaded.
"""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Final

from fleet.checkpoint import MOST_BEFORE, FileRecord
from fleet.errors import ConfigurationError
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.modes import ServerMode
from fleet.parameter_server.server.membership import Membership
from fleet.parameter_server.server.parts import TrainerParts
from fleet.parameter_server.server.shard_checkpointer import Keeper
from fleet.parameter_server.shard import Shard
from fleet.process.resources import for_saves

__all__ = ["ServerCheckpoints"]

_SAVE: Final = re.compile(r"[0-9A-Za-z]{1,64}")
"""What a save may be called: files have it in their names."""


class ServerCheckpoints:
    """Takes calls of trainers that have joined, in their present life only.

    Parameters
    ----------
    keeper : Keeper
    shard : Shard
    mode : ServerMode
    membership : Membership
    changed : threading.Condition
        Guards the membership.
    folder : str
        Below which files are read, written and removed; empty: wherever a trainer says.
    """

    def __init__(
        self,
        keeper: Keeper,
        shard: Shard,
        mode: ServerMode,
        membership: Membership,
        changed: threading.Condition,
        folder: str = "",
    ) -> None:
        self._folder = folder
        self.keeper = keeper
        self._shard = shard
        self._mode = mode
        self._membership = membership
        self._changed = changed
        self._told: dict[int, str] = {}
        """Which checkpoint each trainer knows to be loaded."""
        self.parts = TrainerParts(self._check_joined)
        """What trainer 0 adds to a save."""

    def tell(self, trainer: int) -> tuple[str, int]:
        """Return what is loaded and the trainer's next step, which belong together; it knows from now on."""
        with self.keeper.loader.loading:
            self._told[trainer] = self.keeper.loader.restored
            return self.keeper.loader.restored, self._mode.step_of(trainer)

    def stand(self) -> tuple[str, int]:
        """Return what is loaded and the step after it, which belong together."""
        with self.keeper.loader.loading:
            return self.keeper.loader.restored, self._mode.step

    def begins(self, trainer: int) -> None:
        """Let a trainer begin a step, unless it trains on values from before a checkpoint was loaded.

        Raises
        ------
        ConfigurationError
            It does.
        """
        with self.keeper.loader.loading:
            restored = self.keeper.loader.restored
            if self._told.get(trainer, "") == restored:
                self.keeper.loader.begun = True
                return
        raise ConfigurationError(
            f"trainer {trainer} began a step with the values from before the save {restored} was loaded; "
            "expected every trainer to call fleet.load_check_point or load_persistables before its first "
            "step, or the servers to load: fleet.init_server(model_dir)"
        )

    @contextmanager
    def step_to_answer(self, trainer: int, step: int) -> Iterator[int]:
        """Give the step whose values a trainer gets that asks for those of one; none is loaded meanwhile.

        One that has joined just before a checkpoint was loaded asks for values from before. It gets the
        present ones: it trains on neither, but loads the checkpoint itself, or is refused.
        """
        # Once training has begun nothing is loaded any more, so nobody need wait for another.
        with nullcontext() if self.keeper.loader.begun else self.keeper.loader.loading:
            knows = self._told.get(trainer, "") == self.keeper.loader.restored
            yield step if knows else self._mode.step_of(trainer)

    def save(self, request: control_pb2.SaveRequest) -> control_pb2.SaveReply:
        """Copy what this server holds, and begin to write its files; say what is in the copy."""
        self._check_joined(request.trainer)
        self._check_within(request.directory)
        if not _SAVE.fullmatch(request.save):
            raise ConfigurationError(
                f"a save is called {request.save[:80]!r}, expected letters and digits, 64 at most: it stands "
                "in the names of files"
            )
        trainer_part = self.parts.take(request.save, request.part_bytes)
        with self._changed:
            trainers = self._membership.joined
        history = self._history()
        with for_saves.lent():
            steps = self.keeper.save(
                request.directory,
                request.save,
                request.step,
                trainer_part,
                trainers,
                incremental=request.incremental,
            )
        return control_pb2.SaveReply(steps=steps, history=history)

    def hand_in(self, request: control_pb2.StatusRequest) -> None:
        """Take what a trainer says of itself, for the checkpoints that follow."""
        self._check_joined(request.trainer)
        self.keeper.statuses[request.trainer.id] = request.step, request.part

    def written(self, request: control_pb2.WrittenRequest) -> list[FileRecord] | None:
        """Return what a save has written; None while it is not all on the disk."""
        self._check_joined(request.trainer)
        return self.keeper.written(request.save)

    def commit(self, request: control_pb2.CommitRequest) -> None:
        """Make what was written a checkpoint, or remove what that has replaced."""
        self._check_joined(request.trainer)
        self._check_within(request.directory)
        with for_saves.lent():
            if request.manifest:
                self.keeper.commit(request.directory, request.manifest)
            else:
                self.keeper.tidy(request.directory)

    def load(self, request: control_pb2.LoadRequest) -> control_pb2.LoadReply:
        """Load a checkpoint, unless training has begun, and say what is loaded."""
        self._check_joined(request.trainer)
        self._check_within(request.directory)
        found = self.keeper.load(request.directory, request.save)
        trainer = request.trainer.id
        restored, step = self.tell(trainer)
        return control_pb2.LoadReply(
            directory=str(found.directory) if found else "",
            restored=restored,
            step=step,
            part_bytes=self.parts.offer(trainer, found.trainer_part() if found else None),
            saves=self.keeper.loader.saves,
            status=self.keeper.status_of(trainer, found) or b"",
            apart=found is not None and str(trainer) in found.manifest.steps,
        )

    def numbers(self, request: control_pb2.CheckpointsRequest) -> control_pb2.CheckpointsReply:
        """Return the numbers of a folder's checkpoints; remove some first, if asked to."""
        self._check_joined(request.trainer)
        self._check_within(request.directory)
        with for_saves.lent():
            if request.remove:
                self.keeper.remove(request.directory, request.remove)
            return control_pb2.CheckpointsReply(
                numbers=self.keeper.numbers(request.directory),
                whole=self.keeper.whole(request.directory) if request.verify else (),
            )

    def write(self, request: control_pb2.WriteRequest) -> None:
        """Take a block's value from a trainer whose script has written it."""
        self._check_joined(request.trainer)
        with self.keeper.loader.loading:
            self._shard.write(request.block, request.value)

    def _history(self) -> control_pb2.History | None:
        """Return the saves of this training; None where nobody knows those before it was loaded."""
        began = self.keeper.loader.history
        return (
            None if began is None else control_pb2.History(saves=[*began, *self.keeper.saved][-MOST_BEFORE:])
        )

    def _check_within(self, directory: str) -> None:
        """Refuse to touch files outside of the job's own folder, whatever links lead there."""
        if not self._folder or not directory:
            return
        if not Path(directory).resolve().is_relative_to(Path(self._folder).resolve()):
            raise ConfigurationError(
                f"{directory} is not in {self._folder}, where the checkpoints of this job are "
                "(FLEET_CHECKPOINT_DIR); for a trainer, servers read, write and remove files nowhere else. "
                "To begin with a checkpoint from elsewhere, have the servers load it themselves: "
                "fleet.init_server(model_dir)"
            )

    def _check_joined(self, trainer: control_pb2.Trainer) -> None:
        with self._changed:
            self._membership.check_joined(trainer.id, trainer.attempt)
