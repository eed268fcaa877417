"""The public methods for saving, loading and exporting, with Paddle's signatures and shorter forms."""

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from fleet.checkpoint.export import write_model
from fleet.checkpoint.trainer_part import TrainStatus
from fleet.checkpoint.values import as_count, as_mapping
from fleet.errors import CheckpointError, ConfigurationError

if TYPE_CHECKING:
    from fleet.fluid.program import Program

__all__ = ["Savable", "SavingCalls"]


class Savable(Protocol):
    """A training run that can be saved, loaded and exported."""

    @property
    def current_step(self) -> int:
        """The number of steps since the start of the job."""

    def save(self, directory: str, status: TrainStatus) -> None:
        """Save a checkpoint; see `Saver.save`."""

    def save_numbered(self, folder: str, status: TrainStatus, *, keep: int, incremental: bool = False) -> int:
        """Save a checkpoint under the next number in a folder; see `Saver.save_numbered`."""

    def submit_status(self, status: TrainStatus) -> None:
        """Submit this trainer's script status for later checkpoints; trainer 0 calls `save` instead."""

    def clean(self, folder: str, keep: int) -> None:
        """Remove all checkpoints in a folder except the newest ones; see `Saver.clean`."""

    def load(self, directory: str) -> TrainStatus | None:
        """Load the newest checkpoint in a directory; return None if there is none."""

    def export(self, table_ids: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        """Return the model's state dict, including the requested rows of tables on the servers."""


class SavingCalls(ABC):
    """The methods of a ``fleet`` object that save, load and export this process's training run."""

    @abstractmethod
    def _checkpoint_root(self) -> str | None:
        """Return the default checkpoint directory; raise ConfigurationError before ``init``."""

    @abstractmethod
    def _training(self, program: "Program | None") -> Savable:
        """Return this trainer's training run; raise ConfigurationError if the program has none."""

    @abstractmethod
    def is_first_worker(self) -> bool:
        """Return whether this process is trainer 0, which saves for all trainers."""

    def _before_export(self, call: str) -> None:  # noqa: B027 (optional: servers hold a single model)
        """Average the trainers' models if they may differ; every trainer must call this."""

    def _load(self, directory: str, program: "Program | None") -> TrainStatus | None:
        return self._training(program).load(directory)

    def save_persistables(
        self,
        executor: Any = None,
        dirname: str | os.PathLike[str] | None = None,
        main_program: "Program | None" = None,
        *,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        """Save a checkpoint to the given directory, and return when it is complete.

        Every trainer makes this call. Trainer 0 saves, and every server writes its own part; on another
        trainer the call submits its `state`, which later checkpoints will hold. If the disk is full, the save
        is skipped with a warning. The short form is ``save_persistables(dirname)``.

        Parameters
        ----------
        executor : Executor, optional
            Accepted as in Paddle; not needed.
        dirname : path, optional
            The directory, as the servers see it; ``FLEET_CHECKPOINT_DIR`` otherwise.
        main_program : Program, optional
            The trainer's program; that of this job otherwise.
        state : mapping, optional
            The script's own values, as in `TrainStatus`.

        Raises
        ------
        ConfigurationError
            There is no directory, or a checkpoint cannot hold the state.
        FleetError
            A server could not write, or gradients are in flight.
        """
        directory = _directory_of("save_persistables", executor, dirname, self._checkpoint_root())
        training = self._training(main_program)
        status = TrainStatus(state=state or {})
        if self.is_first_worker():
            training.save(directory, status)
        else:
            training.submit_status(status)

    def load_persistables(
        self,
        executor: Any = None,
        dirname: str | os.PathLike[str] | None = None,
        main_program: "Program | None" = None,
    ) -> TrainStatus:
        """Load a checkpoint: on a server before it starts serving, or on all trainers before the first step.

        A trainer that was restarted while the others trained keeps the servers' values; `step` is then the
        servers' step. The short form is ``load_persistables(dirname)``.

        Parameters
        ----------
        executor, dirname, main_program
            As in `save_persistables`. The directory may also be a folder of numbered checkpoints.

        Returns
        -------
        TrainStatus
            The saved status, with the step.

        Raises
        ------
        CheckpointError
            There is no checkpoint, or it is damaged or was saved from another model.
        """
        directory = _directory_of("load_persistables", executor, dirname, self._checkpoint_root())
        status = self._load(directory, main_program)
        if status is None:
            raise CheckpointError(f"{directory} has no checkpoint; expected one that save_persistables wrote")
        return status

    def save_check_point(
        self,
        executor: Any = None,
        path: Any = None,
        train_status: TrainStatus | None = None,
        main_program: "Program | None" = None,
        fs: object = None,
        remain_all_checkpoint: bool = True,
        *,
        incremental: bool = False,
    ) -> None:
        """Save a checkpoint under the next number in a folder, while training continues.

        Every trainer makes this call. Trainer 0 has the servers copy their values. The copy is written in the
        background, and becomes a checkpoint when its manifest is durable; `stop_worker` and the next save
        wait for it. On another trainer the call submits its status, which later checkpoints will hold. The
        short form is ``save_check_point(path, status)``.

        Parameters
        ----------
        executor : Executor, optional
            Accepted as in Paddle; not needed.
        path : path, optional
            The folder, as the servers see it; ``FLEET_CHECKPOINT_DIR`` otherwise.
        train_status : TrainStatus, optional
            The progress of the script.
        main_program : Program, optional
        fs : None
            Paddle's other file systems are not supported.
        remain_all_checkpoint : bool
            False removes all older checkpoints of the folder.
        incremental : bool
            True saves only those rows of tables on the servers that have changed since the last full
            checkpoint that this job wrote into the folder. That checkpoint stays as long as others need it.
            If there is none, all rows are saved. Everything else is always saved in full.

        Raises
        ------
        ConfigurationError, FleetError
            As in `save_persistables`.
        """
        _refuse_file_system("save_check_point", fs)
        # In the short form, the status is the second positional argument.
        if isinstance(path, TrainStatus) and train_status is None:
            path, train_status = None, path
        directory = _directory_of("save_check_point", executor, path, self._checkpoint_root())
        status = _status_of("save_check_point", train_status)
        training = self._training(main_program)
        if self.is_first_worker():
            keep = 0 if remain_all_checkpoint else 1
            training.save_numbered(directory, status, keep=keep, incremental=incremental)
        else:
            training.submit_status(status)

    def load_check_point(
        self,
        executor: Any = None,
        path: Any = None,
        trainer_id: int | None = None,  # noqa: ARG002 - Paddle's, for its download cache
        main_program: "Program | None" = None,
        fs: object = None,
        ignore_empty: bool = True,
    ) -> TrainStatus:
        """Load the newest checkpoint in a folder, if there is one; see `load_persistables`.

        Parameters
        ----------
        executor, path
            As in `save_check_point`.
        trainer_id : int, optional
            Accepted as in Paddle; not needed.
        main_program, fs
            As in `save_check_point`.
        ignore_empty : bool
            False makes a folder without a checkpoint an error.

        Returns
        -------
        TrainStatus
            The saved status; ``TrainStatus()`` if there is no checkpoint.

        Raises
        ------
        CheckpointError
            As in `load_persistables`.
        """
        _refuse_file_system("load_check_point", fs)
        directory = _directory_of("load_check_point", executor, path, self._checkpoint_root())
        status = self._load(directory, main_program)
        if status is None and not ignore_empty:
            raise CheckpointError(f"{directory} has no checkpoint; expected one that save_check_point wrote")
        return status if status is not None else TrainStatus()

    def clean_redundant_check_points(
        self,
        root_path: str | os.PathLike[str] | None = None,
        fs: object = None,
        checkpoint_num: int = 1,
    ) -> None:
        """Remove all but the newest checkpoints of a folder, and the files of interrupted saves.

        Only trainer 0 removes files; on another trainer the call does nothing.

        Parameters
        ----------
        root_path : path, optional
            The folder; ``FLEET_CHECKPOINT_DIR`` otherwise.
        fs : None
        checkpoint_num : int
            The number of checkpoints to keep, at least 1.

        Raises
        ------
        ConfigurationError
            `checkpoint_num` is not a positive integer.
        """
        call = "clean_redundant_check_points"
        _refuse_file_system(call, fs)
        folder = _directory_of(call, None, root_path, self._checkpoint_root())
        if isinstance(checkpoint_num, bool) or not isinstance(checkpoint_num, int) or checkpoint_num < 1:
            raise ConfigurationError(
                f"fleet.{call}: checkpoint_num is {checkpoint_num!r}; expected a whole number of at least 1"
            )
        training = self._training(None)
        if self.is_first_worker():
            training.clean(folder, checkpoint_num)

    def export_state_dict(self) -> dict[str, Tensor]:
        """Fetch the model's state dict, on the CPU, for ``load_state_dict`` in one PyTorch process.

        Any trainer may call it. With LocalSGD the trainers' models differ between two averages, so every
        trainer must call it after the same step; all trainers then export the mean of the models and continue
        from it.

        Raises
        ------
        ConfigurationError
            The parameters have no names; the message says how to name them. Or, with LocalSGD, another
            trainer is making a different call.
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
        main_program: "Program | None" = None,
        *,
        table_ids: Mapping[str, Any] | None = None,
    ) -> None:
        """Write the model without optimizer state to ``model.safetensors`` in a local directory.

        ``model.load_state_dict(safetensors.torch.load_file(path))`` loads it in one process. Trainer 0
        writes. On another trainer the call does nothing, except with LocalSGD, as in `export_state_dict`. The
        short form is ``save_inference_model(dirname)``.

        Parameters
        ----------
        executor : Executor, optional
            Accepted as in Paddle; not needed.
        dirname : path
            A directory that this trainer can reach; the job's checkpoint folder may be visible to the servers
            only.
        feeded_var_names : sequence of str, optional
        target_vars : sequence, optional
            Names of the inputs, and names or Variables of the outputs. They are recorded in the file's
            metadata.
        main_program : Program, optional
            As in `save_persistables`.
        table_ids : mapping of str to int[n], optional
            The ids to serve, by table on the servers; required for each such table. The file then has
            ``{table}.ids``, int64[m], ascending and unique, and ``{table}.rows``, float32[m, dimension].

        Raises
        ------
        ConfigurationError
            As in `export_state_dict`; or there is no directory.
        """
        directory = _directory_of("save_inference_model", executor, dirname)
        training = self._training(main_program)
        self._before_export("save_inference_model")
        if self.is_first_worker():
            targets = [str(getattr(target, "name", target)) for target in target_vars]
            facts = {"step": training.current_step, "feeds": list(feeded_var_names), "targets": targets}
            write_model(Path(directory), training.export(table_ids), facts)


def _directory_of(call: str, executor: Any, dirname: Any, default: str | None = "") -> str:
    """Return the directory from Paddle's arguments, ``(executor, dirname)`` or ``(dirname)``.

    Parameters
    ----------
    call : str
        Names the public call in error messages.
    executor, dirname
        As in Paddle, an executor, which is not needed, and a path; or only a path.
    default : str or None
        ``FLEET_CHECKPOINT_DIR``; the empty string for a call that requires a directory.

    Raises
    ------
    ConfigurationError
        There is no directory, or an argument of another type.
    """
    if isinstance(executor, str | os.PathLike) and dirname is None:
        executor, dirname = None, executor
    if executor is not None and not hasattr(executor, "run"):
        raise ConfigurationError(
            f"fleet.{call}: the executor is {executor!r}; expected a fleet.Executor or None before the "
            "directory, or only the directory"
        )
    expected = "a path" if default == "" else "a path, or FLEET_CHECKPOINT_DIR to be set"
    if dirname is None:
        dirname = default or None
    if isinstance(dirname, os.PathLike):
        dirname = os.fspath(dirname)
    if not isinstance(dirname, str) or not dirname:
        raise ConfigurationError(f"fleet.{call}: the directory is {dirname!r}; expected {expected}")
    return dirname


def _status_of(call: str, status: object) -> TrainStatus:
    """Return `status`, or a new one if it is None; raise ConfigurationError if its values are invalid."""
    if status is None:
        return TrainStatus()
    if not isinstance(status, TrainStatus):
        raise ConfigurationError(f"fleet.{call}: train_status is {status!r}; expected a fleet.TrainStatus")
    try:
        as_count("epoch_no", status.epoch_no, least=-1)
        as_count("step", status.step)
        as_mapping("state", status.state)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"fleet.{call}: {error} in train_status") from error
    return status


def _refuse_file_system(call: str, fs: object) -> None:
    if fs is not None:
        raise ConfigurationError(
            f"fleet.{call}: fs is {fs!r}; expected None: checkpoints go to mounted directories, so mount the "
            "other file system, or copy a checkpoint's directory there after the save"
        )
