"""Sync: a block is stepped once every trainer that has not completed gave its gradient, or had none.

Gradients are summed in the order of the trainers whatever the order of their arrival, so a run can be
reproduced to the bit. No trainer waits for another here: each one's gradients land in memory of its own.
"""

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from fleet.errors import ConfigurationError, RemoteProtocolError
from fleet.parameter_server.modes.answered import AnsweredTrainer
from fleet.parameter_server.modes.interface import Answer, Missing, Mode, ServerMode, Session, TrainerMode
from fleet.parameter_server.shard import Shard
from fleet.transpiler.config import DistributedMode
from fleet.wire import HyperParameters

__all__ = ["Sync", "SyncServer"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Sync(Mode):
    """The sync mode. A trainer that is lost ends the job: the others' step cannot be made."""

    name: ClassVar[str] = "sync"
    programs: ClassVar[DistributedMode] = DistributedMode.SYNC
    survives_loss: ClassVar[bool] = False

    def make_server(self, shard: Shard, num_trainers: int) -> ServerMode:
        """Build the server's half."""
        return SyncServer(shard, num_trainers)

    def make_trainer(self, session: Session) -> TrainerMode:
        """Build the trainer's half."""
        return AnsweredTrainer(session)


@dataclass(slots=True)
class _Round:
    """One block's progress through one step."""

    step: int = 0
    arrived: set[int] = field(default_factory=set)
    absent: set[int] = field(default_factory=set)
    applying: bool = False

    @property
    def settled(self) -> set[int]:
        return self.arrived | self.absent


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
        self._live = set(range(num_trainers))
        self._rounds = {block: _Round() for block in shard.blocks}
        self._hyper: dict[int, dict[int, HyperParameters]] = {}
        self._changed = threading.Condition()

    @property
    def step(self) -> int:
        """The number of steps that every block has made."""
        with self._changed:
            return self._lowest_step()

    def step_of(self, trainer: int) -> int:
        """Return the step that a trainer makes next: the same for all of them."""
        del trainer
        return self.step

    def admit(self, trainer: int) -> None:
        """Begin anew with a trainer: what an earlier life of it has sent and is not applied is dropped."""
        with self._changed:
            self._live.add(trainer)
            for of_step in self._hyper.values():
                of_step.pop(trainer, None)
            for round_ in self._rounds.values():
                if not round_.applying:
                    round_.arrived.discard(trainer)
                    round_.absent.discard(trainer)
            self._changed.wait_for(lambda: not any(round_.applying for round_ in self._rounds.values()))

    def pull(self, trainer: int) -> Sequence[Answer]:
        """Return the present value of every block, for a trainer that has sent nothing yet."""
        with self._changed:
            return [Answer(block, round_.step, (trainer,)) for block, round_ in self._rounds.items()]

    def destination(self, trainer: int, block: int) -> memoryview:
        """Return where the bytes of a gradient belong."""
        return self._shard.gradient_bytes(trainer, block)

    def value(self, trainer: int, block: int) -> memoryview:
        """Return the bytes of a value: nobody steps the block before every trainer has it and answers."""
        del trainer
        return self._shard.value_bytes(block)

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters) -> None:
        """Take the hyper-parameters of a trainer's step.

        Raises
        ------
        ConfigurationError
            Another trainer has other ones in this step.
        """
        with self._changed:
            lowest = self._lowest_step()
            for old in [known for known in self._hyper if known < lowest]:
                del self._hyper[old]
            of_step = self._hyper.setdefault(step, {})
            first = next(iter(of_step), trainer)
            agreed = of_step.get(first, hyper_parameters)
            of_step[trainer] = hyper_parameters
        if agreed != hyper_parameters:
            raise ConfigurationError(
                f"step {step}: trainer {trainer} has other hyper-parameters than trainer {first}: "
                f"{_difference(hyper_parameters, agreed)}; in sync mode a schedule must not depend on the "
                "trainer's own data, and a restarted trainer advances it to fleet.step"
            )

    def gradient(self, trainer: int, block: int, step: int) -> Sequence[Answer]:
        """Take a gradient that has landed in its destination; return what follows from it.

        Raises
        ------
        RemoteProtocolError
            The block is not as far as the trainer believes, or has the gradient already.
        """
        with self._changed:
            round_ = self._rounds[block]
            if step < round_.step:  # of before this trainer's restart: applied, or stepped without it
                return [Answer(block, round_.step, (trainer,))]
            if step > round_.step or trainer in round_.settled:
                raise RemoteProtocolError(
                    f"trainer {trainer} sent a gradient of {self._shard.blocks[block].name} for step {step}, "
                    f"expected {'the next step' if step == round_.step else f'step {round_.step}'}"
                )
            round_.arrived.add(trainer)
            ready = self._take_ready([block])
        return self._apply(ready)

    def end(self, trainer: int, step: int, absent: Sequence[int]) -> Sequence[Answer]:
        """Take a trainer's word that it has no gradient for these blocks.

        Raises
        ------
        RemoteProtocolError
            A block is unknown, or was neither sent nor is absent.
        """
        with self._changed:
            unknown = [block for block in absent if block not in self._rounds]
            early = [block for block, round_ in self._rounds.items() if round_.step < step]
            if unknown or early:
                raise RemoteProtocolError(
                    f"trainer {trainer} ends step {step}: {len(unknown)} of the absent blocks are not of "
                    f"this server, and {len(early)} blocks are not as far yet; expected none"
                )
            late = [block for block in absent if self._rounds[block].step > step]
            for block in set(absent).difference(late):
                self._rounds[block].absent.add(trainer)
            open_ = [
                self._shard.blocks[block].name
                for block, round_ in self._rounds.items()
                if round_.step == step and trainer not in round_.settled
            ]
            if open_:
                raise RemoteProtocolError(
                    f"trainer {trainer} ends step {step} but neither sent {', '.join(open_[:3])} "
                    "nor said that there is no gradient"
                )
            answers = [Answer(block, self._rounds[block].step, (trainer,)) for block in late]
            ready = self._take_ready(absent)
        return answers + self._apply(ready)

    def complete(self, trainer: int) -> Sequence[Answer]:
        """Go on without a trainer that has finished."""
        with self._changed:
            left = trainer in self._live
            self._live.discard(trainer)
            if left and self._live:
                _log.info(
                    "trainer %d takes part no more: from step %d on the mean is over %s",
                    trainer,
                    self._lowest_step(),
                    ", ".join(f"trainer {other}" for other in sorted(self._live)),
                )
            ready = self._take_ready(self._rounds)
        return self._apply(ready)

    def missing(self) -> Missing | None:
        """Return what the step in progress waits for; None while nothing has begun to wait."""
        with self._changed:
            for block, round_ in self._rounds.items():
                waited_for = self._live - round_.settled
                if round_.settled and waited_for and not round_.applying:
                    return Missing(round_.step, tuple(sorted(waited_for)), self._shard.blocks[block].name)
        return None

    def _lowest_step(self) -> int:
        return min((round_.step for round_ in self._rounds.values()), default=0)

    def _take_ready(self, blocks: Iterable[int]) -> list[int]:
        """Claim the blocks for which nothing is missing; the caller, and nobody else, applies them."""
        ready = []
        for block in blocks:
            round_ = self._rounds[block]
            if self._live and not round_.applying and round_.settled >= self._live:
                round_.applying = True
                ready.append(block)
        return ready

    def _apply(self, blocks: Sequence[int]) -> list[Answer]:
        """Step claimed blocks, outside of the lock."""
        answers = []
        for block in blocks:
            round_ = self._rounds[block]
            with self._changed:
                contributors, divisor = sorted(round_.arrived), len(self._live)
                of_step = self._hyper.get(round_.step, {})
            if contributors:
                self._shard.apply(block, contributors, divisor, of_step[contributors[0]])
            with self._changed:
                round_.step += 1
                round_.arrived.clear()
                round_.absent.clear()
                round_.applying = False
                self._changed.notify_all()
                answers.append(Answer(block, round_.step, tuple(self._live), changed=bool(contributors)))
        return answers


def _difference(found: HyperParameters, expected: HyperParameters) -> str:
    if len(found) != len(expected):
        return f"{len(found)} param groups instead of {len(expected)}"
    return ", ".join(
        f"{name}={ours.get(name)} instead of {name}={theirs.get(name)} in param group {group}"
        for group, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    )
