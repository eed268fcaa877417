"""Sync: a block is stepped once every trainer that has not completed gave its gradient, or had none.

Gradients are summed in the order of the trainers whatever the order of their arrival, so a run can be
reproduced to the bit. No trainer waits for another here: each one's gradients land in memory of its own.

A block that is clipped by a norm is averaged first, and stepped once the norm is known: by whatever call
brings the last part of it, a trainer's gradient or another server's word. No thread waits for it.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Final

from fleet.errors import ConfigurationError, DeadlineExceededError, RemoteProtocolError
from fleet.parameter_server.modes.answered import AnsweredTrainer
from fleet.parameter_server.modes.failed_step import FailedStep
from fleet.parameter_server.modes.interface import (
    Answer,
    Missing,
    Mode,
    ServerMode,
    Session,
    TellNorm,
    TrainerMode,
)
from fleet.parameter_server.modes.norms import KnownNorm, NormBook, NormPart
from fleet.parameter_server.naming import name_trainers
from fleet.parameter_server.shard import Shard
from fleet.transpiler.config import DistributedMode
from fleet.wire import NO_STEP, HyperParameters

__all__ = ["Sync", "SyncServer"]

_STEP_SECONDS: Final = 600.0
"""How long one step of a block may take."""
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
    averaged: tuple[int, ...] | None = None
    """Whose gradients have been averaged, while the block waits for the norm that clips it."""
    hyper: HyperParameters = ()
    """The hyper-parameters that it will then be stepped with."""
    again: set[int] = field(default_factory=set)
    """Trainers that came back meanwhile: they will send what is not needed any more."""

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
        self._norms = NormBook(shard.plan.norms, shard.plan.server, _tell_nobody)
        self._live = set(range(num_trainers))
        self._averaged_over = frozenset(self._live)
        self._rounds = {block: _Round() for block in shard.blocks}
        self._hyper: dict[int, dict[int, HyperParameters]] = {}
        self._failed = FailedStep(shard.plan.endpoint)
        """Why a claimed block was not stepped; it never will be."""
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

    def resume(self, step: int) -> None:
        """Go on at a step that a checkpoint holds; called before any trainer has sent a gradient."""
        with self._changed:
            for round_ in self._rounds.values():
                round_.step = step

    def admit(self, trainer: int) -> None:
        """Begin anew with a trainer: what an earlier life of it has sent and is not applied is dropped."""
        with self._changed:
            self._live.add(trainer)
            self._wait_for(lambda: not any(round_.applying for round_ in self._rounds.values()), "a step")
            for of_step in self._hyper.values():
                of_step.pop(trainer, None)
            for round_ in self._rounds.values():
                if round_.averaged is not None:
                    round_.again.add(trainer)
                else:
                    round_.arrived.discard(trainer)
                    round_.absent.discard(trainer)

    def pull(self, trainer: int) -> Sequence[Answer]:
        """Return the present value of every block, for a trainer that has sent nothing yet."""
        with self._changed:
            return [Answer(block, round_.step, (trainer,)) for block, round_ in self._rounds.items()]

    def destination(self, trainer: int, block: int) -> memoryview:
        """Return where the bytes of a gradient belong."""
        return self._shard.gradient_bytes(trainer, block)

    def value(self, trainer: int, block: int) -> memoryview:
        """Return the bytes of a value: nobody steps the block before every trainer has it and answers.

        Nobody but a trainer that came back while the block awaits a norm, which needs nothing more of it:
        that one gets a copy.
        """
        with self._changed:
            if trainer not in self._rounds[block].again:
                return self._shard.value_bytes(block)
            self._wait_for(lambda: not self._rounds[block].applying, self._shard.blocks[block].name)
            return memoryview(bytes(self._shard.value_bytes(block)))

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters) -> None:
        """Take the hyper-parameters of a trainer's step.

        Where one trainer has none, as its gradients are not finite, nobody steps: so it would be in one
        process, in which the sum is not finite.

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
            first = next((each for each, known in of_step.items() if known != NO_STEP), trainer)
            agreed = of_step.get(first, hyper_parameters)
            of_step[trainer] = hyper_parameters
        if hyper_parameters not in (NO_STEP, agreed):
            raise ConfigurationError(
                f"step {step}: trainer {trainer} has other hyper-parameters than trainer {first}: "
                f"{_difference(hyper_parameters, agreed)}; in sync mode a schedule must not depend on the "
                "trainer's own data, and a restarted trainer brings it to where the others' is: "
                "fleet.epochs(n, loader, scheduler) does"
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
            self._check_not_left_behind(trainer, block, step)
            if step < round_.step:  # of before this trainer's restart: applied, or stepped without it
                return [Answer(block, round_.step, (trainer,))]
            if step == round_.step and trainer in round_.again:
                round_.again.remove(trainer)
                return []
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
            for block in late:
                self._check_not_left_behind(trainer, block, step)
            for block in set(absent).difference(late):
                self._rounds[block].absent.add(trainer)
                self._rounds[block].again.discard(trainer)
            open_ = [
                self._shard.blocks[block].name
                for block, round_ in self._rounds.items()
                if round_.step == step and (trainer not in round_.settled or trainer in round_.again)
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
            self._live.discard(trainer)
            ready = self._take_ready(self._rounds)
        return self._apply(ready)

    def connect(self, tell: TellNorm) -> None:
        """Tell other servers this one's part of a norm through `tell` from now on."""
        self._norms = NormBook(self._shard.plan.norms, self._shard.plan.server, tell)

    def norm(self, part: NormPart) -> Sequence[Answer]:
        """Take another server's part of a norm; return what follows from it.

        Raises
        ------
        RemoteProtocolError
            This server has no part in such a norm.
        """
        try:
            with self._changed:
                present = self._rounds[self._norms.first_block(part.key)].step
            known = self._norms.hear(part, present)
        except KeyError as error:
            raise RemoteProtocolError(
                f"server {part.server} tells its part of the norm of {part.key or 'all gradients'}, in which "
                "this server has no part with it; do all replicas run the same script?"
            ) from error
        if known is None:
            return []
        with self._stepping():
            return self._apply_clipped(known)

    def missing(self) -> Missing | None:
        """Return what the step in progress waits for; None while nothing has begun to wait.

        Raises
        ------
        FleetError
            A block could not be stepped: the step in progress will never end.
        """
        with self._changed:
            self._failed.check()
            for block, round_ in self._rounds.items():
                waited_for = self._live - round_.settled
                if round_.settled and waited_for and not round_.applying and round_.averaged is None:
                    return Missing(round_.step, tuple(sorted(waited_for)), self._shard.blocks[block].name)
        if (awaited := self._norms.awaited()) is not None:
            return Missing(awaited.step, (), f"the norm of {awaited.norm.name}", awaited.servers)
        return None

    def _check_not_left_behind(self, trainer: int, block: int, step: int) -> None:
        """Refuse what is older than a step: nobody steps a block twice without a trainer that takes part."""
        if step < (now := self._rounds[block].step) - 1:
            raise RemoteProtocolError(
                f"trainer {trainer} is at step {step} of {self._shard.blocks[block].name}, expected step "
                f"{now} or {now - 1}: values were loaded after this trainer joined; load on every trainer "
                "before its first step, or on the servers: fleet.init_server(model_dir)"
            )

    def _wait_for(self, done: Callable[[], bool], what: str) -> None:
        """Wait for a step that another thread makes; with the lock held."""
        if not self._changed.wait_for(lambda: done() or self._failed.error is not None, _STEP_SECONDS):
            raise DeadlineExceededError(f"{what} has not been stepped within {_STEP_SECONDS:g} s")
        self._failed.check()

    def _lowest_step(self) -> int:
        return min((round_.step for round_ in self._rounds.values()), default=0)

    def _take_ready(self, blocks: Iterable[int]) -> list[int]:
        """Claim the blocks for which nothing is missing; the caller, and nobody else, applies them."""
        ready = []
        for block in blocks:
            round_ = self._rounds[block]
            claimed = round_.applying or round_.averaged is not None
            if self._live and not claimed and round_.settled >= self._live:
                round_.applying = True
                ready.append(block)
        return ready

    def _apply(self, blocks: Sequence[int]) -> list[Answer]:
        """Step claimed blocks, outside of the lock."""
        with self._stepping():
            return self._apply_claimed(blocks)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Let a failure to step what is claimed be known to everybody: nobody else will step it."""
        try:
            yield
        except BaseException as error:
            with self._changed:
                failure = self._failed.note(error)
                self._changed.notify_all()
            raise failure from error

    def _apply_claimed(self, blocks: Sequence[int]) -> list[Answer]:
        answers: list[Answer] = []
        for block in blocks:
            round_ = self._rounds[block]
            with self._changed:
                contributors, divisor = sorted(round_.arrived), len(self._live)
                of_step = self._hyper.get(round_.step, {})
                if NO_STEP in of_step.values():
                    contributors = []
                self._tell_of_the_mean(round_.step)
            hyper = of_step[contributors[0]] if contributors else ()
            if block in self._norms:
                answers += self._average(block, contributors, divisor, hyper)
                continue
            if contributors:
                self._shard.apply(block, contributors, divisor, hyper)
            answers.append(self._finish(block, changed=bool(contributors)))
        return answers

    def _tell_of_the_mean(self, step: int) -> None:
        """Say over whom the mean is, once it is over others than before."""
        if self._averaged_over == self._live:
            return
        self._averaged_over = frozenset(self._live)
        trainers = name_trainers(sorted(self._live))
        _log.warning("from step %d on the mean is over %s: the others have finished", step, trainers)

    def _average(
        self, block: int, contributors: Sequence[int], divisor: int, hyper: HyperParameters
    ) -> list[Answer]:
        """Average a claimed block, which then waits for its norm; step what waits for nothing any more."""
        round_ = self._rounds[block]
        squares = self._shard.average(block, contributors, divisor, hyper) if contributors else 0.0
        with self._changed:
            step = round_.step
            round_.averaged, round_.hyper, round_.applying = tuple(contributors), hyper, False
            self._changed.notify_all()
        known = self._norms.note(step, block, squares)
        return self._apply_clipped(known) if known is not None else []

    def _apply_clipped(self, known: KnownNorm) -> list[Answer]:
        """Step the blocks whose norm is known."""
        answers: list[Answer] = []
        for block in known.norm.blocks:
            round_ = self._rounds[block]
            with self._changed:
                contributors, round_.applying = round_.averaged, True
            if contributors:
                self._shard.apply_clipped(block, known.coefficient, round_.hyper)
            answers.append(self._finish(block, changed=bool(contributors)))
        return answers

    def _finish(self, block: int, *, changed: bool) -> Answer:
        """Close a block's round; the answer is for those that have sent what was awaited of them."""
        round_ = self._rounds[block]
        with self._changed:
            trainers = tuple(trainer for trainer in self._live if trainer not in round_.again)
            self._rounds[block] = _Round(round_.step + 1)
            self._changed.notify_all()
        return Answer(block, round_.step + 1, trainers, changed=changed)


def _tell_nobody(part: NormPart, servers: Sequence[int]) -> None:
    """Tell a norm that no other server has a part in."""


def _difference(found: HyperParameters, expected: HyperParameters) -> str:
    if len(found) != len(expected):
        return f"{len(found)} param groups instead of {len(expected)}"
    return ", ".join(
        f"{name}={ours.get(name)} instead of {name}={theirs.get(name)} in param group {group}"
        for group, (ours, theirs) in enumerate(zip(found, expected, strict=True))
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    )
