"""What modes have in common in which a server applies each gradient when it comes, and waits for nobody."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from fleet.errors import FleetError, RemoteProtocolError
from fleet.parameter_server.modes.failed_step import FailedStep
from fleet.parameter_server.modes.interface import Answer, Missing
from fleet.parameter_server.receive_buffers import Turn
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.transport.arena import bytes_of
from fleet.wire import HyperParameters

__all__ = ["ImmediateServer"]


class ImmediateServer:
    """The server's half of a mode without a barrier; see `ServerMode`.

    A trainer is sent a copy of a value, one per trainer and block, taken when the value is decided to be
    sent: others may change the value before the bytes have left. Subclasses say what becomes of a gradient
    (`apply`) and may refuse a trainer's value until it asks (`answers_gradients`).

    Parameters
    ----------
    shard : Shard
        The blocks.
    num_trainers : int
        How many trainers take part from the beginning; others may be admitted later.
    """

    answers_gradients = True
    """Whether a gradient is answered with the value after it."""

    def __init__(self, shard: Shard, num_trainers: int) -> None:
        self.shard = shard
        self._sent = {trainer: shard.copy_values() for trainer in range(num_trainers)}
        self._hyper: dict[int, HyperParameters] = dict.fromkeys(range(num_trainers), ())
        self._steps = {trainer: dict.fromkeys(shard.blocks, 0) for trainer in range(num_trainers)}
        self._entered: dict[int, int] = {}
        """The step at which each trainer came that was not there from the beginning."""
        self._resumed: dict[int, int] = {}
        self._failed = FailedStep(shard.plan.endpoint)

    @property
    def step(self) -> int:
        """The number of steps that the trainer which is ahead has made."""
        return max((self.step_of(trainer) for trainer in list(self._steps)), default=0)

    def step_of(self, trainer: int) -> int:
        """Return the step that a trainer makes next: the one after its last that is wholly here."""
        return max(self._entered.get(trainer, 0), min(self._steps[trainer].values(), default=0))

    def resume(self, step: int) -> None:
        """Go on at a step that a checkpoint holds: every trainer makes it next."""
        for trainer in list(self._steps):
            self._steps[trainer] = dict.fromkeys(self.shard.blocks, step)

    def resume_each(self, steps: Mapping[int, int]) -> None:
        """Go on with these trainers at these steps, also with one that joins late."""
        self._resumed = dict(steps)
        for trainer in steps.keys() & self._steps.keys():
            self._steps[trainer] = dict.fromkeys(self.shard.blocks, steps[trainer])

    def admit(self, trainer: int) -> None:
        """Begin anew with a trainer; what its earlier life has sent is applied already.

        One that was not there from the beginning makes the step next that the one ahead of all makes next:
        it shares in what is left to do. Another server may have seen it come at another step, and it goes on
        at the lowest: nothing that it sends has come before.
        """
        if trainer in self._steps:
            return
        self._sent[trainer] = self.shard.copy_values()
        self._hyper[trainer] = ()
        self._entered[trainer] = self._resumed.get(trainer, self.step)
        self._steps[trainer] = dict.fromkeys(self.shard.blocks, 0)

    def pull(self, trainer: int) -> Sequence[Answer]:
        """Return the present value of every block."""
        return [self._answer(trainer, block) for block in self.shard.blocks]

    def destination(self, trainer: int, block: int) -> memoryview:
        """Return where the bytes of a gradient belong."""
        return self.shard.buffers.land(trainer, block, lambda: Turn.NEXT)

    def value(self, trainer: int, block: int) -> memoryview:
        """Return the bytes of the value as it was when the answer was made."""
        return bytes_of(self._sent[trainer][block])

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters) -> None:
        """Take the hyper-parameters of a trainer's step; other trainers may have others."""
        del step
        self._hyper[trainer] = hyper_parameters

    def gradient(self, trainer: int, block: int, step: int) -> Sequence[Answer]:
        """Apply a gradient, unless an earlier life of the trainer has brought this step's.

        Raises
        ------
        FleetError
            It could not be applied: for a reason of this trainer's own where `apply` says so by such an
            error. Any other one ends the server, whoever the trainer: the block may be half stepped.
        """
        try:
            self._take(trainer, block, step)
        finally:
            with self.shard.buffers.changed:
                self.shard.buffers.forget(trainer)
        return [self._answer(trainer, block)] if self.answers_gradients else []

    def end(self, trainer: int, step: int, absent: Sequence[int]) -> Sequence[Answer]:
        """Take a trainer's word that it has no gradient for these blocks; it gets their values all the same.

        Raises
        ------
        RemoteProtocolError
            A block is unknown, or was neither sent nor is absent.
        """
        steps, missing = self._steps[trainer], set(absent)
        unknown = [block for block in absent if block not in steps]
        early = [
            self.shard.blocks[block].name
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
            steps[block] = max(steps[block], step + 1)
        return [self._answer(trainer, block) for block in absent] if self.answers_gradients else []

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
        self._failed.check()
        return None

    def apply(self, trainer: int, block: int, hyper_parameters: HyperParameters) -> None:
        """Let a gradient change its block. Called with the block's lock held."""
        self.shard.apply(block, self.gradient_of(trainer), hyper_parameters)

    def gradient_of(self, trainer: int) -> Tensor:
        """Return the gradient of a trainer that is being applied, not a copy."""
        return self.shard.buffers.landing(trainer).tensor

    def last_sent(self, trainer: int, block: int) -> Tensor:
        """Return the value of a block that a trainer was sent last."""
        return self._sent[trainer][block]

    def _answer(self, trainer: int, block: int) -> Answer:
        with self.shard.locks[block]:
            self._sent[trainer][block].copy_(self.shard.value(block))
        return Answer(block, self._steps[trainer][block], (trainer,))

    def _take(self, trainer: int, block: int, step: int) -> None:
        with self.shard.locks[block]:
            self._failed.check()
            if step >= self._steps[trainer][block]:
                try:
                    self.apply(trainer, block, self._hyper[trainer])
                except FleetError:
                    raise
                except BaseException as error:
                    raise self._failed.note(error) from error
                self._steps[trainer][block] = step + 1
