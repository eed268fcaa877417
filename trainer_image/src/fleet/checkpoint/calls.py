"""The calls of `fleet` that save, load and export, with the original's signatures and short ones."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from fleet.checkpoint.arguments import directory_of, refuse_file_system, status_of
from fleet.checkpoint.status import TrainStatus
from fleet.checkpoint.writer import write_model
from fleet.errors import CheckpointError, ConfigurationError
from fleet.fluid import Program

__all__ = ["Savable", "SavingCalls"]


class Savable(Protocol):
    """What the calls work on: one trainer's training."""

    @property
    def current_step(self) -> int:
        """The number of steps made, from the job's beginning."""

    def save(self, directory: str, status: TrainStatus) -> None:
        """Save a checkpoint; it is whole when this returns."""

    def save_numbered(self, folder: str, status: TrainStatus, *, keep: int, incremental: bool = False) -> int:
        """Save one under a folder's next number, in the background; with `keep`, only the newest stay."""

    def hand_in(self, status: TrainStatus) -> None:
        """Say how far this trainer has come, which is not the one that saves."""

    def clean(self, folder: str, keep: int) -> None:
        """Remove a folder's checkpoints but the newest."""

    def load(self, directory: str) -> TrainStatus | None:
        """Go on from the newest checkpoint in a directory; None when there is none."""

    def export(self, table_ids: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the model as one process's ``load_state_dict`` takes it, and rows of tables on servers."""


class SavingCalls(ABC):
    """Saves, loads and exports; the heir knows what."""

    @abstractmethod
    def _checkpoint_root(self) -> str | None:
        """Return where checkpoints go when nobody says; ConfigurationError before ``init``."""

    @abstractmethod
    def _training(self, program: Program | None) -> Savable:
        """Return this trainer's training; ConfigurationError if there is none, or it is not of `program`."""

    @abstractmethod
    def is_first_worker(self) -> bool:
        """Whether this process is trainer 0, which saves for all."""

    def _before_export(self, call: str) -> None:  # noqa: B027 (servers have one model)
        """Make the model one, where each trainer has its own; every trainer that makes `call` calls this."""

    def _load(self, directory: str, program: Program | None) -> TrainStatus | None:
        return self._training(program).load(directory)

    def save_persistables(
        self,
        executor: Any = None,
        dirname: str | os.PathLike[str] | None = None,
        main_program: Program | None = None,
        *,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a checkpoint; every server writes its own part. It is whole when this returns.

        Trainer 0 saves; another trainer hands in its `state`, which the checkpoints that follow have:
        a script calls it on all. A full disk is told in a warning, and ends nobody. The short form is
        ``save_persistables(dirname)``.

        Parameters
        ----------
        executor : Executor, optional
            As in the original; not needed.
        dirname : path, optional
            The directory, as the servers see it; ``FLEET_CHECKPOINT_DIR`` otherwise.
        main_program : Program, optional
            The trainer's program; that of this job otherwise.
        state : mapping, optional
            What the script wants to find again, as in `TrainStatus`.

        Raises
        ------
        ConfigurationError
            There is no directory, or the state holds what no checkpoint can.
        FleetError
            A server could not write, or gradients are on their way.
        """
        directory = directory_of("save_persistables", executor, dirname, self._checkpoint_root())
        training = self._training(main_program)
        status = TrainStatus(state=state or {})
        if self.is_first_worker():
            training.save(directory, status)
        else:
            training.hand_in(status)

    def load_persistables(
        self,
        executor: Any = None,
        dirname: str | os.PathLike[str] | None = None,
        main_program: Program | None = None,
    ) -> TrainStatus:
        """Go on from a checkpoint: on a server before it serves, or on every trainer before its first step.

        A trainer that was restarted while the others trained keeps the servers' values; `step` says where
        they are. The short form is ``load_persistables(dirname)``.

        Parameters
        ----------
        executor, dirname, main_program
            As in `save_persistables`. The directory may also be a folder of numbered checkpoints.

        Returns
        -------
        TrainStatus
            What was saved with it, the step among it.

        Raises
        ------
        CheckpointError
            There is no checkpoint, it is not whole, or it is of another model.
        """
        directory = directory_of("load_persistables", executor, dirname, self._checkpoint_root())
        status = self._load(directory, main_program)
        if status is None:
            raise CheckpointError(f"{directory} has no checkpoint; expected what save_persistables wrote")
        return status

    def save_check_point(
        self,
        executor: Any = None,
        path: Any = None,
        train_status: TrainStatus | None = None,
        main_program: Program | None = None,
        fs: object = None,
        remain_all_checkpoint: bool = True,
        *,
        incremental: bool = False,
    ) -> None:
        """Save a checkpoint under the next number of a folder, while training goes on.

        Trainer 0 has the servers copy what they hold; the copy is written in the background, and is a
        checkpoint once its manifest is durable. `stop_worker` waits for it, and so does the next save.
        Another trainer hands in its status, which the checkpoints that follow have. The short form is
        ``save_check_point(path, status)``.

        Parameters
        ----------
        executor : Executor, optional
            As in the original; not needed.
        path : path, optional
            The folder, as the servers see it; ``FLEET_CHECKPOINT_DIR`` otherwise.
        train_status : TrainStatus, optional
            How far the script has come.
        main_program : Program, optional
        fs : None
            The original's other file systems are refused.
        remain_all_checkpoint : bool
            False removes all older checkpoints of the folder.
        incremental : bool
            True saves of tables on the servers only the rows that have changed since the last checkpoint of
            all rows that this job has written into the folder, which stays as long as it is needed. Without
            one, all rows. Everything else is saved whole.

        Raises
        ------
        ConfigurationError, FleetError
            As in `save_persistables`.
        """
        refuse_file_system("save_check_point", fs)
        if isinstance(path, TrainStatus) and train_status is None:
            path, train_status = None, path
        directory = directory_of("save_check_point", executor, path, self._checkpoint_root())
        status = status_of("save_check_point", train_status)
        training = self._training(main_program)
        if self.is_first_worker():
            keep = 0 if remain_all_checkpoint else 1
            training.save_numbered(directory, status, keep=keep, incremental=incremental)
        else:
            training.hand_in(status)

    def load_check_point(
        self,
        executor: Any = None,
        path: Any = None,
        trainer_id: int | None = None,  # noqa: ARG002 - the original's, for its cache of downloads
        main_program: Program | None = None,
        fs: object = None,
        ignore_empty: bool = True,
    ) -> TrainStatus:
        """Go on from the newest checkpoint of a folder; as `load_persistables`, but there may be none yet.

        Parameters
        ----------
        executor, path
            As in `save_check_point`.
        trainer_id : int, optional
            As in the original; not needed.
        main_program, fs
            As in `save_check_point`.
        ignore_empty : bool
            False makes a folder without a checkpoint an error.

        Returns
        -------
        TrainStatus
            What was saved with it; ``TrainStatus()`` when there is none.

        Raises
        ------
        CheckpointError
            As in `load_persistables`.
        """
        refuse_file_system("load_check_point", fs)
        directory = directory_of("load_check_point", executor, path, self._checkpoint_root())
        status = self._load(directory, main_program)
        if status is None and not ignore_empty:
            raise CheckpointError(f"{directory} has no checkpoint; expected what save_check_point wrote")
        return status if status is not None else TrainStatus()

    def clean_redundant_check_points(
        self,
        root_path: str | os.PathLike[str] | None = None,
        fs: object = None,
        checkpoint_num: int = 1,
    ) -> None:
        """Remove all but the newest checkpoints of a folder, and what saves that were cut short have left.

        Trainer 0 does, as in `save_persistables`.

        Parameters
        ----------
        root_path : path, optional
            The folder; ``FLEET_CHECKPOINT_DIR`` otherwise.
        fs : None
        checkpoint_num : int
            How many to keep, at least 1.
        """
        call = "clean_redundant_check_points"
        refuse_file_system(call, fs)
        folder = directory_of(call, None, root_path, self._checkpoint_root())
        if isinstance(checkpoint_num, bool) or not isinstance(checkpoint_num, int) or checkpoint_num < 1:
            raise ConfigurationError(
                f"fleet.{call}: checkpoint_num is {checkpoint_num!r}; expected a whole number of at least 1"
            )
        training = self._training(None)
        if self.is_first_worker():
            training.clean(folder, checkpoint_num)

    def export_state_dict(self) -> dict[str, Tensor]:
        """Fetch the model as one PyTorch process's ``load_state_dict`` takes it, on the CPU.

        Any trainer may call it. With LocalSGD the trainers' models differ between two averages: every trainer
        calls it there, after the same step, and all go on from the mean, which is what they export.

        Raises
        ------
        ConfigurationError
            The parameters have no names; the message says how to give them theirs. Or, with LocalSGD, another
            trainer has called something else.
        """
        training = self._training(None)
        self._before_export("export_state_dict")
        return training.export()

    def save_inference_model(
        self,
        executor: Any = None,
        dirname: str | os.PathLike[str] | None = None,
        feeded_var_names: Sequence[str] = (),
        target_vars: Sequence[Any] = (),
        main_program: Program | None = None,
        *,
        table_ids: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the model, without its optimizers, to ``model.safetensors`` in a directory of this trainer.

        ``model.load_state_dict(safetensors.torch.load_file(path))`` loads it in one process. Trainer 0
        writes; on another trainer this does nothing, but for LocalSGD, as in `export_state_dict`. The short
        form is ``save_inference_model(dirname)``.

        Parameters
        ----------
        executor : Executor, optional
            As in the original; not needed.
        dirname : path
            The directory, as this trainer sees it: the job's checkpoints may be on the servers alone.
        feeded_var_names : sequence of str, optional
        target_vars : sequence, optional
            Names of what goes in and what comes out, or their Variables; noted in the file's description.
        main_program : Program, optional
            As in `save_persistables`.
        table_ids : mapping of str to int[n], optional
            By the name of each table on the servers, the ids that are served: the file has ``{table}.ids``,
            int64[m], ascending and each once, and ``{table}.rows``, float32[m, dimension]. It is needed
            where there are such tables.

        Raises
        ------
        ConfigurationError
            As in `export_state_dict`; or there is no directory.
        """
        directory = directory_of("save_inference_model", executor, dirname)
        training = self._training(main_program)
        self._before_export("save_inference_model")
        if self.is_first_worker():
            targets = [str(getattr(target, "name", target)) for target in target_vars]
            facts = {"step": training.current_step, "feeds": list(feeded_var_names), "targets": targets}
            write_model(Path(directory), training.export(table_ids), facts)
