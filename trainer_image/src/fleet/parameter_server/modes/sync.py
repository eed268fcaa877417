"""Sync: a block is stepped once every trainer that has not completed gave its gradient, or had none.

Gradients are summed in the order of the trainers whatever the order of their arrival, so a run can be
reproduced to the bit. They are added as they come: one that comes early waits in a buffer for those before
it, and where buffers are short its trainer waits in its socket. A trainer waits only for lower ones.

A trainer that comes back takes the values of one step from all servers, the lowest that any block has made:
of a block that is a step ahead, those from before (`previous`). So it computes on what its earlier life did.

A block that is clipped by a norm is averaged first, and stepped once the norm is known: by whatever call
brings the last part of it, a trainer's gradient or another server's word. No thread waits for it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.modes.answered import AnsweredTrainer
from fleet.parameter_server.modes.hyper import AgreedHyper
from fleet.parameter_server.modes.interface import (
    Answer,
    Missing,
    Mode,
    ServerMode,
    Session,
    TableServer,
    TellNorm,
    TrainerMode,
    Work,
)
from fleet.parameter_server.modes.norms import NormPart
from fleet.parameter_server.modes.previous import PreviousValues
from fleet.parameter_server.modes.repeats import Repeats
from fleet.parameter_server.modes.rounds import Rounds
from fleet.parameter_server.modes.stepping import Stepping
from fleet.parameter_server.modes.sync_tables import SyncTables
from fleet.parameter_server.receive_buffers import Turn
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.table_store import TableStore
from fleet.plan.config import DistributedMode
from fleet.wire import HyperParameters

__all__ = ["Sync", "SyncServer"]


@dataclass(frozen=True)
class Sync(Mode):
    """The sync mode. A trainer that is lost ends the job: the others' step cannot be made."""

    name: ClassVar[str] = "sync"
    programs: ClassVar[DistributedMode] = DistributedMode.SYNC
    survives_loss: ClassVar[bool] = False

    def make_server(self, shard: Shard, num_trainers: int) -> ServerMode:
        """Build the server's half."""
        return SyncServer(shard, num_trainers)

    def make_tables(self, store: TableStore, num_trainers: int) -> TableServer:
        """Build what keeps tables in step."""
        return SyncTables(store, num_trainers)

    def make_trainer(self, session: Session) -> TrainerMode:
        """Build the trainer's half."""
        return AnsweredTrainer(session)


class SyncServer:
    """The server's half of the sync mode; see `ServerMode`.

    Parameters
    ----------
    shard : Shard
        The blocks to step.
    num_trainers : int
        How many trainers take part until they complete.
    """

    def __init__(self, shard: Shard, num_trainers: int) -> None:
        self._shard = shard
        self._buffers = shard.buffers
        self._changed = shard.buffers.changed
        self._rounds = Rounds(shard.blocks, num_trainers)
        self._hyper = AgreedHyper()
        self._previous = PreviousValues(shard, self._rounds)
        self._stepping = Stepping(shard, self._rounds, self._hyper, self._previous)
        self._repeats = Repeats(shard, self._rounds)
        self._begun: dict[int, int] = {}
        """The step that each trainer has begun last."""

    @property
    def step(self) -> int:
        """The number of steps that every block has made."""
        with self._changed:
            return self._rounds.lowest_step

    def step_of(self, trainer: int) -> int:
        """Return the step that a trainer makes next: the same for all of them."""
        del trainer
        return self.step

    def resume(self, step: int) -> None:
        """Go on at a step that a checkpoint holds; called before any trainer has sent a gradient."""
        with self._changed:
            for round_ in self._rounds.of.values():
                round_.step = step

    def admit(self, trainer: int, incarnation: int = 0) -> None:
        """Begin anew with a trainer: what an earlier life of it has sent is dropped, if it is in no sum yet.

        What is in a sum with others' stands: when it comes again, it is dropped. So is what comes of a block
        of which the trainer had no gradient, once others' are summed, which come after it.
        """
        with self._changed:
            self._stepping.wait_for(lambda: not self._rounds.uses(trainer), "a step")
            for dropped in self._rounds.admit(trainer, incarnation, self._buffers.is_begun):
                self._buffers.release(dropped)
            self._buffers.forget(trainer)

    def pull(self, trainer: int, step: int) -> Sequence[Answer]:
        """Return every block's value after so many steps, for a trainer that has sent nothing yet.

        Raises
        ------
        StateLostError
            A block is at an earlier step, or more than one ahead.
        """
        return self._stepping.values_at(trainer, step)

    def turn(self, trainer: int, block: int) -> Turn:
        """Return when a gradient is used that is about to land."""
        return self._previous.turn(trainer, block, self._begun.get(trainer, -1))

    def value(self, trainer: int, block: int) -> None:
        """Return None: nobody steps the block before every trainer has its value and answers."""

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters) -> None:
        """Take the hyper-parameters of a trainer's step.

        Raises
        ------
        ConfigurationError
            Another trainer has other ones in this step.
        """
        with self._changed:
            self._begun[trainer] = step
            self._rounds.returning.discard(trainer)
            self._changed.notify_all()
            self._hyper.say(trainer, step, hyper_parameters, self._rounds.lowest_step)

    def gradient(self, trainer: int, block: int, step: int) -> Sequence[Answer] | Work:
        """Take a gradient that has landed in its receive buffer; return what is to be done with it.

        Raises
        ------
        RemoteProtocolError
            The block is not as far as the trainer believes, or has the gradient already.
        """
        with self._changed:
            gradient = self._buffers.landed(trainer)
            round_ = self._rounds.of[block]
            if step == round_.step and trainer not in round_.settled:
                round_.landed[trainer] = gradient
            else:
                self._buffers.release(gradient)
                return self._repeats.drop(trainer, block, step)
        return partial(self._stepping.advance, [block])

    def end(self, trainer: int, step: int, absent: Sequence[int]) -> Sequence[Answer]:
        """Take a trainer's word that it has no gradient for these blocks.

        Raises
        ------
        RemoteProtocolError
            A block is unknown, or was neither sent nor is absent.
        """
        with self._changed:
            unknown = [block for block in absent if block not in self._rounds.of]
            early = [block for block, round_ in self._rounds.of.items() if round_.step < step]
            if unknown or early:
                raise RemoteProtocolError(
                    f"trainer {trainer} ends step {step}: {len(unknown)} of the absent blocks are not of "
                    f"this server, and {len(early)} blocks are not as far yet; expected none"
                )
            late = [block for block in absent if self._rounds.of[block].step > step]
            for block in late:
                self._repeats.check(trainer, block, step)
            for block in set(absent).difference(late):
                self._rounds.of[block].absent.add(trainer)
                self._rounds.of[block].again.discard(trainer)
            open_ = [
                self._shard.blocks[block].name
                for block, round_ in self._rounds.of.items()
                if round_.step == step and (trainer not in round_.settled or trainer in round_.again)
            ]
            if open_:
                raise RemoteProtocolError(
                    f"trainer {trainer} ends step {step} but neither sent {', '.join(open_[:3])} "
                    "nor said that there is no gradient"
                )
            answers = [Answer(block, self._rounds.of[block].step, (trainer,)) for block in late]
            self._changed.notify_all()
        return answers + self._stepping.advance(absent)

    def complete(self, trainer: int) -> Sequence[Answer]:
        """Go on without a trainer that has finished."""
        with self._changed:
            self._rounds.live.discard(trainer)
            self._rounds.returning.discard(trainer)
            self._changed.notify_all()
        return self._stepping.advance(self._rounds.of)

    def connect(self, tell: TellNorm) -> None:
        """Tell other servers this one's part of a norm through `tell` from now on."""
        self._stepping.connect(tell)

    def norm(self, part: NormPart) -> Sequence[Answer]:
        """Take another server's part of a norm; return what follows from it.

        Raises
        ------
        RemoteProtocolError
            This server has no part in such a norm.
        """
        return self._stepping.norm(part)

    def missing(self) -> Missing | None:
        """Return what the step in progress waits for; None while nothing has begun to wait.

        Raises
        ------
        FleetError
            A block could not be stepped: the step in progress will never end.
        """
        with self._changed:
            self._stepping.check()
            for block, round_ in self._rounds.of.items():
                waited_for = self._rounds.live - round_.settled - self._buffers.held
                if round_.settled and waited_for and not round_.busy:
                    return Missing(round_.step, tuple(sorted(waited_for)), self._shard.blocks[block].name)
        if (awaited := self._stepping.awaited_norm()) is not None:
            return Missing(awaited.step, (), f"the norm of {awaited.norm.name}", awaited.servers)
        return None
