"""Async: each gradient is applied when it comes, and its trainer goes on with the value after it.

As in the original a gradient is not divided by the number of trainers: N trainers make N times the steps of
one. Gradients may be stale, as others have stepped since their trainer got its values; DC-ASGD corrects them
to first order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fleet.parameter_server.modes.answered import AnsweredTrainer
from fleet.parameter_server.modes.immediate import ImmediateServer
from fleet.parameter_server.modes.interface import Mode, ServerMode, Session, TrainerMode
from fleet.parameter_server.shard import Shard
from fleet.transpiler.config import DistributedMode
from fleet.update import compensate_delay
from fleet.wire import HyperParameters

__all__ = ["Async", "AsyncServer"]


@dataclass(frozen=True)
class Async(Mode):
    """The async mode.

    Attributes
    ----------
    dc_asgd : bool
        Compensate gradients for their delay.
    """

    dc_asgd: bool = False

    name: ClassVar[str] = "async"
    programs: ClassVar[DistributedMode] = DistributedMode.ASYNC
    elastic: ClassVar[bool] = True

    def agreement(self) -> Mapping[str, str]:
        """Return whether delay is compensated."""
        return {"dc_asgd": str(self.dc_asgd)}

    def make_server(self, shard: Shard, num_trainers: int) -> ServerMode:
        """Build the server's half."""
        return AsyncServer(shard, num_trainers, dc_asgd=self.dc_asgd)

    def make_trainer(self, session: Session) -> TrainerMode:
        """Build the trainer's half."""
        return AnsweredTrainer(session)


class AsyncServer(ImmediateServer):
    """The server's half of the async mode; see `ServerMode`.

    Parameters
    ----------
    shard : Shard
        The blocks to step.
    num_trainers : int
    dc_asgd : bool
        Compensate gradients for their delay: what a trainer was sent last is the value that its gradient
        was computed on.
    """

    def __init__(self, shard: Shard, num_trainers: int, *, dc_asgd: bool = False) -> None:
        super().__init__(shard, num_trainers)
        self._dc_asgd = dc_asgd

    def apply(self, trainer: int, block: int, hyper_parameters: HyperParameters) -> None:
        """Step the block by this gradient alone."""
        if self._dc_asgd:
            gradient = self.gradient_of(trainer)
            gradient.copy_(
                compensate_delay(gradient, self.shard.value(block), self.last_sent(trainer, block))
            )
        super().apply(trainer, block, hyper_parameters)
