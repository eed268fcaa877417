"""``fleetjob run --tensorboard DIR``: writes the trainers' progress to TensorBoard event files.

`NewPoints` also selects the points for the record of a run (`fleet_operator.cli.run_record`).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from fleet_operator.api import Role
from fleet_operator.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from fleet_operator.cli.replica import ReplicaView
    from fleet_operator.plan.observe.progress import Progress


class ScalarsError(OperatorError):
    """The TensorBoard event files cannot be written."""


class Scalars:
    """The TensorBoard event files of the trainers, each in a folder named after the trainer.

    Parameters
    ----------
    folder : Path
        The parent folder of the trainers' folders.

    Raises
    ------
    ScalarsError
        The package for the format is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            # imported here, because the package is optional and slow to import
            import tensorboard.compat.proto.event_pb2
            import tensorboard.summary.writer.record_writer  # noqa: F401
        except ImportError as error:
            raise ScalarsError(
                "--tensorboard: the package tensorboard is not installed:"
                " pip install 'fleet-operator[tensorboard]'"
            ) from error
        self._folder = folder
        self._files: dict[str, EventFile] = {}

    def take(self, replicas: Iterable[ReplicaView]) -> None:
        """Write the trainers' new values.

        Raises
        ------
        OSError
            A file cannot be written.
        """
        for replica in replicas:
            if replica.role is not Role.TRAINER or replica.progress is None or replica.progress.step is None:
                continue
            if replica.name not in self._files:
                self._files[replica.name] = EventFile(self._folder / replica.name)
            self._files[replica.name].take(replica.progress, replica.progress.step)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


class NewPoints:
    """Selects new points from one trainer's reports: each loss once, other values when the step changes."""

    def __init__(self) -> None:
        self._step = -1
        self._loss_step = -1
        self._stale: dict[int, float] = {}

    def take(self, progress: Progress, step: int) -> Iterator[tuple[int, dict[str, float] | None]]:
        """Yield each new point: its step and its values.

        None instead of values means that the trainer restarted at this step, from a checkpoint or from the
        beginning, so that later points of its curve are invalid.
        """
        if step < self._step:
            yield step, None
            self._step = self._loss_step = step - 1
            self._stale = {at: loss for at, loss in progress.history.items() if at > step}
        for at, loss in progress.history.items():
            if self._loss_step < at <= step and self._stale.get(at) != loss:
                yield at, {"loss": loss}
                self._loss_step = at
        if step > self._step:
            self._step = step
            values = dict(progress.metrics)
            if progress.samples_per_second is not None:
                values["samples_per_second"] = progress.samples_per_second
            if values:
                yield step, values


class EventFile:
    """The event file of one trainer.

    The events are written synchronously. The package's own `EventFileWriter` uses a thread, which ends after
    a disk error and leaves a queue that blocks its writers forever.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"events.out.tfevents.{time.time_ns()}.fleetjob.{os.getpid()}"
        self._file = path.open("wb")
        self._records = RecordWriter(self._file)
        self._new = NewPoints()
        self._write(file_version="brain.Event:2")

    def take(self, progress: Progress, step: int) -> None:
        """Write those values of a trainer's progress report that are new to the event file."""
        for at, values in self._new.take(progress, step):
            if values is None:
                self._begin_again(at)
            else:
                self._write_scalars(at, values)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _begin_again(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(step=step, session_log=SessionLog(status=SessionLog.START))

    def _write_scalars(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        told = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=Summary(value=told))

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())
