"""What modes have in common in which a server applies each gradient when it comes, and waits for nobody."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.modes.interface import Answer, Missing
from fleet.parameter_server.modes.trainer_steps import TrainerSteps
from fleet.parameter_server.receive_buffers import Turn
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.store import DenseStore, Update
from fleet.parameter_server.transport.arena import Arena, LazyBytes, bytes_of
from fleet.wire import HyperParameters

__all__ = ["ImmediateServer"]


class ImmediateServer:
    """The server's half of a mode without a barrier; see `ServerMode`.

    A trainer is sent a value as it is when its bytes leave: others may change it until then. Where updates
    carry what their trainer has seen, it is sent the copy that is kept for that, taken when the answer is
    made. What becomes of a gradient is the mode's `rule`.

    Parameters
    ----------
    shard : Shard
        The blocks.
    num_trainers : int
        How many trainers take part from the beginning; others may be admitted later.
    answers_gradients : bool
        Whether a gradient is answered with the value after it; otherwise a trainer asks for values.
    keeps_seen : bool
        Whether updates carry the value of the block that their trainer was sent last. A copy of all blocks is
        kept for each trainer then.
    """

    def __init__(
        self,
        shard: Shard,
        num_trainers: int,
        *,
        answers_gradients: bool = True,
        keeps_seen: bool = False,
    ) -> None:
        self._shard = shard
        self._store = shard.store
        self._answers_gradients = answers_gradients
        self._seen: SeenValues | None = SeenValues(shard.store) if keeps_seen else None
        if self._seen is not None:
            for trainer in range(num_trainers):
                self._seen.begin(trainer)
        self._steps = TrainerSteps(shard.blocks, num_trainers)

    @property
    def step(self) -> int:
        """The number of steps that the trainer which is ahead has made."""
        return self._steps.ahead

    def step_of(self, trainer: int) -> int:
        """Return the step that a trainer makes next; see `TrainerSteps`, as for what follows."""
        return self._steps.of(trainer)

    def resume(self, step: int) -> None:
        """Go on at a step that a checkpoint holds."""
        self._steps.resume(step)

    def resume_each(self, steps: Mapping[int, int]) -> None:
        """Go on with these trainers at these steps."""
        self._steps.resume_each(steps)

    def admit(self, trainer: int, incarnation: int = 0) -> None:
        """Begin anew with a trainer; what its earlier life has sent is applied already."""
        if self._steps.admit(trainer, incarnation) and self._seen is not None:
            self._seen.begin(trainer)

    def pull(self, trainer: int, step: int) -> Sequence[Answer]:
        """Return the present value of every block, whatever step the trainer is at."""
        del step
        return [self._answer(trainer, block) for block in self._shard.blocks]

    def turn(self, trainer: int, block: int) -> Turn:
        """Return that every gradient is used as soon as it has landed."""
        del trainer, block
        return Turn.NEXT

    def value(self, trainer: int, block: int) -> memoryview | LazyBytes:
        """Return the bytes of the value that the trainer sees next."""
        if self._seen is not None:
            return bytes_of(self._seen.of(trainer, block))
        return LazyBytes(
            self._shard.block_bytes[block], lambda begin, into: self._store.read(block, into, begin)
        )

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters) -> None:
        """Take the hyper-parameters of a trainer's step; other trainers may have others."""
        del step
        self._steps.hyper[trainer] = hyper_parameters

    def gradient(self, trainer: int, block: int, step: int) -> Sequence[Answer]:
        """Apply a gradient, unless an earlier life of the trainer has brought this step's.

        Raises
        ------
        FleetError
            It could not be applied; see `Store.apply`.
        """
        try:
            if self._steps.is_due(trainer, block, step):
                gradient = self._shard.buffers.landing(trainer).tensor
                origin, hyper = self._steps.origin(trainer, step), self._steps.hyper[trainer]
                seen = self._seen.of(trainer, block) if self._seen is not None else None
                self._store.apply(Update(block, gradient, hyper, (origin,), seen))
                self._steps.advance(trainer, block, step)
        finally:
            with self._shard.buffers.changed:
                self._shard.buffers.forget(trainer)
        return [self._answer(trainer, block)] if self._answers_gradients else []

    def end(self, trainer: int, step: int, absent: Sequence[int]) -> Sequence[Answer]:
        """Take a trainer's word that it has no gradient for these blocks; it gets their values all the same.

        Raises
        ------
        RemoteProtocolError
            A block is unknown, or was neither sent nor is absent.
        """
        steps, missing = self._steps.parts(trainer), set(absent)
        unknown = [block for block in absent if block not in steps]
        early = [
            self._shard.blocks[block].name
            for block, made in steps.items()
            if made <= step and block not in missing
        ]
        if unknown:
            raise RemoteProtocolError(
                f"trainer {trainer} ends step {step}: {len(unknown)} of the absent blocks are not of this "
                "server; expected none"
            )
        if early:
            raise RemoteProtocolError(
                f"trainer {trainer} ends step {step}: it neither sent {', '.join(early[:3])} nor said that "
                "there is no gradient; expected a word about each block"
            )
        for block in absent:
            self._steps.advance(trainer, block, step)
        return [self._answer(trainer, block) for block in absent] if self._answers_gradients else []

    def complete(self, trainer: int) -> Sequence[Answer]:
        """Go on without a trainer; nobody has waited for it."""
        del trainer
        return ()

    def missing(self) -> Missing | None:
        """Return None: nobody is waited for.

        Raises
        ------
        FleetError
            A gradient could not be applied.
        """
        self._store.failed.check()
        return None

    def _answer(self, trainer: int, block: int) -> Answer:
        if self._seen is not None:
            self._seen.renew(trainer, block)
        return Answer(block, self._steps.parts(trainer)[block], (trainer,))


class SeenValues:
    """The value of each block that each trainer was sent last.

    Parameters
    ----------
    store : DenseStore
    """

    def __init__(self, store: DenseStore) -> None:
        self._store = store
        self._copies: dict[int, Arena[int]] = {}

    def begin(self, trainer: int) -> None:
        """Let a trainer have seen the present values, as it is about to join."""
        self._copies[trainer] = Arena(self._store.extents)
        for block in self._store.extents:
            self.renew(trainer, block)

    def renew(self, trainer: int, block: int) -> None:
        """Let a trainer have seen the present value of a block."""
        self._store.read(block, bytes_of(self.of(trainer, block)))

    def of(self, trainer: int, block: int) -> Tensor:
        """Return the value that a trainer was sent last; renewed in place."""
        return self._copies[trainer][block]
