"""A trainer's half of checkpoints: it asks the servers for their shards, and adds what only it has.

A save has two phases. First every server copies and writes its blocks, and the first one writes the
trainer's own part. Only when all have done so are they told to write the manifest, which names every file:
a save that is cut short leaves the checkpoint before it as it was.
"""

import secrets
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fleet.checkpoint import (
    CHECKPOINT_PREFIX,
    TRAINERS_STATE,
    FileRecord,
    Manifest,
    TrainerPart,
    TrainStatus,
    capture_part,
    restore_part,
    superfluous,
)
from fleet.errors import CheckpointError
from fleet.parameter_server.control.state_stream import join_values
from fleet.parameter_server.optimizer_state import state_of
from fleet.parameter_server.trainer.agreement import common_save
from fleet.parameter_server.trainer.client import Client
from fleet.program import Source, facts_of_training

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fleet.parameter_server.control.proto import control_pb2

__all__ = ["TrainerCheckpoints"]


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

    def save(self, directory: str, status: TrainStatus) -> None:
        """Save a checkpoint; it is whole when this returns.

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
        client, save, source = self._client, secrets.token_hex(4), self._source
        own_state = state_of(source) if self._steps_locally else {}
        part = capture_part(status, client.session.step, source, own_state).to_bytes()
        first = client.session.plan.endpoints[0]
        replies = client.calls.ask_all(
            lambda control, seconds: control.save(
                directory, save, client.session.step, part if control.endpoint == first else b"", seconds
            )
        )
        files = [FileRecord.from_json(text) for reply in replies for text in reply.files]
        manifest = Manifest(
            save=save,
            step=client.session.step,
            facts={
                **facts_of_training(client.session.plan.agreement),
                **({TRAINERS_STATE: "in the trainer's part"} if any(own_state.values()) else {}),
            },
            files=tuple(files),
            trainer_part=next(file.name for file in files if not file.blocks),
        ).to_json()
        client.calls.ask_all(lambda control, seconds: control.commit(directory, manifest, seconds))
        # Only now: until every server has the new one, the one before is what all have.
        client.calls.ask_all(lambda control, seconds: control.commit(directory, "", seconds))

    def save_numbered(self, folder: str, status: TrainStatus, keep: int) -> int:
        """Save a checkpoint under the next number of a folder, and keep the newest; return the number."""
        number = max(self.numbers(folder), default=-1) + 1
        self.save(f"{folder}/{CHECKPOINT_PREFIX}{number}", status)
        if keep:
            self.clean(folder, keep)
        return number

    def numbers(self, folder: str) -> list[int]:
        """Return the numbers of a folder's checkpoints."""
        replies = self._client.calls.ask_all(lambda control, seconds: control.checkpoints(folder, seconds))
        return _union(reply.numbers for reply in replies)

    def clean(self, folder: str, keep: int) -> None:
        """Remove a folder's checkpoints but the newest that every server has whole."""
        replies = self._client.calls.ask_all(
            lambda control, seconds: control.checkpoints(folder, seconds, verify=True)
        )
        whole = sorted(set.intersection(*(set(reply.whole) for reply in replies)))
        remove = superfluous(_union(reply.numbers for reply in replies), whole, keep)
        if remove:
            self._client.calls.ask_all(
                lambda control, seconds: control.checkpoints(folder, seconds, remove=remove)
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
        replies = self._client.calls.ask_all(lambda control, seconds: control.load(directory, seconds))
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
            self._take(self._client.calls.ask_all(lambda control, seconds: control.load("", seconds)))

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
        for reply in replies:
            if reply.trainer_part:
                part = TrainerPart.from_bytes(
                    reply.trainer_part, f"what {reply.directory} has of the trainer"
                )
                restore_part(part, self._source)
                return part.status
        return None


def _union(numbers: "Iterable[Iterable[int]]") -> list[int]:
    return sorted({number for each in numbers for number in each})
