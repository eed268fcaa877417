"""What server and trainer ask of a sync mode."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fleet.transpiler.lowering import PlannedBlock
from fleet.wire import HyperParameters

__all__ = ["Answer", "Missing", "ServerMode", "TrainerMode"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What trainers learn about a block: its value after `step` steps, or that it was not stepped."""

    block: int
    step: int
    trainers: tuple[int, ...]
    changed: bool = True


@dataclass(frozen=True, slots=True)
class Missing:
    """What a step still waits for."""

    step: int
    trainers: tuple[int, ...]
    block: str
    """One of the blocks waited for, by name."""


class ServerMode(Protocol):
    """When a block is stepped, and who gets the new value.

    Called by the receiving threads of all trainers at once; each call about one trainer comes from one
    thread. Nothing here waits for another trainer.
    """

    @property
    def step(self) -> int:
        """The number of steps that every block has made."""

    def admit(self, trainer: int) -> None:
        """Begin anew with a trainer: what an earlier life of it has sent and is not applied is dropped."""

    def pull(self, trainer: int) -> Sequence[Answer]:
        """Return the present value of every block, for a trainer that has sent nothing yet."""

    def destination(self, trainer: int, block: int) -> memoryview:
        """Return where the bytes of a gradient belong."""

    def begin(self, trainer: int, step: int, hyper_parameters: HyperParameters) -> None:
        """Take the hyper-parameters of a trainer's step."""

    def gradient(self, trainer: int, block: int, step: int) -> Sequence[Answer]:
        """Take a gradient that has landed in its destination; return what follows from it."""

    def end(self, trainer: int, step: int, absent: Sequence[int]) -> Sequence[Answer]:
        """Take a trainer's word that it has no gradient for these blocks."""

    def complete(self, trainer: int) -> Sequence[Answer]:
        """Go on without a trainer that has finished."""

    def missing(self) -> Missing | None:
        """Return what the step in progress waits for; None while nothing has begun to wait."""


class TrainerMode(Protocol):
    """What becomes of a trainer's gradients, and when its parameters change.

    Called by the training thread: per step `begin`, `send` for each gradient as it comes, `finish`.
    """

    def begin(self, hyper_parameters: HyperParameters) -> None:
        """Begin a step, just before its first gradient."""

    def send(self, block: PlannedBlock, payload: memoryview) -> None:
        """Take a block's gradient; its memory does not change before `finish` returns."""

    def finish(self, absent: Sequence[PlannedBlock]) -> None:
        """End the step, without a gradient for these blocks; the parameters are then those to go on with."""
