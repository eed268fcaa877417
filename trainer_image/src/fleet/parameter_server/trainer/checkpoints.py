"""A trainer's half of checkpoints: it asks the servers for their shards, and adds what only it has.

A save begins with copies: every server copies its blocks, and training goes on. The rest is done in the
background, in two phases. First every server writes its copy, and the first one the trainer's own part. Only
when all have done so are they told to write the manifest, which names every file: a save that is cut short
leaves the checkpoint before it as it was.
"""

import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fleet.checkpoint import (
    CHECKPOINT_PREFIX,
    TRAINERS_STATE,
    Background,
    FileRecord,
    Manifest,
    OwnRows,
    TrainerPart,
    TrainStatus,
    capture_part,
    restore_part,
    superfluous,
)
from fleet.errors import CheckpointError, FleetError
from fleet.parameter_server.control.state_stream import join_values
from fleet.parameter_server.optimizer_state import state_of
from fleet.parameter_server.trainer.agreement import common_save
from fleet.parameter_server.trainer.client import Client
from fleet.parameter_server.trainer.parts import fetch_part, send_part
from fleet.plan import Source, facts_of_training

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet.parameter_server.control.proto import control_pb2

__all__ = ["TrainerCheckpoints"]

_log = logging.getLogger(__name__)


class TrainerCheckpoints:
    """Saves and loads for one trainer's session.

    Parameters
    ----------
    client : Client
        The session with the servers.
    source : Source
        The module and the optimizer.
    steps_locally : bool
        Whether the optimizer's state is this trainer's own, and not the servers'.
    """

    def __init__(self, client: Client, source: Source, *, steps_locally: bool = False) -> None:
        self._client = client
        self._source = source
        self._steps_locally = steps_locally
        self.background = Background()
        """What is being written while training goes on."""

    def save(self, directory: str, status: TrainStatus) -> None:
        """Save a checkpoint; it is durable when this returns, unless a disk has no room, which is told.

        Parameters
        ----------
        directory : str
            Where to, as the servers see it.
        status : TrainStatus
            The script's own words; the step is filled in.

        Raises
        ------
        ConfigurationError
            The status holds what no checkpoint can.
        FleetError
            A server could not write; the message names it and the file.
        """
        self.background.save(directory, self._client.session.step, lambda: self._copy(directory, status))

    def save_numbered(self, folder: str, status: TrainStatus, keep: int, *, incremental: bool = False) -> int:
        """Save a checkpoint under the next number of a folder, and return the number.

        The servers have copied what they hold when this returns; the copies are written, and only the newest
        checkpoints kept, while training goes on. Where there is no room, -1 is returned, and it is told.
        Raises as `save`, also for the save before this one.
        """
        self.background.wait()
        number = -1
        with self.background.pausing(folder):
            number = max(self.numbers(folder), default=-1) + 1
        if number < 0:
            return number
        directory = f"{folder}/{CHECKPOINT_PREFIX}{number}"

        def copy() -> Callable[[], None]:
            write = self._copy(directory, status, incremental=incremental)

            def finish() -> None:
                try:
                    write()
                except FleetError:
                    with contextlib.suppress(FleetError):  # the reason that counts is the first
                        self._remove(folder, [number])
                    raise
                if keep:
                    self.clean(folder, keep)

            return finish

        self.background.begin(directory, self._client.session.step, copy)
        return number

    def _copy(self, directory: str, status: TrainStatus, *, incremental: bool = False) -> Callable[[], None]:
        """Have the servers copy what they hold; return what makes the copies a checkpoint."""
        client, save, source = self._client, secrets.token_hex(4), self._source
        own_state = state_of(source) if self._steps_locally else {}
        local_rows, step = client.session.local_rows, client.session.step
        own_rows = local_rows.state() if local_rows is not None else OwnRows()
        part = capture_part(status, step, source, own_state, own_rows=own_rows).to_bytes()
        send_part(client.calls, save, part)
        first, part_bytes = client.session.plan.endpoints[0], len(part)
        replies = client.calls.ask_all(
            lambda control, seconds: control.checkpoints.save(
                directory,
                save,
                step,
                part_bytes if control.endpoint == first else 0,
                seconds,
                incremental=incremental,
            )
        )
        # A gradient may have come to one server and not to another yet.
        trainers = {trainer for reply in replies for trainer in reply.steps}
        steps = {
            str(trainer): min(reply.steps[trainer] for reply in replies if trainer in reply.steps)
            for trainer in sorted(trainers)
        }
        history = replies[0].history if replies[0].HasField("history") else None
        after = None if history is None else tuple(history.saves)
        facts = {
            **facts_of_training(client.session.plan.agreement),
            **(
                {TRAINERS_STATE: "in the trainer's part"}
                if own_rows.tables or any(own_state.values())
                else {}
            ),
        }

        def write() -> None:
            files = self._written(save)
            part_name = next(file.name for file in files if file.trainer == 0)
            manifest = Manifest(
                save, step, facts, tuple(files), part_name, steps=steps, after=after
            ).to_json()
            client.calls.ask_all(
                lambda control, seconds: control.checkpoints.commit(directory, manifest, seconds)
            )
            # Only now: until every server has the new one, the one before is what all have.
            client.calls.ask_all(lambda control, seconds: control.checkpoints.commit(directory, "", seconds))

        return write

    def _written(self, save: str) -> list[FileRecord]:
        """Wait until every server has written its files, or has failed to, and return the files."""
        files, failure = list[FileRecord](), None
        for server in range(len(self._client.session.plan.endpoints)):
            try:
                reply = self._client.calls.ask_until(
                    server,
                    lambda control, seconds: control.checkpoints.written(save, seconds),
                    lambda reply: reply.done,
                    "write its part of a checkpoint",
                )
                files += [FileRecord.from_json(text) for text in reply.files]
            except FleetError as error:
                failure = failure or error
        if failure is not None:
            raise failure
        return files

    def _remove(self, folder: str, numbers: Sequence[int]) -> None:
        self._client.calls.ask_all(
            lambda control, seconds: control.checkpoints.numbers(folder, seconds, remove=numbers)
        )

    def numbers(self, folder: str) -> list[int]:
        """Return the numbers of a folder's checkpoints."""
        replies = self._client.calls.ask_all(
            lambda control, seconds: control.checkpoints.numbers(folder, seconds)
        )
        return _union(reply.numbers for reply in replies)

    def hand_in(self, status: TrainStatus) -> None:
        """Say how far this trainer's script has come; the checkpoints that follow have it."""
        client = self._client
        part = TrainerPart(replace(status, step=client.session.step)).to_bytes()
        client.calls.ask(
            0, lambda control, seconds: control.checkpoints.hand_in(client.session.step, part, seconds)
        )

    def clean(self, folder: str, keep: int) -> None:
        """Remove a folder's checkpoints but the newest that every server has whole."""
        replies = self._client.calls.ask_all(
            lambda control, seconds: control.checkpoints.numbers(folder, seconds, verify=True)
        )
        whole = sorted(set.intersection(*(set(reply.whole) for reply in replies)))
        remove = superfluous(_union(reply.numbers for reply in replies), whole, keep)
        if remove:
            self._client.calls.ask_all(
                lambda control, seconds: control.checkpoints.numbers(folder, seconds, remove=remove)
            )

    def load(self, directory: str) -> tuple[TrainStatus | None, bool]:
        """Have the servers load a checkpoint unless training has begun, and go on from there.

        Parameters
        ----------
        directory : str
            A checkpoint, or a folder of numbered ones, of which the newest counts; as the servers see it.

        Returns
        -------
        status : TrainStatus or None
            What the checkpoint says; None when there is none. Where training has begun already, as for a
            trainer that was restarted, the servers' values stay as they are, and `Session.step` says where
            they are.
        other_values : bool
            Whether this trainer's parameters are others now.

        Raises
        ------
        CheckpointError
            It cannot be loaded, or the servers have found different ones.
        """
        replies = self._client.calls.ask_all(
            lambda control, seconds: control.checkpoints.load(directory, seconds)
        )
        if len({reply.restored for reply in replies}) > 1:
            if not common_save(replies):
                found = {reply.directory or "none" for reply in replies}
                raise CheckpointError(
                    "the parameter servers have found different checkpoints: "
                    f"{', '.join(sorted(found))}; name one that every server has whole"
                )
            replies = self._client.agree()
        other_values = any(reply.restored != self._client.restored for reply in replies)
        if other_values:
            self._client.pull([reply.restored for reply in replies], [reply.step for reply in replies])
        return self._take(replies), other_values

    def take_part(self) -> None:
        """Take the trainer's part of the checkpoint that the servers have loaded before, if they have."""
        if self._client.restored:
            self._take(
                self._client.calls.ask_all(lambda control, seconds: control.checkpoints.load("", seconds))
            )

    def values(self) -> dict[str, Tensor]:
        """Fetch the values that the servers hold, by parameter."""
        found = join_values(self._client.calls.values())
        plan = self._client.session.plan
        values = {}
        for name in dict.fromkeys(block.param for block in plan.blocks):
            blocks = plan.blocks_of(name)
            parts = [found[block.id].reshape(-1) for block in blocks]
            values[name] = torch.cat(parts).view(blocks[0].param_shape)
        return values

    def _take(self, replies: "Iterable[control_pb2.LoadReply]") -> TrainStatus | None:
        replies = list(replies)
        taken: TrainStatus | None = None
        for server, reply in enumerate(replies):
            if reply.part_bytes:
                found = fetch_part(self._client.calls, server, reply.part_bytes)
                part = TrainerPart.from_bytes(found, f"what {reply.directory} has of the trainer")
                restore_part(part, self._source)
                if self._client.session.local_rows is not None:
                    self._client.session.local_rows.resume(part.own_rows)
                taken = part.status
                break
        return self._own_status(replies, taken)

    def _own_status(
        self, replies: "Sequence[control_pb2.LoadReply]", of_first: TrainStatus | None
    ) -> TrainStatus | None:
        """Return how far this trainer has come, which is trainer 0's word only where they are in step."""
        trainer = self._client.session.plan.trainer_id
        if trainer == 0:
            return of_first
        for reply in replies:
            if reply.status:
                where = f"what the servers have of trainer {trainer}"
                return TrainerPart.from_bytes(reply.status, where).status
        if of_first is None or not any(reply.apart for reply in replies):
            return of_first
        _log.warning(
            "nothing says how far the script of trainer %d had come, which has made %d steps at a pace of "
            "its own: it gets a TrainStatus without an epoch; call fleet.save_check_point on every trainer, "
            "or loop over fleet.epochs() or fleet.steps()",
            trainer,
            self._client.session.step,
        )
        return TrainStatus(step=self._client.session.step)


def _union(numbers: "Iterable[Iterable[int]]") -> list[int]:
    return sorted({number for each in numbers for number in each})
