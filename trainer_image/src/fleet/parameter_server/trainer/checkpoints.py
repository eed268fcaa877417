"""Checkpoints in a job with servers: a trainer coordinates them and saves its own part.

A save begins with copies: every server copies its blocks, and training continues. Then every server writes
its copy, and the first server also writes trainer 0's part. Once all files are durable, the servers receive
the manifest, which lists every file. So an interrupted save leaves the previous checkpoint intact.
"""

import logging
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fleet.checkpoint import (
    TRAINERS_STATE,
    FileRecord,
    Manifest,
    OwnRows,
    Saver,
    TrainerPart,
    TrainStatus,
    capture_part,
    removable_numbers,
    restore_part,
    restore_values,
)
from fleet.errors import CheckpointError, FleetError
from fleet.parameter_server.control.calls import CHUNK_BYTES
from fleet.parameter_server.control.checkpoints import join_values
from fleet.parameter_server.facts import state_of
from fleet.parameter_server.trainer.agreement import common_save
from fleet.parameter_server.trainer.session import Session
from fleet.plan import Source, facts_of_training

if TYPE_CHECKING:
    from fleet.parameter_server.control.proto import control_pb2

__all__ = ["TrainerCheckpoints"]

_log = logging.getLogger(__name__)


class TrainerCheckpoints(Saver):
    """The checkpoints of a trainer's session. Their directories are paths on the servers.

    Parameters
    ----------
    session : Session
        The session with the servers.
    source : Source
        The module and the optimizer.
    steps_locally : bool
        Whether this trainer, instead of the servers, has the optimizer state.
    """

    def __init__(self, session: Session, source: Source, *, steps_locally: bool = False) -> None:
        super().__init__()
        self._session = session
        self._source = source
        self._steps_locally = steps_locally
        self.restored_step = 0
        """The step of the values that no server stores, when they were last restored; initially 0."""

    @property
    def current_step(self) -> int:
        """The number of steps completed since the start of the job."""
        return self._session.step

    def submit_status(self, status: TrainStatus) -> None:
        """Send this trainer's script status to the servers, which include it in later checkpoints."""
        step = self.current_step
        part = TrainerPart(replace(status, step=step)).to_bytes()
        self._session.calls.ask(
            0, lambda control, seconds: control.checkpoints.set_status(step, part, seconds)
        )

    def load(self, directory: str) -> tuple[TrainStatus | None, bool]:
        """Make the servers load a checkpoint unless training has begun; restore trainer 0's part from it.

        Parameters
        ----------
        directory : str
            A checkpoint, or a folder of numbered checkpoints, of which the newest is loaded.

        Returns
        -------
        status : TrainStatus or None
            The checkpoint's status; None if there is no checkpoint. If training has begun, as for a restarted
            trainer, the servers keep their values, and `Session.step` gives their step.
        other_values : bool
            Whether the load has changed this trainer's parameters.

        Raises
        ------
        CheckpointError
            The checkpoint cannot be loaded, or the servers have found different checkpoints.
        """
        replies = self._session.calls.ask_all(
            lambda control, seconds: control.checkpoints.load(directory, seconds)
        )
        if len({reply.restored for reply in replies}) > 1:
            if not common_save(replies):
                found = {reply.directory or "none" for reply in replies}
                raise CheckpointError(
                    "the parameter servers have found different checkpoints: "
                    f"{', '.join(sorted(found))}; name one that is complete on every server"
                )
            replies = self._session.agree()
        other_values = any(reply.restored != self._session.restored for reply in replies)
        if other_values:
            self._session.pull([reply.restored for reply in replies], [reply.step for reply in replies])
        self.restored_step = self.current_step  # unless there is a trainer's part of another step
        return self._restore(replies), other_values

    def restore_saved_values(self) -> None:
        """Restore, from this run's newest checkpoint, the values that servers do not store."""
        replies = self._session.calls.ask_all(lambda control, seconds: control.checkpoints.load("", seconds))
        if (part := self._find_part(replies)) is not None:
            restore_values(part, self._source)

    def restore_own_part(self) -> None:
        """If the servers loaded a checkpoint, restore trainer 0's part of the newest one."""
        if self._session.restored:
            self._restore(
                self._session.calls.ask_all(lambda control, seconds: control.checkpoints.load("", seconds))
            )

    def values(self) -> dict[str, Tensor]:
        """Fetch the values of all parameters from the servers."""
        found = join_values(self._session.calls.values())
        plan = self._session.plan
        values = {}
        for name in dict.fromkeys(block.param for block in plan.blocks):
            blocks = plan.blocks_of(name)
            parts = [found[block.id].reshape(-1) for block in blocks]
            values[name] = torch.cat(parts).view(blocks[0].param_shape)
        return values

    def _copy(self, directory: str, status: TrainStatus, *, incremental: bool = False) -> Callable[[], None]:
        calls, session, source = self._session.calls, self._session, self._source
        save, step = secrets.token_hex(4), session.step
        own_state = state_of(source) if self._steps_locally else {}
        own_rows = session.local_rows.state() if session.local_rows is not None else OwnRows()
        part = capture_part(status, step, source, own_state, own_rows=own_rows).to_bytes()
        # Before the saves, because the first server writes the part with its own files.
        self._upload_part(save, part)
        first = session.plan.endpoints[0]
        replies = calls.ask_all(
            lambda control, seconds: control.checkpoints.save(
                directory,
                save,
                step,
                len(part) if control.endpoint == first else 0,
                seconds,
                incremental=incremental,
            )
        )
        # The minimum over the servers, because a gradient may have reached only some servers.
        trainers = {trainer for reply in replies for trainer in reply.steps}
        steps = {
            str(trainer): min(reply.steps[trainer] for reply in replies if trainer in reply.steps)
            for trainer in sorted(trainers)
        }
        after = tuple(replies[0].history.saves) if replies[0].HasField("history") else None
        facts = facts_of_training(session.plan.agreement)
        if own_rows.tables or any(own_state.values()):
            facts = {**facts, TRAINERS_STATE: "in the trainer's part"}

        def write() -> None:
            files = self._wait_until_written(save)
            part_name = next(file.name for file in files if file.trainer == 0)
            manifest = Manifest(
                save, step, facts, tuple(files), part_name, steps=steps, after=after
            ).to_json()
            calls.ask_all(lambda control, seconds: control.checkpoints.commit(directory, manifest, seconds))
            # Old files are removed only now: until every server has the new manifest, the previous one is
            # valid.
            calls.ask_all(lambda control, seconds: control.checkpoints.commit(directory, "", seconds))

        return write

    def _wait_until_written(self, save: str) -> list[FileRecord]:
        """Wait until every server has written its files; return the records of all files."""
        files, failure = list[FileRecord](), None
        for server in range(len(self._session.plan.endpoints)):
            try:
                reply = self._session.calls.ask_until(
                    server,
                    lambda control, seconds: control.checkpoints.written(save, seconds),
                    lambda reply: reply.done,
                    "write its part of a checkpoint",
                )
                files += [FileRecord.from_json(text) for text in reply.files]
            except FleetError as error:
                # The other servers are waited for as well: when the save fails, they have ended writing its
                # files.
                failure = failure or error
        if failure is not None:
            raise failure
        return files

    def _list_numbers(self, folder: str) -> list[int]:
        return _union(reply.numbers for reply in self._numbers(folder))

    def _remove(self, folder: str, number: int) -> None:
        self._numbers(folder, remove=[number])

    def _keep_newest(self, folder: str, keep: int) -> None:
        replies = self._numbers(folder, verify=True)
        whole = sorted(set.intersection(*(set(reply.whole) for reply in replies)))
        if remove := removable_numbers(_union(reply.numbers for reply in replies), whole, keep):
            self._numbers(folder, remove=remove)

    def _numbers(
        self, folder: str, *, verify: bool = False, remove: Sequence[int] = ()
    ) -> "list[control_pb2.CheckpointsReply]":
        return self._session.calls.ask_all(
            lambda control, seconds: control.checkpoints.numbers(
                folder, seconds, verify=verify, remove=remove
            )
        )

    def _restore(self, replies: "Sequence[control_pb2.LoadReply]") -> TrainStatus | None:
        """Restore trainer 0's part of a checkpoint; return the status for this trainer."""
        part = self._find_part(replies)
        if part is not None:
            restore_part(part, self._source)
            if self._session.local_rows is not None:
                self._session.local_rows.resume(part.own_rows)
        first_status = part.status if part is not None else None
        trainer = self._session.plan.trainer_id
        if trainer == 0:
            return first_status
        for reply in replies:
            if reply.status:
                where = f"the status of trainer {trainer} on the servers"
                return TrainerPart.from_bytes(reply.status, where).status
        # Trainer 0's status applies to other trainers only in modes with a common step.
        if first_status is None or not any(reply.apart for reply in replies):
            return first_status
        _log.warning(
            "the checkpoint has no status of trainer %d, which had made %d steps at its own pace: the "
            "trainer gets a TrainStatus without an epoch; call fleet.save_check_point on every trainer, or "
            "loop over fleet.epochs() or fleet.steps()",
            trainer,
            self.current_step,
        )
        return TrainStatus(step=self.current_step)

    def _find_part(self, replies: "Sequence[control_pb2.LoadReply]") -> TrainerPart | None:
        """Fetch trainer 0's part from the first server that offers one; record the part's step."""
        for server, reply in enumerate(replies):
            if reply.part_bytes:
                data = self._download_part(server, reply.part_bytes)
                part = TrainerPart.from_bytes(data, f"the trainer's part of {reply.directory}")
                self.restored_step = part.status.step
                return part
        return None

    def _upload_part(self, save: str, part: bytes) -> None:
        """Send trainer 0's part to the first server, in chunks that each fit into one message."""
        for offset in range(0, len(part), CHUNK_BYTES):
            chunk = part[offset : offset + CHUNK_BYTES]
            self._session.calls.ask(
                0,
                lambda control, seconds: control.checkpoints.upload_part(save, offset, chunk, seconds),  # noqa: B023
            )

    def _download_part(self, server: int, size: int) -> bytes:
        """Fetch the part that a server offers, in chunks.

        Raises
        ------
        FleetError
            The server returns fewer than `size` bytes.
        """
        calls, part = self._session.calls, bytearray()
        while len(part) < size:
            data = calls.ask(
                server,
                lambda control, seconds: control.checkpoints.download_part(len(part), seconds),  # noqa: B023
            ).data
            if not data:
                raise FleetError(
                    f"parameter server {calls.controls[server].endpoint} returned {len(part)} bytes of the "
                    f"trainer's part of its checkpoint, expected {size}; load the checkpoint again"
                )
            part += data
        return bytes(part)


def _union(numbers: Iterable[Iterable[int]]) -> list[int]:
    return sorted({number for each in numbers for number in each})
