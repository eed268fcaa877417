"""The sync mode's steps: gradients are added in the order of the trainers, and a whole sum steps its block.

Every call about a block may bring work: the thread that finds a gradient's turn to have come adds it, and
the one that finds a sum to be whole steps the block. No thread waits for another's.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from fleet.errors import DeadlineExceededError, RemoteProtocolError, StateLostError
from fleet.parameter_server.modes.hyper import AgreedHyper
from fleet.parameter_server.modes.interface import Answer, TellNorm
from fleet.parameter_server.modes.norms import AwaitedNorm, KnownNorm, NormBook, NormPart
from fleet.parameter_server.modes.previous import PreviousValues
from fleet.parameter_server.modes.rounds import Rounds
from fleet.parameter_server.naming import name_trainers
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.store import Update
from fleet.update import sum_of_squares
from fleet.wire import NO_STEP

if TYPE_CHECKING:
    from fleet.parameter_server.receive_buffers import Buffer

__all__ = ["Stepping"]

_STEP_SECONDS: Final = 600.0
"""How long one step of a block may take."""
_AHEAD: Final = (
    "trainer %d (attempt %d) takes the values of step %d, which %d of %d blocks here have made already: what "
    "it sends for them is dropped"
)
_log = logging.getLogger(__name__)


class Stepping:
    """Sums, clips and steps the blocks of one server.

    Parameters
    ----------
    shard : Shard
    rounds : Rounds
        Guarded by the lock of the shard's buffers.
    hyper : AgreedHyper
        As the rounds.
    previous : PreviousValues
        Keeps what is stepped.
    """

    def __init__(self, shard: Shard, rounds: Rounds, hyper: AgreedHyper, previous: PreviousValues) -> None:
        self._shard = shard
        self._buffers = shard.buffers
        self._changed = shard.buffers.changed
        self._rounds = rounds
        self._hyper = hyper
        self._previous = previous
        self._norms = NormBook(shard.plan.clipping.norms, shard.plan.server, _tell_nobody)
        self._averaged_over = frozenset(rounds.live)
        self._failed = shard.store.failed

    def connect(self, tell: TellNorm) -> None:
        """Tell other servers this one's part of a norm through `tell` from now on."""
        self._norms = NormBook(self._shard.plan.clipping.norms, self._shard.plan.server, tell)

    def advance(self, blocks: Iterable[int]) -> list[Answer]:
        """Do what has become possible for these blocks; called without the lock."""
        with self._guard():
            return [answer for block in blocks if self._sum(block) for answer in self._step(block)]

    def norm(self, part: NormPart) -> Sequence[Answer]:
        """Take another server's part of a norm; return what follows from it.

        Raises
        ------
        RemoteProtocolError
            This server has no part in such a norm.
        """
        try:
            with self._changed:
                present = self._rounds.of[self._norms.first_block(part.key)].step
            known = self._norms.hear(part, present)
        except KeyError as error:
            raise RemoteProtocolError(
                f"server {part.server} tells its part of the norm of {part.key or 'all gradients'}, in which "
                "this server has no part with it; do all replicas run the same script?"
            ) from error
        if known is None:
            return []
        with self._guard():
            return self._step_clipped(known)

    def values_at(self, trainer: int, step: int) -> list[Answer]:
        """Return every block's value after so many steps, for a trainer that has sent nothing yet.

        Raises
        ------
        StateLostError
            A block is at an earlier step, or more than one ahead.
        """
        answers, rounds = [], self._rounds.of
        with self._changed:
            for block in rounds:
                name = self._shard.blocks[block].name
                self.wait_for(lambda: not rounds[block].stepping, name)  # noqa: B023
                if (value := self._previous.value(block, step)) is None:
                    raise StateLostError(
                        f"trainer {trainer} asks for {name} of step {step}, and this server, at step "
                        f"{rounds[block].step}, does not have it any more: a server has lost steps, and the "
                        "job must start again from its last checkpoint"
                    )
                if trainer in rounds[block].again:  # nothing more of it is awaited: the step may come at once
                    value = memoryview(bytearray(value))
                answers.append(Answer(block, step, (trainer,), value=value))
            if ahead := sum(round_.step > step for round_ in rounds.values()):
                attempt = self._rounds.incarnations.get(trainer, 0)
                _log.info(_AHEAD, trainer, attempt, step, ahead, len(rounds))
        return answers

    def awaited_norm(self) -> AwaitedNorm | None:
        """Return a norm that waits for other servers; None while there is none."""
        return self._norms.awaited()

    def check(self) -> None:
        """Raise what has failed, if a step has."""
        self._failed.check()

    def wait_for(self, done: Callable[[], bool], what: str) -> None:
        """Wait for what another thread does to a block; with the lock held."""
        if not self._changed.wait_for(lambda: done() or self._failed.error is not None, _STEP_SECONDS):
            raise DeadlineExceededError(f"{what} has not been stepped within {_STEP_SECONDS:g} s")
        self._failed.check()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """Let a failure to step what is claimed be known to everybody: nobody else will step it."""
        try:
            yield
        except BaseException as error:
            with self._changed:
                failure = self._failed.note(error)
                self._changed.notify_all()
            if failure is error:
                raise
            raise failure from error

    def _sum(self, block: int) -> bool:
        """Add the gradients whose turn has come; return whether the caller is to step the block."""
        while True:
            with self._changed:
                gradient = self._rounds.take_next(block)
                if gradient is None:
                    return self._rounds.take_complete(block)
                round_ = self._rounds.of[block]
                if round_.total is None and not gradient.stays:
                    self._previous.make_room(block)
                is_last = block not in self._norms and self._rounds.take_last(block)
            if round_.total is None:
                round_.total = self._buffers.begin_sum(gradient)
                spent = None
            elif is_last and round_.total.in_place:  # the value from before is about to lie in that place
                gradient.tensor.add_(round_.total.tensor)
                spent, round_.total = round_.total, gradient
            else:
                round_.total.tensor.add_(gradient.tensor)
                spent = gradient
            with self._changed:
                if spent is not None:
                    self._buffers.release(spent)
                self._rounds.added(block)
                self._changed.notify_all()
            if is_last:
                return True

    def _step(self, block: int) -> list[Answer]:
        """Step a claimed block; one that awaits a norm is averaged, and stepped once the norm is known."""
        round_ = self._rounds.of[block]
        with self._changed:
            self._tell_of_the_mean(round_.step)
            divisor = len(self._rounds.live)
            round_.hyper = self._hyper.of(round_.step, round_.summed)
        mean = round_.total.tensor if round_.total is not None and round_.hyper != NO_STEP else None
        if mean is not None and divisor > 1:
            mean.mul_(1.0 / divisor)
        if block not in self._norms:
            return [self._finish(block)]
        squares = sum_of_squares(mean) if mean is not None else 0.0
        with self._changed:
            round_.averaged, round_.stepping = True, False
            self._changed.notify_all()
        known = self._norms.note(round_.step, block, squares)
        return self._step_clipped(known) if known is not None else []

    def _step_clipped(self, known: KnownNorm) -> list[Answer]:
        """Step the blocks whose norm is known."""
        answers: list[Answer] = []
        for block in known.norm.blocks:
            round_ = self._rounds.of[block]
            with self._changed:
                round_.stepping = True
            if round_.total is not None:
                round_.total.tensor.mul_(known.coefficient)
            answers.append(self._finish(block))
        return answers

    def _finish(self, block: int) -> Answer:
        """Step a block, unless there is no gradient, and close its round.

        The answer is for those that have sent what was awaited of them.
        """
        round_ = self._rounds.of[block]
        before: Buffer | None = None
        if round_.total is not None and round_.hyper != NO_STEP:
            origins = tuple(round_.summed.values())
            with self._previous.kept(block) as before:
                self._shard.store.apply(Update(block, round_.total.tensor, round_.hyper, origins))
        with self._changed:
            trainers = tuple(trainer for trainer in self._rounds.live if trainer not in round_.again)
            self._rounds.finish(block, before)
            for spent in (round_.total, round_.before):
                if spent is not None and spent is not before:
                    self._buffers.release(spent)
            self._changed.notify_all()
        return Answer(block, round_.step + 1, trainers, changed=before is not None)

    def _tell_of_the_mean(self, step: int) -> None:
        """Say over whom the mean is, once it is over others than before."""
        if self._averaged_over == self._rounds.live:
            return
        self._averaged_over = frozenset(self._rounds.live)
        trainers = name_trainers(sorted(self._rounds.live))
        _log.warning("from step %d on the mean is over %s: the others have finished", step, trainers)


def _tell_nobody(part: NormPart, servers: Sequence[int]) -> None:
    """Tell a norm that no other server has a part in."""
